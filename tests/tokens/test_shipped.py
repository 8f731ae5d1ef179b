"""Plans that come with the package: what is found today, for models of any depth, and verified all the same."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import SD3Transformer2DModel
from peft import LoraConfig
from torch import Tensor, nn

from patchpar.comm.collectives import Communicator
from patchpar.models.files import embedded_model
from patchpar.plan.exchange_policy import ExchangePolicy
from patchpar.plan.mesh import Axis
from patchpar.shard.attention.all_gather import attend_gathered
from patchpar.shard.transformer import plan_lookup as search
from patchpar.shard.transformer.attention import TokenSplit
from patchpar.shard.transformer.denoiser import TokenDenoiser
from patchpar.shard.transformer.install import TransformerSharder
from patchpar.shard.transformer.probe.discover import discover_tokens
from patchpar.shard.transformer.shipped_plans import ShippedPlans, read, shipped_for
from patchpar.shard.transformer.token_plan import TokenPlan, TokenRows
from patchpar.shard.verification_cache import VerificationCache
from tests.breadth import first_of
from tests.tensors import relative
from tests.tiny.transformers import TRANSFORMERS
from tests.unit.threads import on_threads
from tests.versions import needs_diffusers

from .on_ranks import PipelineCase
from .ranks import LIMIT, error, plan_of, predictions
from .ship import CLASSES, FOLDER, PIPED, covers, deeper, same, with_other_patches
from .test_pipelines import generate, plain

pytestmark = needs_diffusers("0.42", "blocks with the code that some of these plans are of")
FLUX, PIXART, SD3 = "FluxTransformer2DModel", "PixArtTransformer2DModel", "SD3Transformer2DModel"
SOME = first_of(CLASSES, FLUX, PIXART)


@cache
def shipped(name: str) -> ShippedPlans:
    return read((FOLDER / f"{name}.json").read_text())


def test_every_class_has_a_file() -> None:
    assert sorted(file.stem for file in FOLDER.glob("*.json")) == sorted(CLASSES)


@pytest.mark.parametrize("name", SOME)
def test_it_is_what_is_found_today(name: str) -> None:
    """Block by block. Where this fails: `make plans`."""
    model = TRANSFORMERS[name].build()
    found, known = plan_of(name), shipped(name).plan_for(model)
    assert known is not None
    for block in found.blocks:
        for path in block.paths:
            other = known.find(path, block.signature)
            assert other is not None
            assert same(block, other) or covers(other, block)
    assert found.others <= known.others
    assert known.latent == found.latent


@pytest.mark.parametrize("name", SOME)
def test_it_serves_deeper_models(name: str) -> None:
    """It was found with other numbers of blocks."""
    tiny = deeper(TRANSFORMERS[name])
    models = [tiny.build() for _ in range(2)]
    with torch.no_grad():
        want = predictions(models[0](**tiny.call(1)))
    plan = shipped(name).plan_for(models[0])
    assert plan is not None
    assert len(plan.paths) > len(plan_of_shallow(name).paths)
    assert error(split(models, plan, tiny.call(1)), want) <= LIMIT
    assert error(split(models, plan, tiny.call(1), None), want) > 100 * LIMIT


def plan_of_shallow(name: str) -> TokenPlan:
    plan = shipped(name).plan_for(TRANSFORMERS[name].build())
    assert plan is not None
    return plan


def split(models: list[nn.Module], plan: TokenPlan, call: dict[str, Any], mode: Any = attend_gathered) -> Any:
    def on_rank(transport: Any) -> list[Tensor]:
        model, axis = models[transport.rank], Axis("patch", transport.rank, 2, (0, 1))
        shard = TransformerSharder(model, plan, TokenSplit(Communicator(transport), axis, mode))
        try:
            with torch.no_grad():
                return predictions(shard.denoise(model.forward, **call))
        finally:
            shard.restore()

    return on_threads(2, on_rank, deadline=30.0)


def first_use(models: list[nn.Module], call: dict[str, Any], folder: Path) -> list[tuple[Tensor, TokenDenoiser]]:
    """The prediction of each rank as a user gets it, and its denoiser."""

    def on_rank(transport: Any) -> tuple[Tensor, TokenDenoiser]:
        rank, model = transport.rank, models[transport.rank]
        mesh = (Communicator(transport), Axis("patch", rank, len(models), tuple(range(len(models)))))
        denoiser = TokenDenoiser(model, mesh, ExchangePolicy(), verifications=VerificationCache(folder / str(rank)))
        try:
            with torch.no_grad():
                return predictions(denoiser.denoise(model.forward, **call))[0], denoiser
        finally:
            denoiser.restore()

    found = on_threads(len(models), on_rank, deadline=30.0)
    for each in found:
        if isinstance(each, Exception):
            raise each
    return found


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The denoisers that are watched, in order."""
    watched: list[str] = []
    discover: Callable[..., TokenPlan] = search.discover_tokens

    def noted(denoiser: nn.Module, *args: Any, **kwargs: Any) -> TokenPlan:
        watched.append(type(denoiser).__name__)
        return discover(denoiser, *args, **kwargs)

    monkeypatch.setattr(search, "discover_tokens", noted)
    return watched


