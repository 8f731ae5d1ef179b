"""What workers are told that take the place of others: the state that they had, however it came about; nothing more."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from patchpar import ParallelPipeline, WorkerDied

from .conftest import EXACT, QUICK, generator, relative_error

CALL = {**QUICK, "output_type": "latent"}
TIMES = 2


def latents_of_its_own(pipe: ParallelPipeline) -> weakref.ref[torch.Tensor]:
    """Decode latents that nobody else holds."""
    latents = torch.randn(1, 4, 64, 64, generator=generator())
    pipe.vae.decode(latents, return_dict=False)
    return weakref.ref(latents)


def die(pipe: ParallelPipeline) -> None:
    """End a worker in the middle of a call."""
    pipe.on_step = lambda step, total: os.kill(pipe._executor.pids[1], signal.SIGKILL)
    with pytest.raises(WorkerDied):
        pipe(**CALL, generator=generator())
    pipe.on_step = None


@pytest.mark.breadth  # unit/test_changes has what is kept, test_faults workers that take the place of others
def test_workers_are_told_what_holds_and_nothing_more(
    sdxl_folder: Path, loras: Path, plain: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All paths are relative, and mean something else, or nothing, by the time new workers start."""
    shutil.copytree(sdxl_folder, tmp_path / "model")
    shutil.copytree(loras, tmp_path / "loras")
    monkeypatch.chdir(tmp_path)
    with ParallelPipeline.from_pretrained("model", devices="cpu:2", plan="cfg=2", verify="verdicts") as pipe:
        pipe.set_progress_bar_config(disable=True)
        journal = pipe._executor._journal
        for number in range(TIMES):
            pipe.encode_prompt("a small red house")
            latents = latents_of_its_own(pipe)
            pipe.load_lora_weights("loras", weight_name="ink.safetensors", adapter_name="ink")
            pipe.set_adapters("ink")
            if number % 2:
                pipe.unload_lora_weights()
            else:
                pipe.delete_adapters("ink")
        assert [entry.method for entry in journal] == ["load"]
        gc.collect()
        assert latents() is None, "arguments of what only computes are not kept"
        pipe.load_lora_weights("loras", weight_name="snow.safetensors", adapter_name="snow")
        snow = pipe(**CALL, generator=generator())
        (tmp_path / "loras" / "ink.safetensors").unlink()
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        die(pipe)
        assert relative_error(pipe(**CALL, generator=generator()), snow) == 0.0
        pipe.unload_lora_weights()
        assert [entry.method for entry in journal] == ["load"]
        want = plain(**CALL, generator=generator())
        assert relative_error(pipe(**CALL, generator=generator()), want) <= EXACT
        assert relative_error(snow, want) > 100 * EXACT
