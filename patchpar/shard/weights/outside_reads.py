"""Blocks whose weights are read while they do not run, found by a call with NaN in weights that are in no slot."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from patchpar.comm.collectives import AllGather
from patchpar.plan.mesh import Axis
from patchpar.shard.verification import fails_or_has_nan, uncounted
from patchpar.shard.weights.sharded import ShardedWeights

log = logging.getLogger(__name__)


def keep_what_is_read_outside(
    weights: ShardedWeights, run: Callable[[], Any], together: Axis | None = None
) -> list[str]:
    """Keep whole, from now on, every block whose weights are read while it does not run; return their names.

    `run` calls the network, without side effects, and returns its output. It is called once with NaN in all weights
    that are in no slot, and again for smaller and smaller groups if these reach the output. A model whose own output
    has NaN keeps all blocks whole. Only floating-point weights can be found. `together`: the ranks that call the
    network at the same time; those of the weights' axis where it is None. Collective. Raises what `run` raises where
    it fails with all weights too; blocks are as before then.
    """
    with uncounted(weights.comm):
        candidates, found = weights.in_slots, list[int]()
        axis = weights.axis if together is None else together
        if weights.comm.transport.device.type == "meta":  # nothing can be found without values
            weights.record(run)
        else:
            # Again until nothing is found: where a block gives out its weight, the one after it in that slot is found.
            while candidates and _is_read_outside(weights, run, candidates, axis):
                weights.record(run)  # a call that fails anyhow says nothing of weights
                more = _narrowed(weights, run, candidates, axis)
                weights.settle()
                for index in more:
                    weights.keep_whole(index)
                found, candidates = [*found, *more], weights.in_slots
        weights.settle()
        if found:
            weights.record(run)
    weights.forget_order()
    names = [weights.blocks[index].name for index in sorted(found)]
    if names and weights.axis.rank == 0:
        kind = type(weights.network).__name__
        log.warning("%s: code outside %s reads their weights, so they stay whole", kind, ", ".join(names))
    return names


def _is_read_outside(weights: ShardedWeights, run: Callable[[], Any], group: list[int], axis: Axis) -> bool:
    """Whether NaN in weights of these blocks reaches the output while they do not run, on any rank."""
    with weights.poisoned(group):
        own = fails_or_has_nan(partial(weights.record, run))
    flag = torch.tensor([own], device=weights.comm.transport.device)
    return any(bool(x) for x in AllGather(weights.comm, axis, "verify", "poisoned weights").same(flag))


def _narrowed(weights: ShardedWeights, run: Callable[[], Any], group: list[int], axis: Axis) -> list[int]:
    """Return those of a group that are read outside, of which at least one is; all if no part of it shows which."""
    if len(group) == 1:
        return group
    half, found = len(group) // 2, list[int]()
    for part in (group[:half], group[half:]):
        if _is_read_outside(weights, run, part, axis):
            found += _narrowed(weights, run, part, axis)
    return found or group
