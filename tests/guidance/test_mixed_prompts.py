"""Pipelines that mix the prompts of a call in some calls only: by an argument, or by a library that is installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor

from benchmarks.coverage.pipelines.entry import SECOND_PROMPT
from benchmarks.coverage.pipelines.zoo import ZOO
from patchpar.errors import PlanError
from patchpar.models.info import describe
from patchpar.pipeline.auto_plan import choose
from patchpar.pipeline.description import described
from patchpar.strategies.data import known_pipelines
from patchpar.strategies.data.split import as_one_call, merge_outputs
from tests import tiny
from tests.guidance.test_data import error
from tests.versions import needs_class, needs_diffusers

SCORED = ("AudioLDM2Pipeline", "MusicLDMPipeline")
TWO = ["a small red house", SECOND_PROMPT]
WINDOW: dict[str, Any] = {"num_inference_steps": 12, "parallel": 6, "tolerance": 1.0}
"""Of a pipeline that computes several steps at once and keeps those whose error is within the tolerance."""
BY_ARGUMENTS = [
    ("BriaPipeline", {"normalize": True}, r"normalize=True divides predictions by the standard deviation of those of"),
    pytest.param(
        "StableDiffusionParadigmsPipeline",
        WINDOW,
        "goes on by as many steps at once as all prompts allow",
        marks=needs_diffusers("0.42", "mixing in this pipeline that can be measured here"),
    ),
]


def together_and_apart(name: str, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """What plain diffusers gives in one call for both prompts, and in one for each with its generator."""
    pipe, call = ZOO[name].make()
    call.pop("negative_prompt", None)

    def images(*which: int) -> Tensor:
        own = {"prompt": [TWO[i] for i in which], "generator": [torch.Generator().manual_seed(i + 1) for i in which]}
        return torch.as_tensor(pipe(**call | options | own).images)

    return images(0, 1), torch.cat([images(0), images(1)])


@pytest.mark.parametrize(("name", "options", "does"), BY_ARGUMENTS)
def test_prompts_that_are_mixed_are_refused(name: str, options: dict[str, Any], does: str) -> None:
    """Data ranks would have generated what these calls for one prompt each give, which is not what one call gives."""
    together, apart = together_and_apart(name, options)
    assert error(apart, together) > 1e-4
    pipe = type(name, (), {"scheduler": None})()
    call = {"prompt": TWO, **options}
    with pytest.raises(PlanError, match=f"{name}.*{does}.*data=1"), as_one_call(pipe, call, 0, 2):
        pass


def test_prompts_for_the_parts_of_one_video_are_no_batch() -> None:
    """Each data rank would have made a video of its own."""
    pipe, call = ZOO["LTXI2VLongMultiPromptPipeline"].make()
    given = call | {"prompt": TWO}
    assert len(pipe(**given, generator=torch.Generator().manual_seed(0)).frames) == 1
    refused = pytest.raises(PlanError, match=r"several prompts for the parts of one video.*data=1")
    with refused, as_one_call(pipe, given, 0, 2):
        pass
    model = described(pipe)
    kept = choose(model, 2, given)
    assert kept.plan.data == 1
    assert "2 prompts stay in one batch: LTXI2VLongMultiPromptPipeline takes several prompts" in kept.reason


@needs_class("LTX2DFRPipeline")
def test_positions_of_frames_that_all_prompts_have_in_common_are_returned_once() -> None:
    """They go into the next pipeline, which would take twice as many for those of twice as many frames."""
    pipe, call = ZOO["LTX2DFRPipeline"].make()
    outputs = []
    for rank in range(2):
        given = call | {"prompt": TWO, "generator": torch.Generator().manual_seed(1)}
        with as_one_call(pipe, given, rank, 2) as own:
            outputs.append(pipe(**own))
    together = pipe(**call | {"prompt": TWO, "generator": torch.Generator().manual_seed(1)})
    merged = merge_outputs(outputs)
    assert together.keyframe_positions
    assert merged.keyframe_positions == together.keyframe_positions
    assert error(merged.keyframes, together.keyframes) <= 1e-5


def test_what_each_result_has_of_its_own_is_returned_for_each() -> None:
    assert merge_outputs([[True], [True]]) == [True, True]
    assert merge_outputs([["a"], ["a"]]) == ["a", "a"]
    assert merge_outputs([[1], [2]]) == [1, 2]


def test_without_that_argument_prompts_are_divided() -> None:
    name, options = "BriaPipeline", {"normalize": False}
    together, apart = together_and_apart(name, options)
    assert error(apart, together) <= 1e-5
    pipe = type(name, (), {"scheduler": None})()
    with as_one_call(pipe, {"prompt": TWO, **options}, 1, 2) as own:
        assert own["prompt"] == TWO[1:]


def test_an_automatic_plan_keeps_such_prompts_together() -> None:
    model = replace(describe(tiny.build("sd3").pipe), pipeline="BriaPipeline")
    call = {"prompt": TWO, "height": 128, "width": 128, "guidance_scale": 5.0}
    kept = choose(model, 2, call | {"normalize": True})
    assert kept.plan.data == 1
    assert "2 prompts stay in one batch: BriaPipeline with normalize=True" in kept.reason
    assert choose(model, 2, call).plan.data == 2


def scored(name: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tensor]:
    """The method of a pipeline class that sorts waveforms, with the library that it needs: a waveform is its score."""
    kind = getattr(diffusers, name)
    module = importlib.import_module(kind.__module__)
    monkeypatch.setattr(module, "is_librosa_available", lambda: True)
    stub = SimpleNamespace(resample=lambda audio, orig_sr, target_sr: audio)
    monkeypatch.setattr(module, "librosa", stub, raising=False)

    def encoder(text: list[str], input_features: Tensor) -> Any:
        return SimpleNamespace(logits_per_text=input_features.mean(-1).expand(len(text), -1))

    class Inputs(dict[str, Any]):
        def to(self, device: Any) -> Inputs:
            return self

    def extractor(audio: Any, **_: Any) -> Any:
        return SimpleNamespace(input_features=torch.stack([torch.as_tensor(each) for each in audio]))

    extractor.sampling_rate = 16000  # type: ignore[attr-defined]
    pipe = SimpleNamespace(
        tokenizer=lambda text, **_: Inputs(text=text),
        vocoder=SimpleNamespace(config=SimpleNamespace(sampling_rate=16000)),
        feature_extractor=extractor,
        text_encoder=encoder,
    )
    return lambda text, audio: kind.score_waveforms(pipe, text, audio, 2, "cpu", torch.float32)


@pytest.mark.parametrize("name", SCORED)
def test_a_prompt_gets_the_waveforms_of_another_where_they_are_scored(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What diffusers does: the best waveforms of all, for each prompt, so that no rank has all that it may need."""
    score, audio = scored(name, monkeypatch), torch.arange(4.0)[:, None].expand(4, 8).contiguous()
    together = score(TWO, audio)
    apart = torch.cat([score(TWO[:1], audio[:2]), score(TWO[1:], audio[2:])])
    assert together[:, 0].tolist() == [3, 2, 3, 2]
    assert apart[:, 0].tolist() == [1, 0, 3, 2]


@pytest.mark.parametrize(
    ("options", "installed", "refused"),
    [
        ({"num_waveforms_per_prompt": 2}, True, True),
        ({"num_waveforms_per_prompt": 2}, False, False),  # they stay in their order
        ({"num_waveforms_per_prompt": 1}, True, False),
        ({"num_waveforms_per_prompt": 2, "output_type": "latent"}, True, False),
    ],
)
@pytest.mark.parametrize("name", SCORED)
def test_waveforms_that_are_scored_together_are_refused(
    name: str, options: dict[str, Any], installed: bool, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = getattr(diffusers, name)
    monkeypatch.setattr(known_pipelines, "find_spec", lambda library: object() if installed else None)
    pipe = type(name, (), {"scheduler": None, "score_waveforms": kind.score_waveforms})()
    call = {"prompt": TWO, "generator": None, **options}
    wanted = pytest.raises(PlanError, match=r"chooses the 2 results of each prompt among those of all.*data=1")
    with wanted if refused else nullcontext(), as_one_call(pipe, call, 0, 2) as own:
        assert own["prompt"] == TWO[:1]
