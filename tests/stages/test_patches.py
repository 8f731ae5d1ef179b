"""Stages of several ranks give the bits of the same patches without stages, and hold their own blocks' weights only."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from patchpar.errors import PlanError, WorkerDied
from patchpar.models.info import describe
from patchpar.pipeline.validate import check_plan
from patchpar.plan.plan import Plan
from tests import tiny
from tests.breadth import first_of
from tests.stages.on_threads import OfRank, in_stages
from tests.tensors import relative
from tests.tokens.piped import plain, shared

NETWORKS = ["FluxTransformer2DModel", "sdxl", "SD3Transformer2DModel", "WanTransformer3DModel", "HunyuanDiT2DModel"]
PIPELINES = [
    ("flux", "stage=2,patch=2", "patch=2"),
    ("sd3", "stage=2,patch=3", "patch=3"),
    ("sdxl", "stage=2,patch=2", "patch=2"),
    ("qwen", "stage=2,patch=2", "patch=2"),
    ("qwen", "stage=2,patch=2,ratio=3:1", "patch=2,ratio=3:1"),
    ("sdxl", "stage=2,patch=2,ratio=1:2", "patch=2,ratio=1:2"),
    ("wan", "cfg=2,stage=2,patch=2", "cfg=2,patch=2"),
    ("sd3", "cfg=2,stage=2,patch=2", "cfg=2,patch=2"),
    ("flux", "stage=2,patch=2,strategy=exact:ulysses=2", "patch=2,strategy=exact:ulysses=2"),
    ("flux", "stage=2,patch=2,strategy=fresh-edges", "patch=2,strategy=fresh-edges"),
    ("sdxl", "stage=2,patch=2,strategy=fresh-edges", "patch=2,strategy=fresh-edges"),
    ("sdxl", "stage=2,patch=2,strategy=displaced", "patch=2,strategy=displaced"),
    ("sd3", "stage=2,patch=2,strategy=pcpp", "patch=2,strategy=pcpp"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where verifications are kept, so that what is wrong afterwards is not verified again."""
    return tmp_path_factory.mktemp("verifications")


@pytest.fixture(scope="module")
def exchanged(folder: Path) -> Callable[[str, int, int], list[OfRank]]:
    """What stages of patches predict, once for all tests of a network."""
    return cache(lambda name, stages, patches: in_stages(name, stages, patches, folder / name, "on"))


@pytest.mark.parametrize(("stages", "patches"), first_of([(2, 2), (3, 2), (2, 3)], (2, 2)))
@pytest.mark.parametrize("name", first_of(NETWORKS, NETWORKS[0]))
def test_stages_of_patches_are_the_same_patches(
    tmp_path: Path, exchanged: Any, name: str, stages: int, patches: int
) -> None:
    """A call of a form three times: found and verified at the first, without others' weights in all of them."""
    wanted = in_stages(name, 1, patches, tmp_path / "patches", "on")
    found = exchanged(name, stages, patches)
    for number, each in enumerate(found):
        stage, patch = divmod(number, patches)
        assert all(map(torch.equal, each.predictions, wanted[patch].predictions))
        assert each.held < 1
        assert each.restored
        handed_over = {"stage": each.carried} if stage < stages - 1 else {"prediction": each.predictions[0].nbytes}
        of_stage = {kind: count for kind, count in each.sent.items() if kind in ("stage", "prediction")}
        gathered = wanted[patch].sent.get("prediction", 0)  # by patches, on each stage
        times = stages - 1 if stage == stages - 1 else 1
        assert of_stage.pop("prediction", 0) == gathered + times * handed_over.pop("prediction", 0)
        assert of_stage == handed_over
        assert each.carried < each.whole or stage == stages - 1


@pytest.mark.parametrize("name", first_of(NETWORKS, NETWORKS[0]))
def test_without_the_exchange_it_is_wrong(folder: Path, exchanged: Any, name: str) -> None:
    wanted = exchanged(name, 2, 2)
    for off in ("stages", "patches"):
        for found, right in zip(in_stages(name, 2, 2, folder / name, off), wanted, strict=True):
            assert relative(found.predictions[0], right.predictions[0]) > 1e-3


@pytest.mark.parametrize(("name", "plan", "without"), first_of(PIPELINES, PIPELINES[0]))
def test_pipelines(tmp_path: Path, name: str, plan: str, without: str) -> None:
    wanted = shared(name, without, tmp_path / "without")[0]
    for found in shared(name, plan, tmp_path):
        assert torch.equal(found, wanted)
    if Plan.parse(plan).strategy.name == "exact":
        assert relative(wanted, plain(name)) < 1e-5


def test_exact_steps_that_changes_in_all_blocks_decide_upon_are_refused() -> None:
    pipe = tiny.build("flux").pipe
    plan = Plan.parse("stage=2,patch=2,strategy=fresh-edges:quality=40")
    with pytest.raises(PlanError, match=r"`quality` and `budget` decide .*leave them out, or use stage=1"):
        check_plan(describe(pipe), plan)


@pytest.mark.breadth
def test_a_rank_of_a_stage_that_is_killed(ranks: Any) -> None:
    with pytest.raises(WorkerDied, match=r"rank 0 .*SIGKILL.*last exchange point 'output of a block'"):
        ranks.run("tests.stages.pipelines:killed", 4, "stage=2,patch=2")
    for found in ranks.run("tests.stages.on_ranks:two_forms", 2):  # on other workers
        assert found == [True] * 5
