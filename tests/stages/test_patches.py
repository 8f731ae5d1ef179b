"""Stages of several ranks give the bits of the same patches without stages, and hold their own blocks' weights only."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
from torch import Tensor

from patchpar.comm.collectives import Communicator
from patchpar.errors import PlanError, UnsupportedModel, VerificationError, WorkerDied
from patchpar.models.info import describe
from patchpar.pipeline.validate import check_plan
from patchpar.plan.mesh import Mesh
from patchpar.plan.plan import Plan
from patchpar.plan.step_clock import StepClock
from patchpar.shard.stages.block_hooks import Recorder
from patchpar.shard.stages.layout import StageLayout
from patchpar.shard.stages.patches import StagedPatches
from patchpar.shard.stages.search import CutSearch
from patchpar.shard.verification_cache import VerificationCache
from patchpar.strategies.fresh_edges import FreshEdges
from tests import tiny
from tests.breadth import first_of
from tests.stages.on_ranks import DEEP, _no_memory, built, held, of_lengths
from tests.stages.on_threads import OfRank, divided, in_stages
from tests.tensors import relative
from tests.tokens.piped import plain, shared
from tests.unit.threads import on_threads

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


@pytest.fixture
def four(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """What a function returns of a network in two stages of two patches, on each of four ranks."""
    monkeypatch.setattr("patchpar.shard.stages.denoiser.seconds_of_blocks", lambda *_: [])  # threads measure others

    def run(
        function: Callable[..., Any], *, verified: bool = True, make: Any = lambda: built(NETWORKS[0])
    ) -> list[Any]:
        networks = [make() for _ in range(4)]

        @torch.no_grad()
        def on_rank(transport: Any) -> Any:
            (network, call), mesh = networks[transport.rank], Mesh(transport.rank, range(4), stage=2, patch=2)
            cache = VerificationCache(tmp_path / str(transport.rank)) if verified else None
            return function(network, call, divided(network, Communicator(transport), mesh, cache))

        return on_threads(4, on_rank, deadline=60.0)

    return run


def test_a_network_that_is_changed_between_images(four: Any) -> None:
    """Its cuts are found anew, with all weights, also where that is announced."""

    def on_rank(network: Any, call: Any, denoiser: Any) -> bool:
        found = []
        for eps, is_announced in ((1e-6, False), (1e-2, False), (1e-1, True)):
            if is_announced:
                denoiser.forget()
            network.norm_out.norm.eps = eps
            denoiser.reset()
            found.append([denoiser.denoise(network.forward, **call())[0] for _ in range(2)])
        denoiser.restore()
        wanted = []
        for network.norm_out.norm.eps in (1e-6, 1e-2, 1e-1):
            wanted.append(network(**call())[0])
        near = [relative(x, want) < 1e-5 for each, want in zip(found, wanted, strict=True) for x in each]
        return all(near) and relative(*wanted[:2]) > 1e-4 and relative(*wanted[1:]) > 1e-4

    assert four(on_rank) == [True] * 4


@pytest.mark.parametrize("exchange", ["on", "off"])
def test_patches_are_compared_where_whole_images_have_been_in_stages(four: Any, exchange: str) -> None:
    """As in a comparison of guidance branches: weights come back, and patches have a verification of their own."""

    def on_rank(network: Any, call: Any, denoiser: Any) -> float:
        for _ in range(2):
            whole = denoiser.stages.denoise(network.forward, **call())[0]
        denoiser.stages.exchange = exchange
        return relative(denoiser.denoise(network.forward, **call())[0], whole)

    for found in four(on_rank):
        if exchange == "on":
            assert found < 1e-5
        else:
            assert isinstance(found, VerificationError)
            assert "in 2 stages of 2 patches" in str(found)


def test_a_verification_that_one_patch_alone_has_kept(four: Any, tmp_path: Path) -> None:
    """All compare again: those of the other patch cannot do so alone."""

    def on_rank(network: Any, call: Any, denoiser: Any) -> Tensor:
        found: Tensor = denoiser.denoise(network.forward, **call())[0]
        return found

    before = four(on_rank)
    for rank in (0, 2):
        shutil.rmtree(tmp_path / str(rank))
    assert all(map(torch.equal, four(on_rank), before))


@pytest.mark.parametrize("unlike", ["form", "path"])
def test_other_blocks_of_patches_than_of_whole_images(four: Any, monkeypatch: pytest.MonkeyPatch, unlike: str) -> None:
    """Or patches whose outputs have other shapes on the next stage."""

    class Unlike(Recorder):
        def __call__(self, number: int, path: str, run: Any) -> Any:
            output, before = super().__call__(number, path, run), self.calls[0]
            if unlike == "path":
                self.calls[number] = replace(self.calls[number], path=before.path)
            elif self._network.stage == 1:
                self.calls[number] = replace(self.calls[number], form=replace(before.form, tensors=()))
            return output

    def on_rank(network: Any, call: Any, denoiser: Any) -> None:
        network.stage = denoiser.stages.axis.rank
        denoiser.denoise(network.forward, **call())

    monkeypatch.setattr("patchpar.shard.stages.patches.Recorder", Unlike)
    for found in four(on_rank, verified=False):
        assert isinstance(found, UnsupportedModel), found
        assert "the stages compute different patches of FluxTransformer2DModel, or other blocks" in str(found)


@pytest.mark.parametrize("name", first_of([*DEEP], "Lumina2Transformer2DModel"))
def test_texts_of_other_lengths_in_arguments_of_the_same_shapes(four: Any, name: str) -> None:
    """Also where only one of the patches gets another number of tokens: the other one would wait for it."""

    def on_rank(network: Any, calls: Any, denoiser: Any) -> tuple[list[bool], float]:
        whole = held(network)
        found = [denoiser.denoise(network.forward, **each)[0] for each in calls]
        with patch.object(denoiser.stages._weights, "gather", _no_memory):  # what is known needs no other weights
            found += [denoiser.denoise(network.forward, **each)[0] for each in calls]
        part = held(network) / whole
        denoiser.stages.gather()
        wanted = [denoiser.patched.denoise(network.forward, **each)[0] for each in calls]
        return list(map(torch.equal, found, wanted * 2)), part

    for equal, part in four(on_rank, make=lambda: of_lengths(name)):
        assert equal == [True] * 6
        assert part < 1


def test_texts_of_other_lengths_are_refused_with_old_values(four: Any) -> None:
    """On all ranks, though only one of the patches gets another number of tokens."""

    def on_rank(network: Any, calls: Any, denoiser: Any) -> None:
        stale = FreshEdges().install(
            network, denoiser.stages.comm, denoiser.patched.mesh[1], clock=StepClock(), verifications=None
        )
        denoiser = StagedPatches(stale, denoiser.stages, denoiser._together)
        denoiser.denoise(network.forward, **calls[1])
        denoiser.denoise(network.forward, **calls[2])

    for found in four(on_rank, make=lambda: of_lengths("Lumina2Transformer2DModel")):
        assert isinstance(found, UnsupportedModel), found
        assert "gives layers.0 other shapes, other than at the first call" in str(found)


def test_a_split_that_calls_the_network_twice_is_refused(four: Any) -> None:
    """Other stages send what they have of one call."""

    def on_rank(network: Any, call: Any, denoiser: Any) -> None:
        denoiser.denoise(network.forward, **call())
        denoiser.patched.denoise = lambda *args, **kwargs: [denoiser.patched.exactly(*args, **kwargs) for _ in range(2)]
        denoiser.denoise(network.forward, **call())

    for found in four(on_rank, verified=False):
        assert isinstance(found, UnsupportedModel), found
        assert "calls a block otherwise than at the first call with the same arguments" in str(found)


def test_an_image_begins_and_ends_for_patches_and_stages() -> None:
    patched, stages = MagicMock(), MagicMock()
    denoiser = StagedPatches(patched, stages, MagicMock())
    denoiser.reset()
    denoiser.finish()
    assert [name for name, *_ in patched.method_calls] == ["reset", "finish"]
    assert [name for name, *_ in stages.method_calls] == ["reset"]


def test_patches_whose_stages_are_cut_elsewhere_are_refused(four: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a block that only one patch runs it would wait for the other one until the deadline."""
    layout = CutSearch.layout

    def by_patch(search: CutSearch, stages: int) -> StageLayout:
        found, cut = layout(search, stages), layout(search, stages).cuts[0] + 1
        return replace(found, cuts=(cut,), carried=((cut - 1,),)) if search.network.is_second else found

    def on_rank(network: Any, call: Any, denoiser: Any) -> Any:
        network.is_second = denoiser.patched.mesh[1].rank == 1
        return denoiser.denoise(network.forward, **call())

    monkeypatch.setattr(CutSearch, "layout", by_patch)
    for found in four(on_rank, verified=False):
        assert isinstance(found, UnsupportedModel), found
        assert "the ranks find different stages in FluxTransformer2DModel" in str(found)


@pytest.mark.breadth
def test_a_rank_of_a_stage_that_is_killed(ranks: Any) -> None:
    with pytest.raises(WorkerDied, match=r"rank 0 .*SIGKILL.*last exchange point 'output of a block'"):
        ranks.run("tests.stages.pipelines:killed", 4, "stage=2,patch=2")
    for found in ranks.run("tests.stages.on_ranks:two_forms", 2):  # on other workers
        assert found == [True] * 5
