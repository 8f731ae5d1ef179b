"""A live stream with three viewers, one of which reads too slowly: memory of the server and of its ranks.

    python -m benchmarks.stream.viewers --write docs/figures/stream-viewers.md
    python -m benchmarks.stream.viewers --minutes 1        # sooner

Audio comes at its own speed, a chunk is shown when it is due, and viewers in a process of their own read the video from
the WebSocket of the page that `patchpar stream --ws` serves. The model has a few thousand weights; its frames are shown
larger, so that the video has as many bytes as that of a face. The page is served by the process that has the session.
"""

from __future__ import annotations

import argparse
import base64
import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from torch import Tensor

from benchmarks.page import publish
from benchmarks.stream.live import microphone
from benchmarks.stream.long import FLAT, MINUTES, Record, memory_rows, model_of, resident_bytes
from patchpar import StreamDelivery, StreamingPipeline
from patchpar.web.server import HOME
from patchpar.web.viewer import VideoScreen

LARGER = 16
"""Times that frames are shown larger."""
SLOW_BYTES = 20_000
"""Bytes that the slow viewer reads in a second."""
SMALL_BUFFER = 16 << 10
"""Bytes of the slow viewer's receive buffer: what waits there is not seen by the server."""
DEADLINE = 30.0
"""Seconds that a viewer waits for a message."""
VIEWERS: tuple[tuple[str, int | None], ...] = (("first", None), ("second", None), ("slow", SLOW_BYTES))
"""By name: bytes that each reads in a second; None for as many as there are."""
TEXT, BINARY, CLOSE, PING, PONG = 1, 2, 8, 9, 10
"""Kinds of WebSocket frames (RFC 6455, section 5.2)."""


@dataclass(slots=True, kw_only=True)
class Viewed:
    """What one viewer has got. `missed`: fragments between those that came. `connections`: how often it has come."""

    name: str
    num_bytes: int = 0
    fragments: int = 0
    missed: int = 0
    connections: int = 0
    last: int | None = None

    def add(self, payload: bytes) -> None:
        """Count a message of the video: a fragment has a number, the header has none."""
        self.num_bytes += len(payload)
        if payload[4:8] != b"moof":
            return
        number = int.from_bytes(payload[20:24], "big")  # mfhd, ISO/IEC 14496-12, section 8.8.5
        self.missed += 0 if self.last is None else number - self.last - 1
        self.fragments, self.last = self.fragments + 1, number


class Viewer:
    """A client of the page's WebSocket that reads at most `most` bytes per second, and comes again if it is cut off."""

    def __init__(self, name: str, url: str, most: int | None) -> None:
        parts = urlsplit(url)
        self._address, self._most, self.viewed = (parts.hostname, parts.port), most, Viewed(name=name)

    def watch(self, is_over: Any) -> None:
        """Read until `is_over` is set."""
        while not is_over.is_set():
            with suppress(OSError, EOFError), self._connected() as (connection, file):
                self.viewed.connections += 1
                self._read(connection, file, is_over)
            time.sleep(0.1)

    @contextmanager
    def _connected(self) -> Iterator[tuple[socket.socket, IO[bytes]]]:
        with socket.socket() as connection:
            if self._most is not None:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
            connection.settimeout(DEADLINE)
            connection.connect(self._address)
            host, port = self._address
            key = base64.b64encode(os.urandom(16)).decode()
            lines = ("GET /video HTTP/1.1", f"Host: {host}:{port}", "Upgrade: websocket", "Connection: Upgrade")
            lines += (f"Sec-WebSocket-Key: {key}", "Sec-WebSocket-Version: 13", "", "")
            connection.sendall("\r\n".join(lines).encode())
            with connection.makefile("rb", buffering=4096) as file:
                if b" 101 " not in file.readline():
                    raise EOFError("the server has refused the WebSocket")
                while file.readline().strip():
                    pass
                yield connection, file

    def _read(self, connection: socket.socket, file: IO[bytes], is_over: Any) -> None:
        while not is_over.is_set():
            kind, payload = read_frame(file)
            if kind == CLOSE:
                return
            if kind == PING:
                connection.sendall(bytes([0x80 | PONG, 0x80 | len(payload)]) + bytes(4) + payload)  # masked by zeros
            if kind == BINARY:
                self.viewed.add(payload)
                if self._most is not None:
                    time.sleep(len(payload) / self._most)


def read_frame(file: IO[bytes]) -> tuple[int, bytes]:
    """Return kind and payload of the next frame of a server (RFC 6455, section 5.2). Raises EOFError at the end."""
    first, length = _exactly(file, 2)
    if length in (126, 127):
        length = int.from_bytes(_exactly(file, 2 if length == 126 else 8), "big")
    return first & 0x0F, _exactly(file, length)