def models_of(name: str) -> tuple[list[nn.Module], Tensor]:
    """One for each of two ranks, and what they predict."""
    models = [TRANSFORMERS[name].build() for _ in range(2)]
    with torch.no_grad():
        return models, predictions(models[0](**TRANSFORMERS[name].call(0)))[0]


def test_nothing_is_searched_for(searches: list[str], tmp_path: Path) -> None:
    models, want = models_of(FLUX)
    for got, denoiser in first_use(models, TRANSFORMERS[FLUX].call(0), tmp_path):
        assert relative(got, want) <= LIMIT
        assert denoiser.error is not None  # it was verified
    assert not searches


def test_with_an_adapter_on(searches: list[str], tmp_path: Path) -> None:
    models, before = models_of(FLUX)
    for model in models:
        torch.manual_seed(0)
        model.add_adapter(LoraConfig(r=4, init_lora_weights=False, target_modules=["to_q", "to_v", "proj_mlp"]))  # type: ignore[operator]
    with torch.no_grad():
        want = predictions(models[0](**TRANSFORMERS[FLUX].call(0)))[0]
    for got, _ in first_use(models, TRANSFORMERS[FLUX].call(0), tmp_path):
        assert relative(got, want) <= LIMIT
    assert relative(before, want) > 100 * LIMIT
    assert not searches


def wrong(name: str) -> ShippedPlans:
    """A plan that takes the text for the image."""
    right = shipped(name)
    found = right.found[0]
    keys = TokenRows(2, 0, None)
    blocks = [
        replace(block, attentions=tuple(replace(call, keys=keys) for call in block.attentions), text=None)
        for block in found.plan.blocks
    ]
    return replace(right, found=(replace(found, plan=replace(found.plan, blocks=tuple(blocks))),))


