"""Attention that tells branches of guidance apart, with the branches on different ranks, against plain diffusers.

Perturbed-attention guidance (arXiv:2403.17377) and cross-frame attention (arXiv:2303.13439).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor, nn

from benchmarks.coverage.pipelines.zoo import ZOO
from patchpar import ParallelPipeline
from patchpar.errors import PlanError, UnsupportedModel, VerificationError
from patchpar.plan.plan import Plan
from patchpar.shard.guidance_branches import at_own_index, layers_by_branch
from patchpar.strategies.structure.options import StructureGuidance
from tests import tiny
from tests.breadth import first_of
from tests.tensors import relative
from tests.tokens.piped import plain, shared

TOLERANCE = 1e-5
TWO_PROMPTS = {"prompt": ["a small red house", "a blue boat"]}


def perturbed(name: str) -> tiny.Tiny:
    """A tiny pipeline of the class with perturbed attention, in the layers where that class has it by default."""
    found = tiny.build(name)
    pipe = diffusers.AutoPipelineForText2Image.from_pipe(found.pipe, enable_pag=True)
    pipe.set_progress_bar_config(disable=True)
    return tiny.Tiny(name=name, pipe=pipe, call_kwargs=found.call_kwargs | {"pag_scale": 2.0})


def generated(name: str, plan: str, folder: Path, **options: Any) -> list[Tensor]:
    return shared(name, plan, folder, build=perturbed, **options)


CASES = [
    ("sd", "cfg=3", {}),
    ("sd3", "cfg=3", TWO_PROMPTS),  # joint attention, which returns the text as well
    ("sd", "cfg=2", TWO_PROMPTS | {"guidance_scale": 0.0}),  # two branches: without the one without a prompt
    ("sdxl", "cfg=2", TWO_PROMPTS),  # three branches of two images: the second branch is on both ranks
    ("sd", "cfg=3,patch=2", {}),
    ("pixart", "cfg=3,patch=2", {}),
]


@pytest.mark.parametrize(("name", "plan", "options"), first_of(CASES, CASES[1]))
def test_branches_on_different_ranks(name: str, plan: str, options: dict[str, Any], tmp_path: Path) -> None:
    want = plain(name, build=perturbed, **options)
    assert relative(plain(name, build=perturbed, **options | {"pag_scale": 0.0}), want) > 1e-2
    for got in generated(name, plan, tmp_path, **options):
        assert relative(got, want) <= TOLERANCE


def test_three_branches_of_one_image_on_two_ranks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"3 branches in one batch of 3, which cfg=2 ranks cannot.*use cfg=3"):
        generated("sd", "cfg=2", tmp_path)


def test_patches_of_a_large_image_are_refused() -> None:
    """Through the pipeline, which knows whether its guidance is perturbed once it runs."""
    plan = Plan(patch=1, strategy=StructureGuidance(native=64))
    found = perturbed("sd")
    with ParallelPipeline(found.pipe, devices="cpu", plan=plan) as pipe:
        words = r"with pag_scale=2\.0 splits the batch into guidance branches.*use strategy exact, or pag_scale=0"
        with pytest.raises(UnsupportedModel, match=words):
            pipe(**found.call_kwargs | {"height": 128, "width": 128})


@pytest.mark.parametrize(
    ("plan", "options", "message"),
    [("cfg=3", {}, "not enough values to unpack"), ("cfg=2", TWO_PROMPTS, "off by")],
    ids=["fails", "wrong"],
)
def test_the_checks_see_layers_that_take_a_part_for_all_branches(
    plan: str, options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("shard.batch_arguments", "strategies.cfg.split"):
        monkeypatch.setattr(f"patchpar.{module}.at_own_index", lambda *_: nullcontext())
    with pytest.raises(VerificationError, match=rf"UNet2DConditionModel with its batch shared.*{message}"):
        generated("sd", plan, tmp_path, **options)


def test_the_joined_prediction_is_held_against_the_whole_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where shares were checked with the layers at their places, and are computed without."""
    monkeypatch.setattr("patchpar.strategies.cfg.split.at_own_index", lambda *_: nullcontext())
    with pytest.raises(VerificationError, match="with the branches of guidance on 2 ranks differs from the plain one"):
        generated("sd", "cfg=2", tmp_path, **TWO_PROMPTS)


def of_one_first_frame(name: str) -> tiny.Tiny:
    """Frames that attend to the first one of their branch: the processors divide the rows by two branches."""
    pipe, call = ZOO[name].make()
    return tiny.Tiny(name=name, pipe=pipe, call_kwargs=call)


@pytest.mark.breadth
def test_frames_that_attend_to_the_first_of_their_branch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, steps = "TextToVideoZeroPipeline", {"num_inference_steps": 4}
    want = plain(name, build=of_one_first_frame, **steps)
    for got in shared(name, "cfg=2", tmp_path / "right", build=of_one_first_frame, **steps):
        assert relative(got, want) <= TOLERANCE
    monkeypatch.setattr("patchpar.pipeline.installed_plan.layers_by_branch", lambda *_: ())
    with pytest.raises(VerificationError, match=r"UNet2DConditionModel with its batch shared.*off by"):
        shared(name, "cfg=2", tmp_path / "wrong", build=of_one_first_frame, **steps)


class Layer(nn.Module):
    """As joint attention is called: text and image, a table for all rows, and two results."""

    def __init__(self) -> None:
        super().__init__()
        self.processor = object()

    def forward(self, hidden_states: Tensor, text: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        if len(hidden_states) < 3:
            raise ValueError("a branch is missing")
        index = torch.arange(len(hidden_states))[:, None]
        return hidden_states * index + table.sum(), text + index


@contextmanager
def unchanged(layer: nn.Module) -> Iterator[None]:
    def hooks() -> Sequence[Any]:
        return [list(layer._forward_pre_hooks), list(layer._forward_hooks), list(layer._forward_pre_hooks_with_kwargs)]

    before = hooks()
    yield
    assert hooks() == before


@pytest.mark.parametrize("parts", [3, 6])
def test_a_part_is_computed_at_its_index(parts: int) -> None:
    layer, image, text, table = Layer(), torch.randn(6, 4), torch.randn(6, 2), torch.randn(5, 4)
    want, rows = layer(image, text, table), 6 // parts
    for rank in range(parts):
        own = slice(rank * rows, (rank + 1) * rows)
        with unchanged(layer), at_own_index([layer], rank, parts):
            got = layer(hidden_states=image[own], text=text[own], table=table)
        assert all(torch.equal(x, y[own]) for x, y in zip(got, want, strict=True))


def test_nothing_is_left_in_a_layer_that_fails() -> None:
    layer = Layer()
    with unchanged(layer), pytest.raises(ValueError, match="a branch is missing"), at_own_index([layer], 0, 2):
        layer(torch.randn(1, 4), torch.randn(1, 2), torch.randn(5, 4))


def test_layers_are_those_of_the_call_under_way() -> None:
    """diffusers sets the processors for a call, whose class the pipeline knows, and takes them out again."""
    found = perturbed("sd")
    assert layers_by_branch(found.pipe, found.denoiser) == []
    found.pipe._set_pag_attn_processor(["mid"], do_classifier_free_guidance=True)
    block = found.denoiser.mid_block.attentions[0].transformer_blocks[0]
    assert layers_by_branch(found.pipe, found.denoiser) == [block.attn1]
    assert layers_by_branch(tiny.build("sd").pipe, found.denoiser) == []
