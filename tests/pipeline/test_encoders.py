"""`encoders=one` in pipelines on workers: methods, callbacks, faults, and the way back to encoders on all ranks."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from patchpar import ParallelPipeline, Plan, PlanError, UnsupportedModel, WorkerDied
from patchpar.models.encoders import encoders_of
from patchpar.pipeline.encoder_placement import EncoderPlacement
from tests.tiny import build

from .conftest import QUICK, Hold, generator, tensor_of

CALL = {**QUICK, "output_type": "latent"}
ONE = "cfg=2,encoders=one"


def image(pipe: Any, **changed: Any) -> torch.Tensor:
    return tensor_of(pipe(**{**CALL, **changed}, generator=generator()))


def test_the_plan_says_which_ranks_encode() -> None:
    plan = Plan.parse(ONE)
    assert plan == Plan(cfg=2, encoders="one")
    assert str(plan) == "cfg=2,encoders=one"
    with pytest.raises(PlanError, match="encoders='two': use one of auto, all, one"):
        Plan(cfg=2, encoders="two")
    with pytest.raises(PlanError, match=r"encoders=one.*weights=sharded.*leave one of them out"):
        Plan(patch=2, encoders="one", weights="sharded")


def test_images_are_bit_for_bit_those_of_encoders_on_all_ranks(parallel: ParallelPipeline) -> None:
    parallel.plan = "cfg=2,encoders=all"
    want = image(parallel)
    for plan in (ONE, "patch=2", ONE):
        parallel.plan = plan
        assert torch.equal(image(parallel), want) == (plan == ONE)
    parallel.plan = ONE
    parallel._executor.call("control", encoders="off")
    assert not torch.equal(image(parallel), want)
    parallel._executor.call("control")
    assert torch.equal(image(parallel), want)
    parallel.restore()
    parallel.plan = "cfg=2"
    assert torch.equal(image(parallel), want)


def test_methods_and_attributes_of_encoders(parallel: ParallelPipeline, plain: Any) -> None:
    parallel.plan = "cfg=2"
    want = image(parallel)
    parallel.plan = ONE
    assert torch.equal(image(parallel), want)
    assert parallel.text_encoder.dtype == plain.text_encoder.dtype
    assert parallel.text_encoder.config.hidden_size == plain.text_encoder.config.hidden_size
    embeddings = parallel.encode_prompt(CALL["prompt"])
    for got, expected in zip(embeddings, plain.encode_prompt(CALL["prompt"]), strict=True):
        assert got is expected is None or torch.equal(got, expected)
    assert torch.equal(image(parallel), want)
    parallel.text_encoder.requires_grad_(False)  # all ranks hold the weights meanwhile
    assert torch.equal(image(parallel), want)


def reads_encoder(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    with pytest.raises(AttributeError, match="cannot be read inside callback_on_step_end"):
        pipe.text_encoder.dtype  # noqa: B018
    pipe.text_encoder.eval()
    return tensors


def test_a_callback_uses_an_encoder(parallel: ParallelPipeline) -> None:
    parallel.plan = "cfg=2"
    want = image(parallel)
    parallel.plan = ONE
    assert torch.equal(image(parallel, callback_on_step_end=reads_encoder), want)
    assert torch.equal(image(parallel), want)


def test_a_failing_encoder_fails_alike_on_all_ranks(parallel: ParallelPipeline, plain: Any) -> None:
    parallel.plan = ONE
    want, pids = image(parallel), parallel._executor.pids
    with pytest.raises(ValueError, match="prompt"):
        parallel(**{**CALL, "prompt": 7}, generator=generator())
    assert torch.equal(image(parallel), want)
    assert parallel._executor.pids == pids


def test_a_pipeline_without_encoders(hold: Hold) -> None:
    made = build("ddpm")
    with hold(made.pipe) as parallel:
        parallel.plan = "patch=2,encoders=one"
        with pytest.raises(UnsupportedModel, match="has no encoder that could be on one rank: use encoders=all"):
            parallel(**made.call_kwargs, generator=generator())


class DiesWhileEncoding:
    """A tokenizer's callable part: kills the process in which it runs if that is the marked one."""

    def __init__(self, tokenizer: Any, mark: Path) -> None:
        self.tokenizer, self.mark = tokenizer, mark

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.tokenizer, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.mark.exists() and self.mark.read_text() == str(os.getpid()):
            os.kill(os.getpid(), signal.SIGKILL)
        return self.tokenizer(*args, **kwargs)


@pytest.mark.breadth  # test_faults has a worker that is killed
def test_the_rank_that_encodes_dies(sdxl_folder: Path, tmp_path: Path) -> None:
    """Loading leaves the encoders to the first rank; when it dies the next call has new workers."""
    with ParallelPipeline.from_pretrained(sdxl_folder, devices="cpu:2", plan=ONE, deadline=20.0) as pipe:
        pipe.set_progress_bar_config(disable=True)
        want = image(pipe)
        pipe.tokenizer = DiesWhileEncoding(pipe.tokenizer, tmp_path / "victim")
        (tmp_path / "victim").write_text(str(pipe._executor.pids[0]))
        with pytest.raises(WorkerDied, match="rank 0"):
            image(pipe)
        (tmp_path / "victim").unlink()
        assert torch.equal(image(pipe), want)
        pipe.restore()
        pipe.plan = "cfg=2"
        assert torch.equal(image(pipe), want)


def test_what_counts_as_an_encoder() -> None:
    assert set(encoders_of(build("sdxl").pipe)) == {"text_encoder", "text_encoder_2"}
    assert set(encoders_of(build("flux").pipe)) == {"text_encoder", "text_encoder_2"}
    assert set(encoders_of(build("wan").pipe)) == {"text_encoder"}
    assert set(encoders_of(build("svd").pipe)) == {"image_encoder"}


def test_one_rank_holds_its_own_encoders() -> None:
    def connect() -> Any:
        raise AssertionError("there is nobody to connect to")

    placement = EncoderPlacement(0, torch.device("cpu"), connect)
    placement.arrange(build("sdxl").pipe, Plan(encoders="one"))
    assert placement.axis is None
