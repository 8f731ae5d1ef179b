"""How far behind live a stream is after an outage, in Python and on the page in a browser.

    python -m benchmarks.stream.live --write docs/figures/stream-live.md

Ranks that sleep run at 1.8 times the speed of live audio and stand still once for 4 s. The page is that of
`patchpar stream --ws`, in a Chromium without a window; its script is held up once for 3 s.
"""

from __future__ import annotations

import argparse
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.page import publish
from patchpar.models.streaming.causal.audio_conditioner import AudioConfig
from patchpar.stream.audio_track import AudioTrack
from patchpar.stream.delivery import Output, StreamDelivery, StreamFormat
from patchpar.stream.messages import BlockReady, CancelStream, EndStream, ProducedBlock, PromptUpdate, StreamRun
from patchpar.stream.session import StreamSession
from patchpar.web.server import HOME
from patchpar.web.viewer import VideoScreen
from tests.app.browser import installed, started

FPS, RATE, LATENTS, PER_LATENT = 20, 16000, 2, 2
AUDIO = AudioConfig(dim=24, heads=2, after=(0,), fps=FPS, rate=RATE, bands=3, tokens=3, per_latent=PER_LATENT)
FORMAT = StreamFormat(fps=FPS, height=8, width=12, frames=LATENTS, per_latent=PER_LATENT)
BLOCK = LATENTS * PER_LATENT / FPS
"""Seconds of a block."""
OUTAGE_BLOCK, OUTAGE, AFTER, SPEED = 30, 4.0, 8.0, 1.8
POLICIES: tuple[Output, ...] = ("block", "drop_oldest", "skip_to_live")
WAITING = (1, 5, 15)
"""Minutes of audio that wait while more is pushed."""
HICCUP, WATCHED = 3.0, 8
"""Seconds for which the page is held up, and those in which it is watched before and after."""
LAG = """start => {
  return Date.now() / 1000 - start - document.querySelector("video").currentTime;
}"""


class SleepingRanks:
    """Ranks that sleep for each block, and once for OUTAGE seconds."""

    def run(
        self, course: StreamRun, on_event: Callable[[int, Any], None], on_start: Callable[[Any], None]
    ) -> list[Any]:
        """Run a stream, see StreamDriver."""
        orders: queue.Queue[Any] = queue.Queue()
        on_start(lambda rank, order: orders.put(order) if rank == 0 else None)
        block = course.first_block
        while True:
            on_event(0, BlockReady(block=block))
            if isinstance(orders.get(), (EndStream, CancelStream)):
                return []
            time.sleep(BLOCK / SPEED + (OUTAGE if block == OUTAGE_BLOCK else 0))
            frames = torch.zeros(3 if block == 0 else 4, 8, 12, 3, dtype=torch.uint8)
            on_event(1, ProducedBlock(block=block, frames=frames, seconds=0.1, sink=None))
            block += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Displayed:
    """`at`: seconds since the beginning of the stream. `late`: of the end of the chunk behind its audio."""

    at: float
    late: float


