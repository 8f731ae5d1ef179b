"""`LiveAudio`: the audio of a microphone or a pipe, pushed to a stream as it comes, in a thread."""

import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Protocol

from torch import Tensor

from patchpar.errors import PatchparError
from patchpar.stream.session import StreamSession

AHEAD_SECONDS = 2.0
"""Seconds of audio that may wait for their blocks; a pipe that is faster is read no further until then."""
QUIET_SECONDS = 1.0
"""Seconds without audio, or images, that are worth a note."""
LOOK_SECONDS = 0.02


class LiveAudioInput(Protocol):
    """Where live audio comes from. `name`: as in "the microphone". `ends`: whether the stream ends with it."""

    @property
    def name(self) -> str:
        """What people call it."""

    @property
    def ends(self) -> bool:
        """Whether the stream ends with it; otherwise silence follows."""

    def audio(self) -> Iterator[tuple[Tensor, int]]:
        """Yield samples [N] or [channels, N] between -1 and 1, and their rate, as they come. Raises PlanError."""


class LiveReader:
    """A thread that reads `source`, and what is wrong with it. `_read` notes when something has come."""

    def __init__(self, source: Any, thread: str) -> None:
        self._source = source
        self._error: PatchparError | None = None
        self._received_at: float | None = None
        self._has_ended = False
        self._thread = threading.Thread(target=self._run, name=thread, daemon=True)

    def start(self) -> None:
        """Start the thread. It ends with the source, or with the first piece of audio after the stream."""
        self._thread.start()

    def fail(self, error: Exception) -> None:
        """Note what is wrong with the source, or with what came from it."""
        if not isinstance(error, PatchparError):
            error = PatchparError(f"{self._source.name} cannot be read: {error}")
        self._error = error

    @property
    def _is_quiet(self) -> bool:
        return self._received_at is not None and time.monotonic() > self._received_at + QUIET_SECONDS

    def _run(self) -> None:
        try:
            self._read()
            self._has_ended = True
        except Exception as error:  # noqa: BLE001  of a file or a device
            self.fail(error)

    def _read(self) -> None:
        raise NotImplementedError


class LiveAudio(LiveReader):
    """Pushes the audio of `source` to `session`. A source that is silent, or fails and not `ends`, ends no stream."""

    def __init__(self, source: LiveAudioInput, session: StreamSession) -> None:
        super().__init__(source, "patchpar-live-audio")
        self._session = session

    @property
    def note(self) -> str:
        """What is wrong with the source, as a sentence; empty if nothing is."""
        if self._error is not None:
            return f"{self._error}; the stream {'ends there' if self._source.ends else 'goes on with silence'}"
        if self._has_ended:
            return "" if self._source.ends else f"{self._source.name} has stopped; the stream goes on with silence"
        meanwhile = "there is silence" if self._session.is_kept_alive else "the stream waits"
        if self._received_at is None:
            return f"no audio from {self._source.name} yet; {meanwhile} until then"
        return f"no audio from {self._source.name} any more; {meanwhile} until it goes on" if self._is_quiet else ""

    def _read(self) -> None:
        session = self._session
        for samples, rate in self._source.audio():
            self._received_at = time.monotonic()
            while session.audio_ahead > AHEAD_SECONDS and not session.is_over:
                time.sleep(LOOK_SECONDS)
                self._received_at = time.monotonic()
            session.push_audio(samples, rate)
        self._has_ended = True
        if self._source.ends:
            session.end_audio()

    def fail(self, error: Exception) -> None:
        """Note an error. What ends the stream ends it so too, which would wait for audio otherwise."""
        if self._session.is_over:
            return
        super().fail(error)
        if self._source.ends:
            with suppress(PatchparError):  # it is over by now
                self._session.end_audio()