def _exactly(file: IO[bytes], count: int) -> bytes:
    data = file.read(count)
    if len(data) < count:
        raise EOFError("the server has closed the WebSocket")
    return data


def watch_all(url: str, is_over: Any, results: Any) -> None:
    """Let all viewers watch until `is_over` is set, and put what each has got into `results`. In its own process."""
    viewers = [Viewer(name, url, most) for name, most in VIEWERS]
    threads = [threading.Thread(target=viewer.watch, args=(is_over,), daemon=True) for viewer in viewers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results.put([viewer.viewed for viewer in viewers])


@contextmanager
def watched(url: str) -> Iterator[list[Viewed]]:
    """Viewers in a process of their own; the list has what they have got once the context is left."""
    context, found = multiprocessing.get_context("spawn"), list[Viewed]()
    is_over, results = context.Event(), context.Queue()
    process = context.Process(target=watch_all, args=(url, is_over, results), daemon=True)
    process.start()
    try:
        yield found
    finally:
        is_over.set()
        found += results.get(timeout=2 * DEADLINE)
        process.join(DEADLINE)


def enlarged(frames_FHWC: Tensor) -> Tensor:
    """Frames LARGER times as high and as wide."""
    return frames_FHWC.repeat_interleave(LARGER, 1).repeat_interleave(LARGER, 2)


def live(pipe: StreamingPipeline, screen: VideoScreen, seconds: float, looks: int) -> tuple[Record, float]:
    """A live stream of so many seconds: its record, and by how much a chunk has been late at most, in seconds."""
    record, late, pids = Record(), 0.0, (os.getpid(), *pipe._workers.pids)
    delivery = StreamDelivery(pace="realtime")
    with (
        pipe.stream("a person talks", audio="live", delivery=delivery) as session,
        microphone(session, time.monotonic()),
    ):
        for chunk in session:
            screen.show(enlarged(chunk.frames), chunk.pts, chunk.audio)
            record.blocks, record.frames = record.blocks + 1, record.frames + len(chunk.frames)
            record.seconds, late = record.frames / pipe.config.fps, max(late, session.behind)
            if record.seconds >= seconds * (len(record.resident) + 1) / looks:
                record.resident.append(tuple(map(resident_bytes, pids)))
            if record.seconds >= seconds:
                break
    return record, late


def report(record: Record, late: float, viewed: Sequence[Viewed], plan: object, fps: float) -> Iterator[str]:
    """The page of figures."""
    yield "# Live with three viewers"
    yield ""
    yield (
        f"Made by `python -m benchmarks.stream.viewers`: {record.frames} frames, {record.seconds / 60:.1f} minutes "
        f"live at {fps:g} frames/s, with audio as it comes; {plan}. Chunks were up to {late:.2f} s late."
    )
    yield ""
    yield (
        f"Memory was looked at {len(record.resident)} times, of which the first tenth is left out. It is flat where "
        f"neither its floor nor its peak moves by as much as {FLAT:.0%} from the first half to the second. The process "
        "of the session encodes the video and serves the page."
    )
    yield ""
    yield from memory_rows(record, ["session and page", *(f"rank {n}" for n in range(len(record.resident[0]) - 1))])
    yield ""
    yield (
        "The video is that of the page's WebSocket, a fragment for each frame and each packet of audio. A viewer that "
        "falls behind what is held goes on at the newest key frame; one that is cut off comes again."
    )
    yield ""
    yield "| viewer | reads at most, kB/s | kB/s | fragments | missed | connections |"
    yield "|---|---|---|---|---|---|"
    for each, (_, most) in zip(viewed, VIEWERS, strict=True):
        limit, rate = "all" if most is None else f"{most / 1e3:.0f}", each.num_bytes / record.seconds / 1e3
        yield f"| {each.name} | {limit} | {rate:.1f} | {each.fragments} | {each.missed} | {each.connections} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the page, and write it where it is wanted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"of the stream (default: {MINUTES})")
    parser.add_argument("--devices", default="cpu:2", help="as the command line takes them (default: cpu:2)")
    parser.add_argument("--looks", type=int, default=200, help="how often to look (default: 200)")
    parser.add_argument("--write", type=Path, help="a Markdown file to write")
    options = parser.parse_args(arguments)
    with model_of(None) as model, StreamingPipeline.from_pretrained(model, devices=options.devices) as pipe:
        screen = VideoScreen(HOME, 0, pipe.config.fps, pipe.rate)
        screen.open()
        try:
            with watched(screen.page.url) as viewed:
                record, late = live(pipe, screen, 60.0 * options.minutes, options.looks)
        finally:
            screen.close()
        lines = list(report(record, late, viewed, pipe.plan, pipe.config.fps))
    publish(lines, options.write)


if __name__ == "__main__":
    main()
