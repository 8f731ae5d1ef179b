"""How soon the ranks that are left go on after one of three has been killed: real workers, a real kill.

A layer of the denoiser writes down when it is called, on every rank, by the clock that all processes have in common.
"""

from __future__ import annotations

import logging
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from patchpar import ParallelPipeline
from patchpar.models.files import resolve_model
from patchpar.models.loading import load_pipeline
from patchpar.pipeline import recovery

RANKS, PLAN = 3, "patch=3"
CALL: dict[str, Any] = {
    "prompt": "a red house",
    "height": 128,
    "width": 128,
    "num_inference_steps": 12,
    "output_type": "latent",
}
STEP = 3
"""After which a worker is killed."""
SECONDS = 300.0


class TimedLayer(torch.nn.Module):
    """Around a layer of a denoiser: appends the time of each call to a file of its process.

    Only of calls on maps as wide as the image: others find out about the network.
    """

    def __init__(self, layer: torch.nn.Module, folder: Path, width: int) -> None:
        super().__init__()
        self.layer, self.folder, self.width = layer, folder, width

    def forward(self, x: torch.Tensor) -> Any:
        """Call the layer with a map [B, C, H, W]."""
        if x.shape[-1] == self.width:
            with (self.folder / str(os.getpid())).open("a") as file:
                file.write(f"{time.monotonic()}\n")
        return self.layer(x)


class Decisions(logging.Handler):
    """Notes when a job decides to go on."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Note the time of a record."""
        if "is made again" in record.getMessage():
            self.times.append(time.monotonic())


@dataclass(frozen=True, slots=True)
class Regroup:
    """Seconds from a kill until the caller has decided how to go on, and from there to the call that is made again."""

    noticed: float
    regrouped: float


def measure_regroups(runs: int) -> list[Regroup]:
    """Kill one of three workers in the middle of a call, so many times; each is replaced by the next call."""
    decisions, log = Decisions(), logging.getLogger(recovery.__name__)
    log.addHandler(decisions)
    try:
        with tempfile.TemporaryDirectory(prefix="patchpar-regroup-") as name:
            return _measured(runs, Path(name), decisions)
    finally:
        log.removeHandler(decisions)


def _measured(runs: int, folder: Path, decisions: Decisions) -> list[Regroup]:
    model, options, _ = resolve_model("embedded", {})
    plain = load_pipeline(model, options)
    plain.unet.conv_in = TimedLayer(plain.unet.conv_in, folder, CALL["width"] // plain.vae_scale_factor)
    found = []
    with ParallelPipeline(plain, devices=f"cpu:{RANKS}", verify=False) as pipe:
        pipe.set_progress_bar_config(disable=True)
        for _ in range(runs + 1):  # the first one finds out how the network is divided
            found.append(_once(pipe, folder, decisions))
    return found[1:]


def _once(pipe: ParallelPipeline, folder: Path, decisions: Decisions) -> Regroup:
    pipe.submit(**{**CALL, "num_inference_steps": 1}, plan=PLAN).result(SECONDS)  # replaces the one that was killed
    decisions.times.clear()
    job = pipe.submit(**CALL, plan=PLAN)
    while job.progress.step < STEP:
        if job.wait(0.0005):
            job.result(0)
            raise RuntimeError(f"the call has ended before step {STEP}, at which a worker is to be killed")
    killed = time.monotonic()
    os.kill(pipe._executor.pids[1], signal.SIGKILL)
    job.result(SECONDS)
    (decided,) = decisions.times
    calls = [float(line) for path in folder.iterdir() for line in path.read_text().splitlines()]
    again = min(moment for moment in calls if moment > decided)
    return Regroup(decided - killed, again - decided)


def regroup_lines(found: list[Regroup]) -> Iterator[str]:
    """The section of the page."""
    noticed, regrouped = [each.noticed for each in found], [each.regrouped for each in found]
    yield (
        f"The embedded model at 128 x 128 on {RANKS} CPU workers, of which one is killed with SIGKILL in the middle of "
        f"a call, {len(found)} times. Those that are left begin the pipeline's loop again, encode the prompt, install "
        "their plan and get the denoiser calls so far from the journal."
    )
    yield from ("", "| | median, ms | worst, ms |", "|---|---|---|")
    yield f"| from the kill to the decision how to go on | {_milliseconds(noticed)} |"
    yield f"| from there until the call that had failed begins again | {_milliseconds(regrouped)} |"


def _milliseconds(seconds: list[float]) -> str:
    return f"{1000 * statistics.median(seconds):.0f} | {1000 * max(seconds):.0f}"
