"""Loading into shards: of blocks that the plan divides, a rank keeps its part from the beginning, and never all.

from_pretrained maps the files into memory. Each rank reads its own bytes, block by block, into shards; what is outside
blocks goes to the device as always.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from patchpar.comm.collectives import Communicator
from patchpar.errors import PatchparError, PlanError, UnsupportedModel
from patchpar.launch.accelerators import free_bytes
from patchpar.launch.host_memory import free_memory
from patchpar.models.deferred_casts import DeferredCasts
from patchpar.models.dry_run.empty_pipeline import empty_pipeline
from patchpar.models.dry_run.plan_memory import network_bytes, plans_by_cost
from patchpar.models.loading import for_task, load_pipeline, with_dtype
from patchpar.pipeline.installed_weights import each_in_shards, needs_no_values
from patchpar.plan.mesh import Axis, Mesh
from patchpar.plan.plan import Plan
from patchpar.shard.weights.sharded import ShardedWeights

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
        raise PlanError(
            f"the weights take {weight_bytes / 2**30:.1f} GiB, but {device} has only {free / 2**30:.1f} GiB free: "
            f"{_plan_that_fits(model, options, base, free)}load them in a smaller dtype (torch_dtype=torch.float16), "
            "or free some of it"
        )


def _plan_that_fits(model: str, options: Mapping[str, Any], base: Plan, free: int) -> str:
    """Return advice to use the plan whose weights fit and that costs least time; empty where none is known."""
    if not Path(model).is_dir() or base.world_size != base.data * base.cfg * base.patch:
        return ""
    try:
        networks = network_bytes(empty_pipeline(Path(model), with_dtype(options)))
    except UnsupportedModel:  # quantised: unknown before it is loaded
        return ""
    whole = replace(base, weights="whole", resident=0, encoders="auto")
    found = (each for each in plans_by_cost(whole, networks, 0, free, free_memory()) if each.fits(free, free_memory()))
    best = next(found, None)
    if best is None:
        return "no plan for these devices has room for them: use more devices, "
    host = f", and {best.host / 2**30:.1f} GiB of host memory" if best.host else ""
    return f"use plan={str(best.plan)!r} (weights of {max(best.ranks) / 2**30:.1f} GiB on a device{host}), "


class HeldWeights:
    """The networks of one rank's pipeline that are in shards before a plan is installed. `connect`: to other ranks."""

    def __init__(self, rank: int, device: torch.device, connect: Callable[[], Communicator]) -> None:
        self._rank, self._device, self._connect = rank, device, connect
        self._held: dict[nn.Module, ShardedWeights | None] = {}
        self._plan: Plan | None = None

    def load(self, model: str, options: Mapping[str, Any], plan: Plan | None) -> Any:
        """Return the pipeline of a folder or a hub name on the host, without the blocks that are in shards by `plan`.

        Raises PlanError, UnsupportedModel.
        """
        options = with_dtype(options)
        task = options.pop("task", None)
        if not self._divides(plan):
            return for_task(load_pipeline(model, options), task)
        casts = DeferredCasts()
        with casts.loading():
            pipe = for_task(load_pipeline(model, options), task)
        self.hold(pipe, plan, casts)
        return pipe

    def hold(self, pipe: Any, plan: Plan | None, casts: DeferredCasts | None = None) -> bool:
        """Keep this rank's part of the blocks of `pipe` that `plan` divides; return whether it divides any.

        Raises UnsupportedModel for a denoiser that cannot be divided.
        """
        casts = DeferredCasts() if casts is None else casts
        if plan is None or not self._divides(plan):
            return False
        axis, self._plan, self._held = self._axis(plan), plan, {}
        try:
            for network, weights in each_in_shards(pipe, plan, axis, self._device, casts.read):
                self._held[network] = weights
        except PatchparError:
            if axis.size == 1:  # a pipeline of the user's process, which stays as it was
                self.give_back()
            raise
        casts.finish()
        return True

    def take(self, plan: Plan) -> Held:
        """Return the networks in shards for `plan`, which installs them. Those for another plan are made whole."""
        if self._plan is None or not self._fits(plan):
            self.give_back()
            return {}
        held, self._held, self._plan = self._held, {}, None
        return held

    def give_back_for(self, method: str) -> None:
        """Make all weights whole if this method of the pipeline, or of a network, may use their values. Collective."""
        if not needs_no_values(method):
            self.give_back()

    def give_back(self) -> None:
        """Make all weights whole. Collective. Raises ExchangeError."""
        held, self._held, self._plan = [x for x in self._held.values() if x is not None], {}, None
        if held:
            comm = self._connect()
            for weights in held:
                weights.join(comm)
                weights.restore()

    def _divides(self, plan: Plan | None) -> bool:
        return plan is not None and plan.weights != "whole" and self._rank < plan.world_size

    def _axis(self, plan: Plan) -> Axis:
        return Mesh(self._rank, range(plan.world_size), **plan.degrees()).of_one_image()

    def _fits(self, plan: Plan) -> bool:
        mine = self._plan
        return (
            mine is not None
            and self._divides(plan)
            and (mine.weights, mine.resident, self._axis(mine)) == (plan.weights, plan.resident, self._axis(plan))
        )
