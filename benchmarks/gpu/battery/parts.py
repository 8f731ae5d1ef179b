"""The parts of the battery. Each runs in a process of its own, so that a crash or a hang ends one part only.

facts      the GPUs, the driver, and what patchpar will use
tests      the tests marked `gpu`
layers     where the time of one plain forward goes, by type of layer
overhead   a rank's own work, without waiting for messages, against the plain forward
process    by which functions of Python and torch the process of such a rank takes longer
compiled   the same with blocks that torch.compile has compiled
ranks      steps with a GPU for each rank, against the plain forward
hosted     weights in host memory, against the law of docs/weights.md and diffusers' group offload
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from json import dumps, loads
from pathlib import Path
from typing import Any

from benchmarks.gpu.battery.journal import Outcome

LAST_WORDS = 3000
KILLED_WITHIN = 30.0
"""Seconds in which a process is gone that was killed. One that is stuck in a driver may stay."""
OUT_OF_TIME, INTERRUPTED = "out of time", "interrupted"


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
        "twins, synchronisations, copies. Ranks with a card each use NCCL; where there is one card, three share it, to "
        "NCCL as on three hosts: through sockets, and in turns on the card.",
        least_seconds=20.0,
    ),
    Part(
        name="layers",
        title="Layers of a plain forward",
        explanation="Milliseconds of the device in one forward, by type of layer, in layers that have none inside; "
        "medians. What is computed outside of them (attention, sums) is the rest of the whole. The process enqueues "
        "ahead of the device as far as its queue allows, so that launches that are late count as little as can be.",
        least_seconds=20.0,
    ),
    Part(
        name="overhead",
        title="A rank's own work",
        explanation="Rank 1 of 4 with messages that cost nothing, against one process; `ideal` is a quarter of it. "
        "What Python launches is compared with a plain forward of the same minute, as hosts vary. `host` is the time "
        "after which the process has enqueued everything; `MiB` the memory that a step takes beside weights and "
        "what is kept between steps. A step runs from Python, or as a CUDA graph.",
        least_seconds=20.0,
    ),
    Part(
        name="process",
        title="Where the process spends a step",
        explanation="Functions by the time that they take themselves, under a profiler, which adds to each call: those "
        "that take most in a step of this rank beyond the plain forward, whose figures stand beside. Whole steps are "
        "without it.",
        least_seconds=20.0,
    ),
    Part(
        name="compiled",
        title="With compiled blocks",
        explanation="The same after `compile_repeated_blocks(fullgraph=True)`, in the plain forward too.",
        least_seconds=60.0,
    ),
    Part(
        name="ranks",
        title="Steps on several GPUs",
        explanation="A GPU for each rank, and messages over NCCL. Of the slowest rank the median. `ideal` is the plain "
        "forward, on all of these GPUs at once, divided by their number.",
        least_seconds=60.0,
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


def run_part(
    part: Part, python: str, device: str, seconds: float, root: Path, known: Iterable[dict[str, Any]] = ()
) -> Outcome:
    """Run a part for at most `seconds`, or until ctrl-C. What it had found when it was ended is kept.

    `known`: rows of an earlier run that did not get through. Tests that have passed there are not run again.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        earlier, rows, log = (Path(folder, name) for name in ("known.jsonl", "rows.jsonl", "log.txt"))
        earlier.write_text("".join(dumps(row) + "\n" for row in known))
        command = [python, "-m", "benchmarks.gpu.battery.part", part.name, "--device", device]
        command += ["--known", str(earlier), "--rows", str(rows)]
        with log.open("w") as output:
            process = subprocess.Popen(
                command, cwd=root, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
            code, cut_off = _waited_for(process, seconds)
        found = [loads(line) for line in rows.read_text().splitlines()] if rows.exists() else []
        message = log.read_text(errors="replace")[-LAST_WORDS:]
    failed = [row for row in found if row.get("result") == "failed"]
    ok = code == 0 and not failed and bool(found)
    error = "" if ok else f"{cut_off or f'exit code {code}'}\n{message}"
    return Outcome(part=part.name, ok=ok, seconds=time.monotonic() - began, rows=found, error=error, cut_off=cut_off)


def _waited_for(process: subprocess.Popen[bytes], seconds: float) -> tuple[int | None, str]:
    """Return the exit code of a part, or None and by what it was cut off."""
    try:
        return process.wait(seconds), ""
    except subprocess.TimeoutExpired:
        return None, OUT_OF_TIME
    except KeyboardInterrupt:
        return None, INTERRUPTED
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a part and the processes that it has started, also those that a part which has crashed left behind."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(KILLED_WITHIN)
