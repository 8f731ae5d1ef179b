"""A network in two stages at each of its cuts, each stage a thread of this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from patchpar.comm.collectives import Communicator
from patchpar.plan.mesh import Mesh
from patchpar.shard.stages.block_hooks import BlockHooks, Recorder
from patchpar.shard.stages.denoiser import StagedDenoiser
from patchpar.shard.stages.layout import StageLayout
from patchpar.shard.stages.search import CutSearch
from tests.stages.on_ranks import built, held
from tests.unit.threads import on_threads
from tests.weights.on_ranks import equal, same_state, state_of

DEADLINE = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OfStage:
    """Whether two calls give the bits of the whole network, and one without hand-overs; and the part of weights held.

    `blocks`: calls of blocks that only this stage runs.
    """

    equal: list[bool]
    equal_without_exchange: bool
    held: float
    blocks: int
    restored: bool


@torch.no_grad()
def cuts_of(name: str) -> tuple[dict[int, tuple[int, ...] | None], int]:
    """Each cut of a network with the calls whose answers are carried over it (None: not found); how many run first."""
    network, call = built(name)
    hooks, recorder = BlockHooks(network), Recorder(network)

    def plain(on_call: Any) -> Any:
        return hooks.pass_through(on_call, network.forward, (), call())[0]

    wanted = plain(recorder)
    search = CutSearch(network, plain, recorder.calls, wanted)
    found = {cut: search.carried(cut) for cut in range(search.first + 1, len(recorder.calls))}
    hooks.close()
    return found, search.first


class CutNetwork:
    """A network on each of the ranks, and its output on one."""

    def __init__(self, name: str, ranks: int = 2) -> None:
        self._made: list[tuple[nn.Module, Callable[[], dict[str, Any]]]] = [built(name) for _ in range(ranks)]
        network, call = self._made[0]
        with torch.no_grad():
            self._wanted = network(**call())

    def at(self, cuts: Mapping[int, tuple[int, ...]]) -> list[OfStage]:
        """What each stage finds that begins at these cuts."""

        def layout(search: CutSearch, stages: int) -> StageLayout:
            return StageLayout(search.calls, search.first, tuple(cuts), tuple(cuts.values()), search.output)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(CutSearch, "layout", layout)
            patch.setattr("patchpar.shard.stages.denoiser.seconds_of_blocks", lambda *_: [])  # no cut is chosen
            found = on_threads(len(cuts) + 1, self._on_rank, deadline=DEADLINE)
        for each in found:
            if isinstance(each, Exception):
                raise each
        return found

    @torch.no_grad()
    def _on_rank(self, transport: Any) -> OfStage:
        (network, call), ranks = self._made[transport.rank], len(self._made)
        before, whole = state_of(network), held(network)
        axis = Mesh(transport.rank, range(ranks), stage=ranks)["stage"]
        stages = StagedDenoiser(network, (Communicator(transport), axis), None)
        found = [equal(stages.denoise(network.forward, **call()), self._wanted) for _ in range(2)]
        part = held(network) / whole
        stages.exchange = "off"
        alone = equal(stages.denoise(network.forward, **call()), self._wanted)
        (layout,) = stages._layouts[0][1]
        blocks = len(layout.own_calls(axis.rank))
        stages.restore()
        restored = same_state(network, before)
        return OfStage(equal=found, equal_without_exchange=alone, held=part, blocks=blocks, restored=restored)
