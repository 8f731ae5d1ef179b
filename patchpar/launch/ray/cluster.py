"""Actors in a placement group of a Ray cluster, one for each rank."""

from __future__ import annotations

import contextlib
import importlib.util
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from patchpar.errors import LaunchError, PlanError
from patchpar.launch.accelerators import CUDA
from patchpar.launch.network.remote_rank import ReadyRank, SessionStart
from patchpar.launch.ray.placement import bundles_by_rank, check_resources

LOOK_SECONDS = 1.0  # between looks whether the cluster can still have the ranks
CPU, GPU = "CPU", "GPU"


def check_installed() -> None:
    """Raise PlanError if Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise PlanError("devices='ray:N' needs Ray, which is not installed: pip install 'patchpar[ray]'")


class RayCluster:
    """The cluster of this process, for `number` ranks: on GPUs if it has any, else on CPU cores.

    Connects to it unless the program has, by Ray's own rules: RAY_ADDRESS, or the cluster of this machine. The
    connection stays for the rest of the process, since others may use it. Raises PlanError without Ray, and LaunchError
    without a cluster, or if it has fewer than `number` of them.
    """

    def __init__(self, number: int) -> None:
        check_installed()
        import ray

        if not ray.is_initialized():
            _connect()
        if ray.util.client.ray.is_connected():
            raise LaunchError(
                "this program uses Ray through ray:// (Ray Client), from outside of the cluster, where ranks cannot be "
                "reached: run it on a node, for example with `ray job submit`"
            )
        self.number = number
        self.resource = GPU if ray.cluster_resources().get(GPU, 0) >= 1 else CPU
        self.check()

    @property
    def device(self) -> str:
        """Torch's name for the device of a rank, where it runs: Ray lets an actor see its own GPU only."""
        return "cpu" if self.resource == CPU else f"{CUDA}:0"

    @property
    def devices(self) -> tuple[str, ...]:
        """A name for the device of each rank, a GPU of its own where there are any."""
        kind = self.device.partition(":")[0]
        return tuple(kind if self.resource == CPU else f"{kind}:{rank}" for rank in range(self.number))

    def check(self) -> None:
        """Raise LaunchError if the cluster, as it is now, has too few GPUs or cores for all ranks."""
        import ray

        nodes = sum(bool(node["Alive"]) for node in ray.nodes())
        check_resources(self.number, self.resource, ray.cluster_resources().get(self.resource, 0), nodes)

    def shortage(self) -> str:
        """Return what is free, for people who wait for it."""
        import ray

        free = ray.available_resources().get(self.resource, 0)
        return (
            f"{free:g} {self.resource}s of the Ray cluster are free, and {self.number} ranks take one each: wait for "
            "other jobs (`ray status` lists them), use fewer ranks, or a longer start_timeout="
        )


class RayActor:
    """One actor, see RankActor. `schedule`: makes one on a node, by a time of time.monotonic()."""

    def __init__(self, schedule: Callable[[float], Any], cluster: RayCluster, give_up: float) -> None:
        self._schedule, self._cluster = schedule, cluster
        self._actor = schedule(give_up)
        self._ready: Any = None  # of `prepare`
        self._end: Any = None  # of `serve`

    def prepare(self, start: SessionStart) -> None:
        """See RankActor."""
        self._start, self._ready = start, self._actor.prepare.remote(start)

    def ready(self, give_up: float) -> ReadyRank:
        """See RankActor."""
        import ray

        while True:
            self._wait(give_up)
            try:
                ready: ReadyRank = ray.get(self._ready)
            except ray.exceptions.RayError as error:
                if not _has_lost_node(error) or time.monotonic() > give_up:
                    raise LaunchError(
                        f"an actor of Ray could not start: {error}\nAll nodes need the same patchpar, Python and torch"
                    ) from error
                # Ray takes seconds to notice that a node is lost, and places actors there until then.
                self._actor = self._schedule(give_up)
                self.prepare(self._start)
            else:
                return ready

    def _wait(self, give_up: float) -> None:
        """Wait for the end of `prepare`. Raises LaunchError at `give_up`, and if the cluster gets too small."""
        import ray

        while not ray.wait([self._ready], timeout=LOOK_SECONDS)[0]:
            self._cluster.check()
            if time.monotonic() > give_up:
                raise LaunchError(f"an actor has not started in time: {self._cluster.shortage()}")

    def serve(self, token: bytes, seconds: float) -> None:
        """See RankActor."""
        self._end = self._actor.serve.remote(token, seconds)

    def has_ended(self) -> bool:
        """See RankActor."""
        import ray

        if not ray.is_initialized():  # by then Ray has ended them; and asking would connect again
            return True
        return self._end is not None and bool(ray.wait([self._end], timeout=0)[0])

    def how_it_ended(self) -> str:
        """See RankActor."""
        import ray

        if not ray.is_initialized():  # asking would connect again
            return "ended with this program's connection to Ray"
        try:
            ray.get(self._end, timeout=0)
        except (ray.exceptions.RayError, OSError) as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            return f"ended ({' '.join((lines[0], *lines[-1:]) if len(lines) > 1 else lines)})"
        return "ended"

    def kill(self) -> None:
        """See RankActor."""
        import ray

        if ray.is_initialized():
            with contextlib.suppress(ray.exceptions.RayError, ValueError):
                ray.kill(self._actor, no_restart=True)


