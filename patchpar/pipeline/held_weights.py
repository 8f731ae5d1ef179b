"""Loading into shards: of blocks that the plan divides, a rank keeps its part from the beginning, and never all.

from_pretrained maps the files into memory. Each rank reads its own bytes, block by block, into shards; what is outside
blocks goes to the device as always.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from patchpar.comm.collectives import AllGather, AxisComm, Communicator
from patchpar.errors import PatchparError, PlanError, UnsupportedModel
from patchpar.launch.accelerators import free_bytes, release_cached
from patchpar.launch.host_memory import FreeMemory, free_memory
from patchpar.models.deferred_casts import DeferredCasts
from patchpar.models.files import floating_dtypes
from patchpar.models.hub import cached_model
from patchpar.models.loading import dtype_of, for_task, load_pipeline, with_dtype
from patchpar.pipeline.auto_weights import ModelForecast, advice, is_small, shortage
from patchpar.pipeline.divided_networks import each_in_shards, needs_no_values, part_bytes
from patchpar.plan.byte_sizes import readable_bytes
from patchpar.plan.mesh import Axis, Mesh
from patchpar.plan.plan import Plan
from patchpar.shard.verification import every_rank_has
from patchpar.shard.weights.host_store import refuse_without_host_memory
from patchpar.shard.weights.restored import restore_all
from patchpar.shard.weights.sharded import ShardedWeights
from patchpar.shard.weights.stores import moved_by_all

log = logging.getLogger(__name__)
Held = Mapping[nn.Module, ShardedWeights | None]
"""What is known of networks before their first call: their weights in shards; None for one that has to stay whole."""


def refuse_without_memory(
    device: torch.device, weight_bytes: int, model: str, options: Mapping[str, Any], base: Plan
) -> None:
    """Raise PlanError if so many bytes of weights are not free on a device, with a plan that fits.

    Not for a CPU: the caller has checked the memory of all ranks of a host together. `base`: the plan, or one for all
    devices.
    """
    free = free_bytes(device)
    if free is not None and weight_bytes > free:
        hint = advice(base, _forecast(model, options), FreeMemory(device=free, host=free_memory()))
        raise PlanError(
            f"the weights take {readable_bytes(weight_bytes)}, but {device} has only {readable_bytes(free)} free "
            f"beside the context of this process: {hint}load them in a smaller "
            "dtype (torch_dtype=torch.float16), or free some of it"
        )


def warn_without_room(
    device: torch.device, weight_bytes: int, model: str, options: Mapping[str, Any], plan: Plan
) -> None:
    """Log where weights fit on a device, and an image of the default size does not fit beside them by `plan`.

    Not for a CPU, as `refuse_without_memory`. Nothing is computed for weights that are small.
    """
    free = FreeMemory(device=free_bytes(device), host=free_memory())
    if free.device is None or is_small(weight_bytes, 1, free):
        return
    text = shortage(plan, _forecast(model, options), free)
    if text:
        log.warning("%s: %s", device, text)


def _forecast(model: str, options: Mapping[str, Any]) -> ModelForecast | None:
    """Return that of a folder or a hub name; None where it is unknown."""
    return ModelForecast.of_folder(_folder(model, options), options)


def _folder(model: str, options: Mapping[str, Any]) -> Path | None:
    """Return the folder of a model, for a hub name the one in the hub's cache; None where files are missing."""
    if Path(model).is_dir():
        return Path(model)
    found = cached_model(model, options)
    return None if found is None else found.path


def _is_cast(model: str, options: Mapping[str, Any]) -> bool:
    """Whether large weights may be cast while they are loaded: noting casts takes time for every tensor.

    In float16 both libraries keep some layers in float32.
    """
    dtype = str(dtype_of(options) or torch.float32).removeprefix("torch.")
    folder = None if dtype == "float16" else _folder(model, options)
    return folder is None or floating_dtypes(folder, options.get("variant")) != {dtype}


