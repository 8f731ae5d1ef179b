"""Divided weights on five ranks, which are threads of this process, since the pool of workers has four."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from patchpar.comm.collectives import Communicator
from patchpar.plan.mesh import Mesh
from patchpar.shard.weights.outside_reads import keep_what_is_read_outside
from tests.breadth import first_of
from tests.exact import denoisers
from tests.stages.on_ranks import built
from tests.tiny.transformers import TRANSFORMERS
from tests.tokens.piped import shared
from tests.unit.threads import on_threads
from tests.weights.on_ranks import equal, joined, same_state, state_of

RANKS = 5
NAMES = [*TRANSFORMERS, *denoisers.KINDS]
PIPELINES = [
    ("flux", "patch=5"),
    ("wan", "patch=5"),
    ("flux", "patch=5,strategy=fresh-edges:warmup_steps=1"),
    ("sd3", "patch=5,strategy=pcpp:warmup_steps=1"),
]


@pytest.mark.parametrize("kind", first_of(["sharded", "sharded apart", "hosted", "hosted apart"], "sharded apart"))
@pytest.mark.parametrize("name", first_of(NAMES, "FluxTransformer2DModel"))
def test_networks_of_diffusers(name: str, kind: str) -> None:
    made = [built(name) for _ in range(RANKS)]  # threads share torch's random state

    @torch.no_grad()
    def on_rank(transport: Any) -> list[bool]:
        (network, call), mesh = made[transport.rank], Mesh(transport.rank, range(RANKS), patch=RANKS)
        before, wanted = state_of(network), network(**call())
        weights = joined(network, Communicator(transport), mesh["patch"], kind)
        keep_what_is_read_outside(weights, lambda: network(**call()), mesh["patch"])
        found = [equal(network(**call()), wanted) for _ in range(2)]
        weights.restore()
        return [*found, same_state(network, before)]

    assert on_threads(RANKS, on_rank, deadline=60.0) == [[True] * 3] * RANKS


@pytest.mark.breadth
@pytest.mark.parametrize("kind", ["sharded", "hosted"])
@pytest.mark.parametrize(("name", "plan"), PIPELINES)
def test_pipelines(tmp_path: Path, name: str, plan: str, kind: str) -> None:
    wanted = shared(name, plan, tmp_path / "whole")
    for found in shared(name, f"{plan},weights={kind}", tmp_path / kind):
        assert torch.equal(found, wanted[0])
