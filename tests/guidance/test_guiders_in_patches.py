"""Guiders of diffusers whose branches change the network or combine predictions, with the image split: as plain."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import guiders
from diffusers.hooks import LayerSkipConfig
from diffusers.hooks.smoothed_energy_guidance_utils import SmoothedEnergyGuidanceConfig

from benchmarks.coverage.pipelines.guided import ENTRIES
from patchpar.errors import UnsupportedModel
from tests import tiny
from tests.breadth import first_of
from tests.tensors import relative
from tests.tokens.piped import plain, shared

TOLERANCE = 1e-5
WHOLE = {"skip_layer_guidance_start": 0.0, "skip_layer_guidance_stop": 1.0}
(HUNYUAN,) = (each for each in ENTRIES if each.name == "HunyuanImagePipeline")


def skipped(*, attention: bool = False, ff: bool = False, scores: bool = False) -> LayerSkipConfig:
    return LayerSkipConfig(
        indices=[1], fqn="transformer_blocks", skip_attention=attention, skip_ff=ff, skip_attention_scores=scores
    )


class Smoothed(guiders.SmoothedEnergyGuidance):  # type: ignore[misc]  # diffusers is not typed
    """The guider as its paper has it: that of diffusers does not count branches, so that it never blurs."""

    def prepare_models(self, denoiser: Any) -> None:
        self._count_prepared += 1
        super().prepare_models(denoiser)


def smoothed() -> Any:
    config = SmoothedEnergyGuidanceConfig(indices=[1], fqn="transformer_blocks")
    return Smoothed(guidance_scale=5.0, seg_guidance_config=config)


GUIDERS: dict[str, Callable[[], Any]] = {
    "perturbed": lambda: guiders.PerturbedAttentionGuidance(
        guidance_scale=5.0,
        perturbed_guidance_config=skipped(scores=True),
        perturbed_guidance_start=0.0,
        perturbed_guidance_stop=1.0,
    ),
    "skipped layers": lambda: guiders.SkipLayerGuidance(
        guidance_scale=5.0, skip_layer_config=skipped(attention=True, ff=True), **WHOLE
    ),
    "skipped feed-forward": lambda: guiders.SkipLayerGuidance(
        guidance_scale=5.0, skip_layer_config=skipped(ff=True), **WHOLE
    ),
    "auto": lambda: guiders.AutoGuidance(guidance_scale=5.0, auto_guidance_config=skipped(attention=True, ff=True)),
    "zero*": lambda: guiders.ClassifierFreeZeroStarGuidance(guidance_scale=5.0, zero_init_steps=1),
    "projected": lambda: guiders.AdaptiveProjectedGuidance(
        guidance_scale=5.0, adaptive_projected_guidance_momentum=-0.5
    ),
    "tangential": lambda: guiders.TangentialClassifierFreeGuidance(guidance_scale=5.0),
}


def with_guider(make: Callable[[], Any]) -> Callable[[str], tiny.Tiny]:
    """Builds HunyuanImage with a guider."""

    def build(name: str) -> tiny.Tiny:
        pipe, call = HUNYUAN.make()
        pipe.guider = make()
        pipe.set_progress_bar_config(disable=True)
        return tiny.Tiny(name=name, pipe=pipe, call_kwargs=call | {"generator": torch.Generator().manual_seed(0)})

    return build


@pytest.mark.parametrize("name", first_of(GUIDERS, "perturbed"))
def test_images_are_those_of_one_process(name: str, tmp_path: Path) -> None:
    build = with_guider(GUIDERS[name])
    want = plain(HUNYUAN.name, build=build)
    without = plain(HUNYUAN.name, build=with_guider(guiders.ClassifierFreeGuidance))
    assert relative(want, without) > 1e-3
    for got in shared(HUNYUAN.name, "patch=2", tmp_path, build=build):
        assert relative(got, want) <= TOLERANCE


def test_queries_that_are_blurred_over_the_image_are_refused(tmp_path: Path) -> None:
    """In the call in which the guider blurs them, the third of the second step."""
    build = with_guider(smoothed)
    with pytest.raises(UnsupportedModel, match=r"smoothed energy guidance blurs the queries of transformer_blocks\.1"):
        shared(HUNYUAN.name, "patch=2", tmp_path, build=build)


@pytest.mark.breadth
def test_blurred_queries_of_a_branch_on_a_rank_of_its_own(tmp_path: Path) -> None:
    build = with_guider(smoothed)
    want = plain(HUNYUAN.name, build=build)
    for got in shared(HUNYUAN.name, "cfg=3", tmp_path, build=build):
        assert relative(got, want) <= TOLERANCE
