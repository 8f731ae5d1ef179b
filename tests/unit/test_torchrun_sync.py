"""What ranks other than the first one return under torchrun."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.pipelines.flux import FluxPipelineOutput
from diffusers.pipelines.stable_diffusion import StableDiffusionPipelineOutput

from patchpar.pipeline.torchrun_sync import emptied


@pytest.mark.parametrize(
    "output",
    [
        StableDiffusionPipelineOutput(images=torch.ones(1), nsfw_content_detected=[False]),
        StableDiffusionPipelineOutput(images=torch.ones(1), nsfw_content_detected=None),  # without a safety checker
        FluxPipelineOutput(images=torch.ones(1)),
    ],
)
def test_an_empty_output_is_of_the_same_class(output: Any) -> None:
    empty = emptied(output)
    assert type(empty) is type(output)
    assert vars(empty) == dict.fromkeys(vars(output))


def test_an_empty_tuple_is_as_long() -> None:
    assert emptied((torch.ones(1), None)) == (None, None)
    assert emptied({"images": torch.ones(1)}) == {"images": None}
    assert emptied([torch.ones(1)]) is None
