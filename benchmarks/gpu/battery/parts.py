"""The parts of the battery. Each runs in a process of its own, so that a crash or a hang ends one part only.

facts      the GPUs, the driver, and what patchpar will use
tests      the tests marked `gpu`
layers     where the time of one plain forward goes, by type of layer
overhead   a rank's own work, without waiting for messages, against the plain forward
hosted     weights in host memory, against the law of docs/weights.md and diffusers' group offload
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass
from json import loads
from pathlib import Path

from benchmarks.gpu.battery.journal import Outcome

LAST_WORDS = 3000


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part. `least_seconds`: with less time left it is not begun."""

    name: str
    title: str
    explanation: str
    least_seconds: float


PARTS = (
    Part(name="facts", title="Machine", explanation="What is here, as `patchpar doctor` finds it.", least_seconds=5.0),
    Part(
        name="tests",
        title="Tests",
        explanation="Each test marked `gpu`: ranks against one process, half precision, kernels against their eager "
        "twins, synchronisations, copies.",
        least_seconds=20.0,
    ),
    Part(
        name="layers",
        title="Layers of a plain forward",
        explanation="Milliseconds of the device in one forward, by type of layer, without the layers inside it.",
        least_seconds=20.0,
    ),
    Part(
        name="overhead",
        title="A rank's own work",
        explanation="Rank 1 of 4 with messages that cost nothing, against one process; `ideal` is a quarter of it. "
        "`host` is the time after which the process has enqueued everything. A step runs from Python, or as a CUDA "
        "graph.",
        least_seconds=20.0,
    ),
    Part(
        name="hosted",
        title="Weights in host memory",
        explanation="A pass of FLUX.1 with random weights in FP8 (layerwise casting), of which the blocks are in host "
        "memory, while 8 GB of the GPU may be used. `law`: of each block the longer of its own computation and of the "
        "copy of the next one ([weights](../weights.md#slots)). `GB/s`: of copies with nothing beside.",
        least_seconds=60.0,
    ),
)


def run_part(part: Part, python: str, device: str, seconds: float, root: Path) -> Outcome:
    """Run a part for at most `seconds`. What it had found when it was ended is kept."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        rows, log = Path(folder, "rows.jsonl"), Path(folder, "log.txt")
        command = [python, "-m", "benchmarks.gpu.battery.part", part.name, "--device", device, "--rows", str(rows)]
        with log.open("w") as output:
            process = subprocess.Popen(
                command, cwd=root, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                code: int | None = process.wait(seconds)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end(process)
        found = [loads(line) for line in rows.read_text().splitlines()] if rows.exists() else []
        message = log.read_text(errors="replace")[-LAST_WORDS:]
    failed = [row for row in found if row.get("result") == "failed"]
    ok = code == 0 and not failed and bool(found)
    error = "" if ok else f"{'out of time' if code is None else f'exit code {code}'}\n{message}"
    return Outcome(part=part.name, ok=ok, seconds=time.monotonic() - began, rows=found, error=error)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a part and the processes that it has started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
