"""Stages give the bits of the whole network wherever its blocks are cut, not only where work is balanced."""

from __future__ import annotations

import pytest

from tests.breadth import first_of
from tests.stages.every_cut import CutNetwork, cuts_of
from tests.stages.test_stages import NETWORKS

IN_EVERY_RUN = ("FluxTransformer2DModel", "HunyuanDiT2DModel", "PixArtTransformer2DModel", "SD3Transformer2DModel")


@pytest.mark.parametrize("name", first_of(NETWORKS, *IN_EVERY_RUN))
def test_two_stages_at_every_cut(name: str) -> None:
    cuts, _ = cuts_of(name)
    assert cuts
    network = CutNetwork(name)
    for cut, carried in cuts.items():
        assert carried is not None, f"no cut at block {cut}"
        for each in network.at({cut: carried}):
            assert each.equal == [True, True]
            assert not each.equal_without_exchange
            assert each.held < 1
            assert each.restored


@pytest.mark.parametrize("name", first_of(NETWORKS, IN_EVERY_RUN[0]))
def test_a_stage_for_each_block(name: str) -> None:
    """All cuts at once."""
    cuts, _ = cuts_of(name)
    found = CutNetwork(name, len(cuts) + 1).at({cut: carried for cut, carried in cuts.items() if carried is not None})
    assert all(each.equal == [True, True] and each.restored for each in found)
    assert [each.blocks for each in found] == [1] * len(found)
    assert not any(each.equal_without_exchange for each in found)
