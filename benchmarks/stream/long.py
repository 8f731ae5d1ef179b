"""A long stream: memory of every rank, times of frames, and colours of a face against its reference.

    python -m benchmarks.stream.long --model assets/face-stream --variant fp16 --devices cpu:2
    python -m benchmarks.stream.long --blocks 200          # sooner, and with a model of a few thousand weights

Frames are made as fast as they can be, so that half an hour of stream takes as long as its ranks need. Without
`--model` a model of a few thousand weights is built: it shows memory and times, and no face.

Memory of a rank on the CPU that decodes goes up and down by a quarter: the C library keeps what was freed for a while.
With MALLOC_MMAP_THRESHOLD_=262144 and MALLOC_TRIM_THRESHOLD_=262144 in the environment it hands it back at once, and
what the stream itself holds is seen.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from benchmarks.page import publish
from patchpar import StreamingPipeline

MINUTES = 30
PAGE = os.sysconf("SC_PAGESIZE")
SETTLED = 0.1
"""Of the looks, those left out: until all buffers have been taken once."""
FLAT = 0.02
"""What memory may vary by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTrend:
    """How the memory of a process goes over a stream.

    `floor`, `peak`: the lowest and the highest of the second half over that of the first, less 1. `wave`: the highest
    over the lowest, less 1.
    """

    floor: float
    peak: float
    wave: float

    @classmethod
    def of(cls, sizes: Sequence[int]) -> MemoryTrend:
        """From all that was seen."""
        first, second = sizes[: len(sizes) // 2], sizes[len(sizes) // 2 :]
        return cls(
            floor=min(second) / min(first) - 1, peak=max(second) / max(first) - 1, wave=max(sizes) / min(sizes) - 1
        )

    @property
    def is_flat(self) -> bool:
        """Whether neither floor nor peak moves."""
        return max(abs(self.floor), abs(self.peak)) < FLAT


@dataclass(slots=True, kw_only=True)
class Record:
    """What was seen. `resident`: bytes by process at each look."""

    blocks: int = 0
    frames: int = 0
    seconds: float = 0.0
    resident: list[tuple[int, ...]] = field(default_factory=list)

    def courses(self) -> list[MemoryTrend]:
        """How the memory of each process went, from when it has settled."""
        settled = self.resident[int(SETTLED * len(self.resident)) :]
        return [MemoryTrend.of(one) for one in zip(*settled, strict=True)]


def resident_bytes(pid: int) -> int:
    """Memory of a process that is there, shared pages included."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE


def watch(pipe: StreamingPipeline, blocks: int, looks: int, conditions: dict[str, Any]) -> Record:
    """So many blocks of a stream. Raises ValueError if a frame's time is not its number over the rate."""
    record, pids = Record(), pipe._workers.pids or (os.getpid(),)
    every = max(1, blocks // looks)
    with pipe.stream(**conditions) as session:
        for chunk in islice(session, blocks):
            if chunk.pts != record.frames / pipe.config.fps:
                raise ValueError(f"frame {record.frames} came with time {chunk.pts}")
            record.blocks, record.frames = record.blocks + 1, record.frames + len(chunk.frames)
            if record.blocks % every == 0:
                record.resident.append(tuple(map(resident_bytes, pids)))
    record.seconds = record.frames / pipe.config.fps
    return record


def table(record: Record, plan: object, fps: float) -> list[str]:
    """As Markdown."""
    return [
        "# A long stream",
        "",
        f"{record.blocks} blocks, {record.frames} frames, {record.seconds / 60:.1f} minutes at {fps:g} frames/s; "
        f"{plan}. By benchmarks/stream/long.py.",
        "",
        "The time of every frame is its number over the rate, to the last bit. Memory was looked at "
        f"{len(record.resident)} times, of which the first tenth is left out. It goes up and down; it is flat where "
        f"neither its floor nor its peak moves by as much as {FLAT:.0%} from the first half to the second.",
        "",
        *memory_rows(record, [str(rank) for rank in range(len(record.resident[-1]))], "rank"),
    ]


def memory_rows(record: Record, names: Sequence[str], of: str = "process") -> Iterator[str]:
    """Yield a table of how the memory of each process went, in Markdown. `of`: heading of the names."""
    yield f"| {of} | resident at the end, MB | floor | peak | up and down | |"
    yield "|---|---|---|---|---|---|"
    for name, state, last in zip(names, record.courses(), record.resident[-1], strict=True):
        outcome = "flat" if state.is_flat else "not flat"
        yield f"| {name} | {last / 1e6:.0f} | {state.floor:+.1%} | {state.peak:+.1%} | {state.wave:.1%} | {outcome} |"


@contextmanager
def model_of(path: str | None) -> Iterator[str]:
    """The model that was asked for, or a tiny one."""
    if path is not None:
        yield path
        return
    from tests.stream.tiny import write_folder

    with tempfile.TemporaryDirectory() as folder:
        yield str(write_folder(Path(folder)))


def loading_of(variant: str | None) -> dict[str, Any]:
    """Arguments of from_pretrained for weights of this kind."""
    return {} if variant is None else {"variant": variant, "torch_dtype": "float32"}


def conditions_of(has_face: bool, seconds: float) -> dict[str, Any]:
    """A held-out face that says the same again and again, or nothing of all that."""
    if not has_face:
        return {"prompt": "a person talks"}
    from benchmarks.stream.drift import talk_of
    from training.face_data import prompt_of
    from training.speech import RATE

    talk = talk_of()
    samples = torch.from_numpy(talk.samples).float()
    spoken = samples.repeat(int(seconds * RATE) // len(samples) + 2)
    return {"prompt": prompt_of(talk.mood), "reference": talk.reference, "audio": (spoken, RATE), "seed": talk.seed}


def drift_lines(model: Path, blocks: int, looks: int) -> list[str]:
    """Colours with and without a sink, as Markdown."""
    from benchmarks.stream.drift import drift, rows, talk_of

    kept, without = (drift(model, talk_of(), blocks, looks, has_sink=has_sink) for has_sink in (True, False))
    return [
        "",
        f"Looks of a face that training has not seen, over {blocks} blocks in one process. Without its sink (taken "
        "away when the window is full) they live in the window alone.",
        "",
        *rows(kept, without),
    ]


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder of a face that talks; by default a tiny model without a face")
    parser.add_argument("--variant", help="weight files to take of it, such as fp16; computed in float32")
    parser.add_argument("--devices", default="cpu", help="as the command line takes them (default: cpu)")
    parser.add_argument("--blocks", type=int, help=f"of the stream (default: those of {MINUTES} minutes)")
    parser.add_argument("--drift-blocks", type=int, help="with and without a sink (default: as --blocks)")
    parser.add_argument("--looks", type=int, default=200, help="how often to look (default: 200)")
    parser.add_argument("--write", type=Path, help="a Markdown file to write")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print or write the tables."""
    options = options_of(arguments)
    loading = loading_of(options.variant)
    with (
        model_of(options.model) as model,
        StreamingPipeline.from_pretrained(model, devices=options.devices, **loading) as pipe,
    ):
        form = pipe._format_at(pipe.config.fps)
        blocks = options.blocks or form.blocks(60.0 * MINUTES)
        conditions = conditions_of(options.model is not None, form.seconds(blocks + 1))
        record = watch(pipe, blocks, options.looks, conditions)
        lines = table(record, pipe.plan, pipe.config.fps)
    if options.model is not None:
        lines[0] += " of a face"
        lines += drift_lines(Path(options.model), options.drift_blocks or blocks, options.looks)
    publish(lines, options.write)


if __name__ == "__main__":
    main()
