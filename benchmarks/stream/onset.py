"""From an audio signal to its image: the budget that is printed beforehand against what is measured, in live streams.

    python -m benchmarks.stream.onset                                               # stages that sleep
    python -m benchmarks.stream.onset --model assets/face-stream --variant fp16      # and a face, from voice to mouth
    python -m benchmarks.stream.onset --write docs/figures/stream-onset.md

Live audio waits until its block is full, is denoised and decoded, and is shown by the clock. Stages that
sleep show what messages and waiting add, on any machine. A face shows all of it: its own costs are taken from a stream
as fast as can be; then it is silent and begins to speak, in pieces of 12.5 ms. What counts is when a watcher sees the
frame that should be the first with a mouth half open, after its audio; a mouth that lags by frames is so much later.
`--slow` is for machines that do not keep up with life: audio and clock go slower, and the budget is of the same.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.page import publish
from benchmarks.stream.__main__ import RUN, Sleeper
from benchmarks.stream.budget import OnsetBudget, onset
from benchmarks.stream.long import loading_of
from patchpar import StreamDelivery, StreamingPipeline, StreamPlan
from patchpar.comm.collectives import Communicator
from patchpar.launch.local import LocalExecutor
from patchpar.models.streaming.causal.audio_conditioner import audio_levels
from patchpar.plan.stream_simulation import StreamCosts
from patchpar.stream.causal.stage_loop import StageLoop
from patchpar.stream.delivery import Chunk
from patchpar.stream.messages import BeginBlock, EndStream
from patchpar.stream.stage import FinishedBlock, Order, StageIO

FRAMES = 12
PIECE = 0.0125
"""Seconds of audio that are pushed at once."""
HEAD_START = 0.5
"""Seconds before the audio begins, in which all ranks are there."""
QUIET_BLOCKS, SPOKEN_BLOCKS = 4, 16
MEASURED_BLOCKS = 12
LAGS = 8
"""Frames, fewer, by which a mouth may be behind its audio."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One line of the table. Seconds."""

    what: str
    budget: OnsetBudget
    measured: float

    def row(self) -> str:
        """As Markdown."""
        off = self.measured / self.budget.seconds - 1
        parts = " | ".join(f"{part:.2f}" for part in self._parts())
        return f"| {self.what} | {parts} | {self.measured:.2f} | {off:+.1%} |"

    def _parts(self) -> tuple[float, ...]:
        budget = self.budget
        return budget.fill, budget.steps, budget.decode, budget.buffer, budget.seconds


def on_rank(this: Any, plan: StreamPlan, costs: StreamCosts, blocks: int) -> tuple[float, list[float]]:
    """When the audio began and when blocks came out, by time.time; block b has its audio (b + 1) costs.source later."""
    out: list[float] = []
    begin = time.time() + HEAD_START

    def order(block: int, patience: float) -> Order:
        if block == blocks:
            return EndStream()
        time.sleep(max(0.0, begin + (block + 1) * costs.source - time.time()))
        return BeginBlock(inputs=(), updates=())

    def put(finished: FinishedBlock) -> None:
        out.append(time.time())

    around = StageIO(order=order, put=put, is_cancelled=lambda: False)
    StageLoop(Sleeper(steps=plan.steps, costs=costs), plan, this.rank, Communicator(this.transport), around, RUN).run()
    return begin, out


def asleep(pool: LocalExecutor, plan: StreamPlan, costs: StreamCosts, blocks: int) -> Found:
    """Shown by the clock, the first frame of block b is due a fixed time after its first audio: the longest way."""
    for count in (1, blocks):  # the first time ranks import what they need
        found = pool.call("run", "benchmarks.stream.onset:on_rank", plan.ranks, "auto", (plan, costs, count))
    (begin, _), (_, out) = found[0], found[plan.ranks - 1]
    ways = [arrived - (begin + block * costs.source) for block, arrived in enumerate(out)]
    return Found(what=f"asleep: {plan}", budget=onset(plan, costs), measured=max(ways))


def costs_of(pipe: StreamingPipeline, reference: np.ndarray, source: float) -> tuple[StreamCosts, float]:
    """Seconds of a step and of decoding on these ranks, from a stream as fast as can be.

    And how much longer than the usual block the slowest took, as a share.
    """
    with pipe.stream("", reference=reference, delivery=StreamDelivery(lead=1)) as session:
        times = [time.perf_counter() for _ in islice(session, MEASURED_BLOCKS)]
        session.stop()
        list(session)
    busy = {figures.rank: figures.busy / max(1, figures.blocks) for figures in session.figures}
    stages = pipe.plan.stages
    seconds = [busy[stage.ranks.start] for stage in stages]
    alone = [value / len(stage.steps) for value, stage in zip(seconds, stages, strict=True) if not stage.decodes]
    last = stages[-1]
    if alone:
        step = sum(alone) / len(alone)
        decode = max(0.0, seconds[-1] - step * len(last.steps))
    else:  # one rank does all, so that they cannot be told apart, and need not be
        step, decode = seconds[-1] / len(last.steps), 0.0
    gaps = [after - before for before, after in pairwise(times)]
    costs = StreamCosts(step=step, decode=decode, frames=FRAMES, source=source)
    return costs, max(gaps) / statistics.median(gaps) - 1


