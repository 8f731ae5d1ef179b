"""Which networks of a pipeline are those whose work ranks share."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from patchpar.errors import UnsupportedModel
from patchpar.models.info import denoisers_of, describe
from patchpar.pipeline.validate import refuse_without_denoiser
from patchpar.plan.plan import Plan
from tests.tiny import cascade_pipelines, kandinsky_pipelines
from tests.tiny.image_pipelines import Built


@pytest.mark.parametrize(
    ("build", "names"),
    [
        (kandinsky_pipelines.prior22, ["prior"]),
        (kandinsky_pipelines.kandinsky22_combined, ["unet"]),
        (cascade_pipelines.cascade_prior, ["prior"]),
        (cascade_pipelines.cascade, ["decoder"]),
    ],
)
def test_a_prior_counts_where_nothing_makes_the_image(build: Callable[[], Built], names: list[str]) -> None:
    assert list(denoisers_of(build()[0])) == names


def test_guidance_of_a_decoder_is_guidance() -> None:
    pipe, call = cascade_pipelines.cascade()
    model = describe(pipe)
    assert model.guided(call)
    assert not model.guided(call | {"decoder_guidance_scale": 0.0})


def test_a_plan_for_networks_that_are_not_there_is_refused() -> None:
    refuse_without_denoiser("LLaDA2Pipeline", (), Plan(data=2))
    for plan in (Plan(cfg=2), Plan(patch=2)):
        with pytest.raises(UnsupportedModel, match=r"a LLaDA2Pipeline has no unet, transformer.*plan .*=2.*data=N"):
            refuse_without_denoiser("LLaDA2Pipeline", (), plan)
