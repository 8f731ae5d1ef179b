"""A denoiser that bands do not reproduce is refused with the figures; the verdict on one that they do is kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from patchpar import ParallelPipeline, VerificationError
from tests.tiny import build

from .conftest import EXACT, QUICK, Hold, generator, relative_error
from .odd import MixesRows

CALL = {**QUICK, "num_inference_steps": 1, "output_type": "latent"}


def test_a_model_that_cannot_be_cut(hold: Hold, plain: Any) -> None:
    odd = build("sdxl").pipe
    odd.unet.mid_block.resnets[0] = MixesRows(odd.unet.mid_block.resnets[0])
    want = odd(**CALL, generator=generator())
    with hold(odd) as parallel:
        pids = parallel._executor.pids
        parallel.plan = "patch=2"
        with pytest.raises(VerificationError, match=r"2 bands differs.*\d\.\de.\d\d, \d\.\de.\d\d, more.*cfg=2"):
            parallel(**CALL, generator=generator())  # that it is not kept: exact/test_verification
        parallel.plan = "cfg=2"
        assert relative_error(parallel(**CALL, generator=generator()), want) <= EXACT
        assert parallel._executor.pids == pids


def test_verifications_are_kept_where_one_says(parallel: ParallelPipeline) -> None:
    parallel.plan = "patch=2"
    folder = parallel._state.request.verify
    assert isinstance(folder, Path)
    parallel(**CALL, generator=generator())
    kept = {file: file.read_text() for file in folder.glob("*.json")}
    assert kept
    every = [json.loads(text) for text in kept.values()]  # other tests keep theirs there too
    of_unet = (each for each in every if each.get("denoiser") == "UNet2DConditionModel")
    facts = next(each for each in of_unet if "relative_error" in each)
    assert 0 <= facts["relative_error"] < 1e-4


@pytest.mark.breadth
def test_a_kept_verification_is_believed_by_new_ranks(hold: Hold) -> None:
    """One that was made for this very model; no further one is written, and nothing is checked again."""
    with hold(build("sdxl").pipe) as parallel:
        folder = parallel._state.request.verify
        assert isinstance(folder, Path)
        parallel.plan = "patch=2"
        parallel(**CALL, generator=generator())
        stamps = {file: file.stat().st_mtime_ns for file in folder.glob("*.json")}
    with hold(build("sdxl").pipe) as parallel:
        parallel(**CALL, generator=generator())
        parallel.plan = "patch=2"
        parallel(**CALL, generator=generator())
    assert {file: file.stat().st_mtime_ns for file in folder.glob("*.json")} == stamps