class RayActors:
    """The actors of all ranks, in one placement group, see RankActors.

    The group is made at the first start, and stays: Ray places what was on a node that is lost on another one.
    """

    def __init__(self, cluster: RayCluster) -> None:
        import ray

        self._cluster, self.node = cluster, ray.get_runtime_context().get_node_id()
        self._group: Any = None
        self._bundles: tuple[int, ...] = ()

    def start(self, ranks: Sequence[int], give_up: float) -> Mapping[int, RayActor]:
        """See RankActors."""
        return {rank: RayActor(partial(self._actor_of, rank), self._cluster, give_up) for rank in ranks}

    def _actor_of(self, rank: int, give_up: float) -> Any:
        """Return a new actor in the bundle of a rank."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from patchpar.launch.ray.ray_rank import RayRank

        nodes = self._placed(give_up)
        self._bundles = self._bundles or bundles_by_rank(nodes)
        where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=self._bundles[rank])
        options = {"num_cpus": 1, "num_gpus": int(self._cluster.resource == GPU), "scheduling_strategy": where}
        return ray.remote(RayRank).options(**options, max_restarts=0, max_task_retries=0).remote()

    def _placed(self, give_up: float) -> dict[int, str]:
        """Return the node of each bundle, once all have one."""
        from ray.util import placement_group, placement_group_table, remove_placement_group

        cluster = self._cluster
        cluster.check()
        if self._group is None:
            bundle = {CPU: 1.0, **({GPU: 1.0} if cluster.resource == GPU else {})}
            self._group = placement_group([bundle] * cluster.number, strategy="PACK")
            weakref.finalize(self, _remove, remove_placement_group, self._group)
        while not self._group.wait(timeout_seconds=LOOK_SECONDS):
            cluster.check()
            if time.monotonic() > give_up:
                raise LaunchError(f"the ranks have not been placed in time: {cluster.shortage()}")
        return dict(placement_group_table(self._group)["bundles_to_node_id"])

    def close(self) -> None:
        """Give the resources back. Idempotent."""
        from ray.util import remove_placement_group

        group, self._group = self._group, None
        if group is not None:
            _remove(remove_placement_group, group)


def _has_lost_node(error: Exception) -> bool:
    """Whether an actor has ended before it worked, by no fault of its own."""
    import ray

    return isinstance(error, ray.exceptions.RayActorError) and not error.actor_init_failed


def _remove(remove: Any, group: Any) -> None:
    import ray

    if ray.is_initialized():  # else Ray has removed it with the job
        remove(group)


def _connect() -> None:
    import ray

    try:
        ray.init(address="auto", configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise LaunchError(
            f"devices='ray:N': no Ray cluster is reached ({str(error).splitlines()[0]}). Start one on this machine "
            "with `ray start --head`, or name one: RAY_ADDRESS=HOST:6379 in the environment, or ray.init(address=...) "
            "before"
        ) from error
