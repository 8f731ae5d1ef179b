"""What real ranks send, receive and hold, with a tiny denoiser, and what the formula says of it. Runs on ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from benchmarks.volumes.formula import KINDS, Volumes, cycle_of
from benchmarks.volumes.shapes import shapes_of
from patchpar.plan.bands import split_bands
from patchpar.plan.exchange_policy import ExchangePolicy
from patchpar.plan.step_clock import StepClock
from patchpar.shard.stale.cache import StaleBytes
from patchpar.shard.unet.discover import discover
from patchpar.strategies import parse_strategy

Figures = dict[str, Any]
"""{"sent": bytes by kind in every measured step, "received": the same, "held": bytes, "arriving": bytes}."""


@torch.no_grad()
def counted(
    this: Any, strategies: Sequence[str], name: str, size: tuple[int, int], dtype: torch.dtype = torch.float32
) -> dict[str, Figures]:
    """For every strategy {"counted": Figures, "formula": Figures, "rounds": of the last step}, after the exact ones."""
    from tests.exact import denoisers

    denoiser = denoisers.build(name).to(dtype)
    call = tree_map_only(torch.Tensor, lambda x: x.to(dtype), denoisers.call(name, *size))
    sites, shapes = discover(denoiser, denoiser.forward, (), call), shapes_of(denoiser, call)
    found = {}
    for text in strategies:
        method = parse_strategy(text)
        method = replace(method, warmup_steps=1) if method.policy.remembers else method
        comm = this.comm()
        bands = method.install(denoiser, comm, this.mesh(patch=this.world)["patch"], clock=StepClock(), split="rows")
        bands.sites = sites  # found once for all strategies
        volumes = Volumes(
            shapes=shapes,
            bands=split_bands(size[0], this.world, sites.total_stride),
            policy=method.policy,
            itemsize=dtype.itemsize,
        )
        found[text] = {
            "counted": measured(bands, denoiser, call),
            "formula": expected(volumes, this.rank),
            "rounds": dict(comm.traffic.rounds),
        }
    return found


def first_stale(policy: ExchangePolicy) -> int:
    """The first step after those that are exact: where drift decides, none is known before the second."""
    return 1 if policy.resync is None else 2


def num_steps(policy: ExchangePolicy) -> int:
    """How many are measured: one more than a cycle, for what is held of the exact step is gone after two."""
    return 1 + cycle_of(policy)


def measured(bands: Any, denoiser: nn.Module, call: Mapping[str, Any]) -> Figures:
    """Run the first, exact steps, and those that are measured."""
    comm, history, ways = bands.patch.comm, bands.history, {"sent": [], "received": []}
    first = first_stale(bands.patch.policy)
    for _ in range(first + num_steps(bands.patch.policy)):
        if history is not None:
            history.clock.next_call()
        comm.traffic.clear()
        bands.denoise(denoiser.forward, **call)
        if history is not None:
            history.clock.tick()
        ways["sent"].append(by_kind(comm.traffic.bytes_sent))
        ways["received"].append(by_kind(comm.traffic.bytes_received))
    held = history.cache.num_bytes() if history is not None else StaleBytes(0, 0)
    bands.finish()
    bands.restore()
    return {way: steps[first:] for way, steps in ways.items()} | {
        "held": held.held,
        "arriving": held.arriving,
    }


def by_kind(counted: Mapping[str, int]) -> dict[str, int]:
    """Return bytes of all kinds that the formula knows, and of others that are sent all the same."""
    return {**dict.fromkeys(KINDS, 0), **{kind: count for kind, count in counted.items() if count}}


def expected(volumes: Volumes, group_rank: int) -> Figures:
    """What the formula says of the measured steps."""
    first = first_stale(volumes.policy)
    evaluations = range(first, first + num_steps(volumes.policy))
    return {
        "sent": [dict(volumes.sent(group_rank, evaluation)) for evaluation in evaluations],
        "received": [dict(volumes.received(group_rank, evaluation)) for evaluation in evaluations],
        "held": sum(volumes.held(group_rank).values()),
        "arriving": volumes.arriving(group_rank),
    }