def awake(model: str, devices: str, loading: dict[str, Any], slow: float) -> Found:
    """A face that is silent and begins to speak; all `slow` times as slowly as in life."""
    from training.evaluate_face import held_out_talk
    from training.face_data import AUDIO, openings
    from training.face_measure import mouth_opening
    from training.speech import RATE

    talk = held_out_talk(0, 6.0)
    with StreamingPipeline.from_pretrained(model, devices=devices, **loading) as pipe:
        form = pipe._format_at(pipe.config.fps)
        block = (form.first_frame(2) - form.first_frame(1)) / form.fps
        costs, spread = costs_of(pipe, talk.reference, slow * block)
        budget = onset(pipe.plan, costs, spread=spread)
        quiet = torch.zeros(round((QUIET_BLOCKS + 0.5) * block * RATE))
        samples = torch.cat([quiet, torch.from_numpy(talk.samples).float()])
        with pipe.stream("", reference=talk.reference, audio="live", seed=1) as session:
            began, stop = time.monotonic(), threading.Event()
            speaker = threading.Thread(target=_speak, args=(session, samples, RATE, slow, stop))
            speaker.start()
            displayed = list(_displayed(islice(session, SPOKEN_BLOCKS), slow, form.fps))
            stop.set()
            speaker.join()
    mouths = mouth_opening(np.stack([frame for _, frame in displayed]))
    meant = openings(audio_levels(samples, AUDIO)).numpy()[: len(mouths)]
    opens = half_open(meant)
    seen = displayed[opens + lag_of(mouths, meant)][0]
    return Found(what=f"a face: {pipe.plan}", budget=budget, measured=seen - (began + slow * opens / form.fps))


def half_open(mouths_F: np.ndarray) -> int:
    """The first frame in which a mouth is half as open as it will be."""
    return int(np.argmax(mouths_F >= (mouths_F.max() + mouths_F.min()) / 2))


def lag_of(mouths_F: np.ndarray, meant_F: np.ndarray) -> int:
    """By how many frames a mouth is behind what is meant, by all of them: one frame alone may fall to either side."""
    likeness = [float(np.corrcoef(mouths_F[lag:], meant_F[: len(meant_F) - lag])[0, 1]) for lag in range(LAGS)]
    return int(np.argmax(likeness))


def _displayed(chunks: Iterable[Chunk], slow: float, fps: float) -> Iterator[tuple[float, np.ndarray]]:
    """Frames, each with the time at which a watcher's clock shows it."""
    clock: float | None = None
    for chunk in chunks:
        now, pts = time.monotonic(), slow * chunk.pts
        if clock is None or now > clock + pts:
            clock = now - pts
        yield from ((clock + pts + slow * number / fps, frame) for number, frame in enumerate(chunk.frames.numpy()))


def _speak(session: Any, samples: torch.Tensor, rate: int, slow: float, stop: threading.Event) -> None:
    """Push the audio as a microphone would."""
    piece, began = round(PIECE * rate), time.monotonic()
    for number, start in enumerate(range(0, len(samples), piece), 1):
        if stop.wait(max(0.0, began + number * slow * PIECE - time.monotonic())):
            return
        session.push_audio(samples[start : start + piece], rate)


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", type=float, default=0.2, help="seconds per denoising step of stages that sleep (0.2)")
    parser.add_argument("--decode", type=float, default=0.15, help="seconds to decode a block (0.15)")
    parser.add_argument("--source", type=float, default=0.48, help="seconds of audio of a block (0.48)")
    parser.add_argument("--blocks", type=int, default=20, help="blocks per stream of stages that sleep (20)")
    parser.add_argument("--model", help="a folder of a face that talks")
    parser.add_argument("--slow", type=float, default=1.0, help="audio and clock of the face so many times slower (1)")
    parser.add_argument("--variant", help="weight files to take of it, such as fp16; computed in float32")
    parser.add_argument("--devices", default="cpu:2", help="for the face (cpu:2)")
    parser.add_argument("--write", type=Path, help="a Markdown file to write")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print or write the table."""
    options = options_of(arguments)
    costs = StreamCosts(step=options.step, decode=options.decode, frames=FRAMES, source=options.source)
    plans = [StreamPlan.even(steps, steps + 1) for steps in (2, 3, 4)] + [StreamPlan.even(4, 3)]
    with LocalExecutor(["cpu"] * 5, "tests.ranks:Ranks", deadline=120.0) as pool:
        found = [asleep(pool, plan, costs, options.blocks) for plan in plans]
    if options.model is not None:
        found.append(awake(options.model, options.devices, loading_of(options.variant), options.slow))
    lines = [
        "# From an audio signal to its image",
        "",
        f"Seconds, in live streams that are shown by the clock. Stages that sleep: {options.step:g} s per step, "
        f"{options.decode:g} s to decode, {options.source:g} s of audio per block. By benchmarks/stream/onset.py.",
        "",
        "| stream | until a block is full | steps | decoding | for the slowest block | budget | measured | off by |",
        "|---|---|---|---|---|---|---|---|",
        *(one.row() for one in found),
    ]
    publish(lines, options.write)


if __name__ == "__main__":
    main()