def test_one_that_does_not_verify(
    searches: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The model is watched after all, a person is told, and the next program need not find out again."""
    monkeypatch.setattr(search, "shipped_for", lambda denoiser: wrong(FLUX))
    models, want = models_of(FLUX)
    with caplog.at_level(logging.WARNING):
        for got, _ in first_use(models, TRANSFORMERS[FLUX].call(0), tmp_path):
            assert relative(got, want) <= LIMIT
    assert searches == [FLUX] * 2
    assert len(caplog.records) == 1
    assert "FluxTransformer2DModel: the known plan for splitting its tokens does not fit" in caplog.text
    assert "differs from the plain one by" in caplog.text
    for got, _ in first_use(models, TRANSFORMERS[FLUX].call(0), tmp_path):
        assert relative(got, want) <= LIMIT
    assert len(searches) == 2


def test_a_plan_that_is_not_shipped_is_found_once(
    searches: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "shipped_for", lambda denoiser: None)
    models, want = models_of(PIXART)
    for _ in range(2):
        for got, _ in first_use(models, TRANSFORMERS[PIXART].call(0), tmp_path):
            assert relative(got, want) <= LIMIT
    assert searches == [PIXART] * 2  # by each rank, which has a folder of its own


@pytest.mark.parametrize("without", [0, 1])
def test_a_rank_without_a_kept_plan_has_that_of_the_other(
    searches: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without: int
) -> None:
    """It searches for none alone, for which the other would have to gather weights that are divided between them."""
    monkeypatch.setattr(search, "shipped_for", lambda denoiser: None)
    models, want = models_of(PIXART)
    call = TRANSFORMERS[PIXART].call(0)
    first_use(models, call, tmp_path)
    shutil.rmtree(tmp_path / str(without))
    for got, _ in first_use(models, call, tmp_path):
        assert relative(got, want) <= LIMIT
    assert searches == [PIXART] * 2, "by each rank in its first use"


def test_blocks_of_another_version(
    searches: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    models, want = models_of(PIXART)
    block: Any = type(models[0].get_submodule("transformer_blocks.0"))
    before = block.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return before(self, *args, **kwargs)

    monkeypatch.setattr(block, "forward", forward)
    assert shipped(PIXART).plan_for(models[0]) is None
    with caplog.at_level(logging.WARNING):
        for got, _ in first_use(models, TRANSFORMERS[PIXART].call(0), tmp_path):
            assert relative(got, want) <= LIMIT
    assert searches == [PIXART] * 2
    assert f"its blocks differ from those of diffusers {shipped(PIXART).diffusers}" in caplog.text


def test_without_verification_nothing_is_taken_for_granted(searches: list[str]) -> None:
    models, want = models_of(PIXART)

    def on_rank(transport: Any) -> Tensor:
        model, axis = models[transport.rank], Axis("patch", transport.rank, 2, (0, 1))
        denoiser = TokenDenoiser(model, (Communicator(transport), axis), ExchangePolicy())
        with torch.no_grad():
            return predictions(denoiser.denoise(model.forward, **TRANSFORMERS[PIXART].call(0)))[0]

    for got in on_threads(2, on_rank, deadline=30.0):
        assert relative(got, want) <= LIMIT
    assert searches == [PIXART] * 2


def test_blocks_that_a_model_lacks() -> None:
    """Of SD3's, the second attention is in some layers only, and in most models in none."""
    tiny = TRANSFORMERS[SD3]
    plain = replace(tiny, config={**tiny.config, "dual_attention_layers": ()}).build()
    plan = shipped(SD3).plan_for(plain)
    assert plan is not None
    assert {len(block.attentions) for block in plan.blocks} == {1}
    assert {len(block.attentions) for block in plan_of_shallow(SD3).blocks} == {1, 2}


def test_the_embedded_transformer_has_a_plan() -> None:
    """Its patches are larger than those of the small model; a plan says where they lie in the latent."""
    config = json.loads((embedded_model("embedded-dit") / "transformer" / "config.json").read_text())
    with torch.device("meta"):
        model = SD3Transformer2DModel.from_config(config)
    plan = shipped(SD3).plan_for(model)
    assert plan is not None
    assert len(plan.paths) == config["num_layers"]
    assert {block.origin.patches for block in plan.blocks if block.origin is not None} == {(4, 4)}
    (large,) = with_other_patches(SD3)
    small = large.build()
    found = discover_tokens(small, small.forward, (), large.call(0))
    known = shipped(SD3).plan_for(small)
    assert known is not None
    for block in found.blocks:
        for path in block.paths:
            other = known.find(path, block.signature)
            assert other is not None
            assert same(block, other)


def test_classes_of_other_people() -> None:
    class FluxTransformer2DModel(nn.Module):
        pass

    assert shipped_for(FluxTransformer2DModel()) is None


PIPELINES = sorted(name for names in PIPED.values() for name in names)


@pytest.mark.parametrize("name", first_of(PIPELINES, "flux", "zimage"))
def test_pipelines(ranks: Any, name: str, tmp_path: Path) -> None:
    """In all calls that they make: no plan is found and kept, only verdicts."""
    (got,) = generate(ranks, PipelineCase(name=name, plan="patch=2", verifications=tmp_path))
    assert relative(got, plain(name)) <= LIMIT
    kept = [file.read_text() for file in tmp_path.glob("*.json")]
    assert any("relative_error" in text for text in kept)
    assert not any("plan for" in text for text in kept)