class HeldWeights:
    """The networks of one rank's pipeline that are in shards while no plan is installed. `connect`: to other ranks."""

    def __init__(self, rank: int, device: torch.device, connect: Callable[[], Communicator]) -> None:
        self._rank, self._device, self._connect = rank, device, connect
        self._held: dict[nn.Module, ShardedWeights | None] = {}
        self._plan: Plan | None = None
        self._ranks: Sequence[int] | None = None  # of the plan; None for the first ones

    def free_memory(self, world_size: int, *, everywhere: bool, releases: bool = False) -> FreeMemory:
        """Return what is free for a model here; with `everywhere`, the least of all ranks, on all of them.

        `releases`: after torch has given back what it keeps of freed memory.
        """
        if releases:
            release_cached(self._device)
        own = FreeMemory(device=free_bytes(self._device), host=free_memory())
        if not everywhere or world_size == 1:
            return own
        axis = Mesh(self._rank, range(world_size), patch=world_size)["patch"]
        gather = AllGather(self._connect(), axis, "verify", "free memory")
        found = gather.of_bytes(json.dumps([own.device, own.host]).encode())
        pairs = [json.loads(each) for each in found]
        return FreeMemory.least([FreeMemory(device=device, host=host) for device, host in pairs])

    def load(self, model: str, options: Mapping[str, Any], plan: Plan | None) -> Any:
        """Return the pipeline of a folder or a hub name on the host, without the blocks that are in shards by `plan`.

        Raises PlanError, UnsupportedModel.
        """
        options = with_dtype(options)
        task = options.pop("task", None)
        if not self._divides(plan):
            return for_task(load_pipeline(model, options), task)
        casts = DeferredCasts()
        with casts.loading() if _is_cast(model, options) else nullcontext():
            pipe = for_task(load_pipeline(model, options), task)
        self.hold(pipe, plan, casts)
        return pipe

    def hold(self, pipe: Any, plan: Plan | None, casts: DeferredCasts | None = None) -> bool:
        """Keep this rank's part of the blocks of `pipe` that `plan` divides; return whether it divides any.

        `casts`: of a pipeline that has been loaded for this. Any other stays as it was where a rank refuses it.
        Raises UnsupportedModel for a denoiser that cannot be divided, PlanError without host memory.
        """
        if plan is None or not self._divides(plan):
            return False
        axis, is_loaded = self._axis(plan), casts is not None
        together = not is_loaded and plan.world_size > 1
        mesh = (self._connect(), self._all_of(plan)) if together else None
        casts = DeferredCasts() if casts is None else casts
        try:
            if not is_loaded or plan.weights == "hosted":  # of a loaded one nothing is lost that a refusal would keep
                self._refuse(pipe, plan, axis, mesh)
            self._plan, self._ranks, self._held = plan, None, {}
            with nullcontext() if mesh is None else moved_by_all(mesh):
                for network, weights in each_in_shards(pipe, plan, axis, self._device, casts.copy):
                    self._held[network] = weights
        except BaseException:
            if axis.size == 1 and not is_loaded:  # a pipeline of the user's process
                self.give_back()
            self._plan, self._held = None, {}
            raise
        casts.finish()
        return True

    def _all_of(self, plan: Plan) -> Axis:
        return Mesh(self._rank, range(plan.world_size), patch=plan.world_size)["patch"]

    def _refuse(self, pipe: Any, plan: Plan, axis: Axis, mesh: AxisComm | None) -> None:
        """Raise what is wrong before anything changes, with `mesh` where it is on another rank of the plan too."""
        refusal, own = None, 0
        try:
            own = part_bytes(pipe, plan, axis, self._device)
        except PatchparError as error:
            refusal = error
        if mesh is not None and not every_rank_has(mesh, "weights to divide", refusal is None):
            raise refusal or UnsupportedModel("another rank cannot divide its weights, so that none does")
        if refusal is not None:
            raise refusal
        if plan.weights == "hosted":
            refuse_without_host_memory(own, mesh)

    @property
    def is_divided(self) -> bool:
        """Whether there are such networks."""
        return bool(self._held)

    def take(self, plan: Plan, ranks: Sequence[int] | None = None) -> Held:
        """Return the networks in shards for `plan` on `ranks`, which is installed next; others are made whole."""
        if not self._fits(plan, ranks):
            self.give_back()
        held, self._held = self._held, {}
        self._plan, self._ranks = plan, ranks
        return held

    def keep(self, held: Held) -> None:
        """Keep the networks of the plan of the last `take`, which has been uninstalled."""
        self._held.update(held)

    def give_back_for(self, method: str) -> None:
        """Make all weights whole if this method of the pipeline, or of a network, may use their values. Collective."""
        if not needs_no_values(method):
            self.give_back()

    def give_back(self, only: Any = None) -> None:
        """Make all weights whole, or those of the component `only`, of which nothing may be divided. Collective.

        Raises ExchangeError; PlanError where they do not fit, and all stay.
        """
        networks = [each for each in self._held if only is None or each is only]
        held = [x for x in map(self._held.__getitem__, networks) if x is not None]
        if held:
            comm = self._connect()
            for weights in held:
                weights.join(comm)
            restore_all(held)
        for network in networks:
            del self._held[network]
        if not self._held:
            self._plan = None

    def _divides(self, plan: Plan | None, ranks: Sequence[int] | None = None) -> bool:
        return plan is not None and plan.weights != "whole" and plan.mesh(self._rank, ranks) is not None

    def _axis(self, plan: Plan, ranks: Sequence[int] | None = None) -> Axis:
        mesh = plan.mesh(self._rank, ranks)
        assert mesh is not None, "only ranks of the plan divide weights"
        return mesh.of_one_image()

    def _fits(self, plan: Plan, ranks: Sequence[int] | None) -> bool:
        mine = self._plan
        return (
            mine is not None
            and self._divides(mine, self._ranks)
            and self._divides(plan, ranks)
            and (mine.weights, mine.resident, self._axis(mine, self._ranks))
            == (plan.weights, plan.resident, self._axis(plan, ranks))
        )