@contextmanager
def microphone(stream: StreamSession, begin: float) -> Iterator[None]:
    """Push silence as it would come from a microphone."""
    stop = threading.Event()

    def speak() -> None:
        pushed = 0
        while not stop.wait(0.02):
            due = int((time.monotonic() - begin) * RATE)
            stream.push_audio(torch.zeros(due - pushed), RATE)
            pushed = due

    thread = threading.Thread(target=speak, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def through_an_outage(output: Output) -> tuple[list[Displayed], float]:
    """Chunks of a live stream, and when its outage began, in seconds since the beginning."""
    course = StreamRun(ranks=2, seed=0, rows=4, columns=6, first_block=0, adapt_sink=False)
    delivery = StreamDelivery(output=output, pace="realtime")
    track = AudioTrack(AUDIO, LATENTS)
    with StreamSession(SleepingRanks().run, (course,), FORMAT, delivery, track, credit=4) as stream:
        stream.begin(PromptUpdate(text="a"))
        begin, displayed = time.monotonic(), list[Displayed]()
        outage = FORMAT.seconds(OUTAGE_BLOCK + 1)
        with microphone(stream, begin):
            for chunk in stream:
                at = time.monotonic() - begin
                displayed.append(Displayed(at=at, late=at - chunk.pts - len(chunk.frames) / FPS))
                if at > outage + OUTAGE + AFTER + 2:
                    return displayed, outage
    raise AssertionError("a live stream does not end by itself")


def outage_rows() -> Iterator[str]:
    """A row for each policy of a slow consumer."""
    yield "| output | blocks of 40 shown in the 8 s after it | behind at its end, s | 8 s later, s |"
    yield "|---|---|---|---|"
    for output in POLICIES:
        displayed, outage = through_an_outage(output)
        end = outage + OUTAGE
        after = [each for each in displayed if end <= each.at < end + AFTER]
        yield f"| {output} | {len(after)} | {after[0].late:.2f} | {after[-1].late:.2f} |"


def push_rows() -> Iterator[str]:
    """What a push of 20 ms costs with audio waiting."""
    yield "| minutes of audio waiting | microseconds for a push of 20 ms |"
    yield "|---|---|"
    for minutes in WAITING:
        track, piece = AudioTrack(AUDIO, LATENTS), torch.zeros(RATE // 50)
        for _ in range(minutes * 60 * 50):
            track.push(piece, RATE)
        begin = time.perf_counter()
        for _ in range(200):
            track.push(piece, RATE)
        yield f"| {minutes} | {(time.perf_counter() - begin) / 200 * 1e6:.0f} |"


def page_rows(chromium: str) -> Iterator[str]:
    """Seconds behind live on the page, second by second."""
    screen, stop, begin = VideoScreen(HOME, 0, FPS, RATE), threading.Event(), time.time()
    screen.open()

    def show() -> None:
        number, samples = 0, torch.sin(torch.arange(4 * RATE // FPS) / 20) * 0.1
        while not stop.wait(max(0.0, begin + number * BLOCK - time.time())):
            screen.show(torch.full((4, 96, 96, 3), 100 + number % 50, dtype=torch.uint8), number * BLOCK, samples)
            number += 1

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    yield "| | " + " | ".join(f"{second} s" for second in range(1, WATCHED + 1)) + " |"
    yield "|---" * (WATCHED + 1) + "|"
    try:
        with started(chromium) as browser:
            page = browser.new_page()
            page.goto(screen.page.url)
            page.wait_for_function("document.querySelector('video')?.currentTime > 0.5")
            for when in ("after the page was opened", f"after it was held up for {HICCUP:g} s"):
                seen = []
                for _ in range(WATCHED):
                    time.sleep(1)
                    seen.append(page.evaluate(LAG, begin))
                yield f"| {when} | " + " | ".join(f"{lag:.2f}" for lag in seen) + " |"
                page.evaluate(f"{{ const end = Date.now() + {1000 * HICCUP}; while (Date.now() < end); }}")
    finally:
        stop.set()
        thread.join()
        screen.close()


def report() -> Iterable[str]:
    """The page of figures. Raises SystemExit without a Chromium, before anything is measured."""
    chromium = installed()
    if chromium is None:
        raise SystemExit("no Chromium here: apt-get install chromium, or make browser")
    yield "# Live streams after an outage"
    yield ""
    yield "Made by `python -m benchmarks.stream.live`. Seconds on this machine's clock; no GPU takes part."
    yield ""
    yield f"## Ranks at {SPEED:g} times the speed of live audio stand still for {OUTAGE:g} s"
    yield ""
    yield "From the end of a block's audio to its frames. A block lasts 0.2 s and waits until its audio is there."
    yield ""
    yield from outage_rows()
    yield ""
    yield "## Seconds behind live on the page"
    yield ""
    yield from page_rows(chromium)
    yield ""
    yield "## Pushing audio"
    yield ""
    yield from push_rows()


def main() -> None:
    """Print the page, and write it where it is wanted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path)
    publish(report(), parser.parse_args().write)


if __name__ == "__main__":
    main()
