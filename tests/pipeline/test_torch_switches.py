"""Switches of precision that a script sets hold on its ranks too, and its embeddings come to their devices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from patchpar import ParallelPipeline
from patchpar.pipeline.device_arguments import with_embeddings_on
from patchpar.pipeline.torch_switches import caller_switches, take_switches
from tests.pipeline.callbacks import NotesSwitches
from tests.pipeline.conftest import QUICK


@pytest.fixture
def switches() -> Iterator[Any]:
    """As they are in a new process."""
    torch.backends.cudnn.allow_tf32 = True
    torch.set_float32_matmul_precision("highest")
    yield caller_switches()
    torch.backends.cudnn.allow_tf32 = True
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_a_process_takes_those_of_another(switches: Any, precision: str) -> None:
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32 = False
    wanted = caller_switches()
    take_switches(switches)
    assert (torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()) == (True, "highest")
    take_switches(wanted)
    assert (torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()) == (False, precision)
    assert torch.backends.cuda.matmul.allow_tf32
    take_switches(None)
    assert caller_switches() == wanted


def test_ranks_compute_with_those_of_the_caller(switches: Any, parallel: ParallelPipeline) -> None:
    for is_on in (False, True):
        torch.backends.cudnn.allow_tf32 = is_on
        parallel(**QUICK, output_type="latent", callback_on_step_end=NotesSwitches())
        assert parallel.noted_allow_tf32 == is_on


def test_embeddings_come_to_the_device_of_a_rank_and_images_stay() -> None:
    tensor = torch.ones(1, 2)
    given = {"prompt_embeds": [tensor], "ip_adapter_image_embeds": [[tensor]], "image": tensor, "prompt": "a fox"}
    given["prompt_attention_mask"], given["negative_prompt_embeds"] = tensor, None
    found = with_embeddings_on(torch.device("meta"), given)
    assert found["prompt_embeds"][0].is_meta
    assert found["ip_adapter_image_embeds"][0][0].is_meta
    assert found["prompt_attention_mask"].is_meta
    assert found["image"] is tensor
    assert (found["prompt"], found["negative_prompt_embeds"]) == ("a fox", None)
