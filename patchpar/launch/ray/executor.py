"""The executor whose ranks are actors of a Ray cluster. This process controls them and is not a rank."""

from collections.abc import Sequence
from pathlib import Path

from patchpar.launch.executor import check_deadline
from patchpar.launch.network.remote_worker import RemoteStarter
from patchpar.launch.ray.cluster import RayActors, RayCluster
from patchpar.launch.shared_secret import check_trust
from patchpar.launch.worker_executor import WorkerExecutor
from patchpar.launch.worker_start import WorkerPoolSpec


class RayExecutor(WorkerExecutor):
    """An Executor whose `number` ranks are actors of a Ray cluster, in a placement group of its own.

    `deadline`: seconds without progress; `start_timeout`: seconds until all ranks have started, with the wait for free
    cores or GPUs. Other arguments are those of LocalExecutor. If ranks and caller are on several hosts they need
    `secret_file`, the same secret on all of them, or `trusted_network`. Raises LaunchError without a cluster, or one
    that is too small; PlanError if Ray is not installed, and for a secret file that cannot be used.
    """

    def __init__(  # noqa: PLR0913 - each is a setting of its own, by name
        self,
        number: int,
        engine: str,
        *,
        deadline: float = 60.0,
        start_timeout: float = 600.0,
        preload: Sequence[str] = (),
        one_by_one: bool = False,
        secret_file: str | Path | None = None,
        trusted_network: bool = False,
    ) -> None:
        secret, is_trusted = check_trust(secret_file, trusted_network)
        cluster = RayCluster(number)
        spec = WorkerPoolSpec(
            devices=cluster.devices,
            engine=engine,
            deadline=check_deadline("deadline", deadline),
            start_timeout=check_deadline("start_timeout", start_timeout),
            preload=tuple(preload),
            start_method="spawn",
            one_by_one=one_by_one,
        )
        self._actors = RayActors(cluster)
        starter = RemoteStarter(
            spec, self._actors, [cluster.device] * number, secret_file=secret, trusted_network=is_trusted
        )
        super().__init__(spec, starter)

    def close(self) -> None:
        """End the actors, and give their resources back. Idempotent."""
        super().close()
        self._actors.close()
