"""Test and measure patchpar on the NVIDIA GPUs of this machine; write docs/figures/gpu.md and gpu.json.

python -m benchmarks.gpu.battery --minutes 8      # goes on where an earlier run was cut off
python -m benchmarks.gpu.battery --fresh          # from the start
python -m benchmarks.gpu.battery --device cpu     # the battery itself, on tiny models: no measurement of a GPU

Needs Python 3.10 only. Where the torch at hand has no CUDA, an environment is made in `--venv` first, which takes a few
minutes and is not counted. What has passed is not run again, test by test, on the same GPUs with the same torch and the
same sources; the page has all parts, whichever are asked for. The exit code is 0 when every part has passed, 1 when one
failed or was not reached, 2 on a machine without an NVIDIA GPU, 130 when it was stopped.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path

from benchmarks.gpu.battery.environment import cards, commit_of, python_with, sources_of, torch_of
from benchmarks.gpu.battery.journal import Journal, Outcome
from benchmarks.gpu.battery.parts import INTERRUPTED, PARTS, Part, run_part
from benchmarks.gpu.battery.report import lines
from benchmarks.page import write_page

ROOT = Path(__file__).parents[3]
PAGES = {"cuda": ROOT / "docs" / "figures" / "gpu.md", "cpu": ROOT / "build" / "gpu-battery-cpu.md"}
NO_GPU, STOPPED = 2, 130


def main() -> int:
    """Run all parts; return the exit code."""
    options = _options()
    found = cards() if options.device == "cuda" else ["no GPU: tiny models on the CPU"]
    if not found:
        print(
            "There is no NVIDIA GPU here (nvidia-smi names none): nothing was tested or measured. "
            "--device cpu runs the battery itself on the CPU.",
            file=sys.stderr,
        )
        return NO_GPU
    try:
        python = python_with(options.device, options.venv, ROOT)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    page = options.write or PAGES[options.device]
    software = torch_of(python)
    machine = f"{'; '.join(found)}: {software}, commit {commit_of(ROOT) or 'unknown'}"
    journal = Journal(options.journal / f"{options.device}.jsonl", key=f"{found} {software} {sources_of(ROOT)}")
    if options.fresh:
        journal.clear()
    give_up = time.monotonic() + 60 * options.minutes
    parts = [part for part in PARTS if not options.parts or part.name in options.parts]
    for part in parts:
        outcome = _run(part, journal, python, options.device, give_up)
        write_page("\n".join(lines(PARTS, journal, options.device, machine)) + "\n", page)
        if outcome is not None and outcome.cut_off == INTERRUPTED:
            print(f"{page}: stopped; the same command goes on", file=sys.stderr)
            return STOPPED
    print(f"{page}: {sum(journal.passed(part.name) for part in parts)} of {len(parts)} parts passed")
    return 0 if all(journal.passed(part.name) for part in parts) else 1


def _run(part: Part, journal: Journal, python: str, device: str, give_up: float) -> Outcome | None:
    """Run one part that has not passed yet, if there is time for it; return what came of it."""
    left, before = give_up - time.monotonic(), journal.latest(part.name)
    if journal.passed(part.name):
        print(f"{part.name}: done before")
        return None
    if left < part.least_seconds:
        print(f"{part.name}: no time left")
        return None
    print(f"{part.name}: at most {left:.0f} s", flush=True)
    outcome = run_part(part, python, device, left, ROOT, known=() if before is None else before.rows)
    journal.add(outcome)
    how = "passed" if outcome.ok else outcome.cut_off or "FAILED"
    print(f"{part.name}: {how} in {outcome.seconds:.0f} s", flush=True)
    return outcome


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0, help="time for all parts; what is left waits")
    parser.add_argument("--device", choices=list(PAGES), default="cuda")
    parser.add_argument("--parts", nargs="+", choices=[part.name for part in PARTS], help="only these")
    parser.add_argument("--fresh", action="store_true", help="forget what earlier runs have finished")
    parser.add_argument("--write", type=Path, help="the page; default docs/figures/gpu.md, on the CPU a file in build/")
    parser.add_argument("--journal", type=Path, default=ROOT / "build" / "gpu-battery", help="folder of finished parts")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv-gpu", help="where torch with CUDA is installed")
    return parser.parse_args()


def _stop_in_order() -> None:
    """Make what ends this process end its part too, and write the page: ctrl-C, a scheduler, a lost terminal."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)


if __name__ == "__main__":
    _stop_in_order()
    sys.exit(main())
