"""The input audio of a stream: pushed in pieces of any length, read block by block."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from patchpar.errors import PlanError
from patchpar.media.resample import Resampler
from patchpar.models.speech.config import SpeechConfig
from patchpar.models.streaming.causal.audio_conditioner import AudioConfig
from patchpar.plan.scalars import is_number, plain

AudioInputs = AudioConfig | SpeechConfig
"""How much audio a block of a model needs, and what the model makes of it."""
MARGIN = 0.2  # s; pushes that are late by less leave no gap


def first_frame_number(latent: int, per_latent: int) -> int:
    """Return the first image frame that latent frame `latent` decodes to. Latent frame 0 decodes to one image."""
    return 0 if latent == 0 else (latent - 1) * per_latent + 1


class SampleBuffer:
    """Samples with the numbers `start` to `end` of an endless track, in the pieces in which they came.

    Adding a piece copies nothing.
    """

    def __init__(self) -> None:
        self._pieces: deque[Tensor] = deque()
        self.start = self.end = 0

    def push(self, samples_N: Tensor) -> None:
        if len(samples_N):
            self._pieces.append(samples_N)
            self.end += len(samples_N)

    def read(self, first: int, last: int) -> Tensor:
        """Return a copy [last - first] of the samples from number `first` until `last`, which must all be there."""
        found, start = [torch.zeros(0)], self.start
        for piece in self._pieces:
            if start >= last:
                break
            found.append(piece[max(0, first - start) : max(0, last - start)])
            start += len(piece)
        return torch.cat(found)

    def drop_before(self, number: int) -> None:
        while self._pieces and self.start + len(self._pieces[0]) <= number:
            self.start += len(self._pieces.popleft())
        if self._pieces and number > self.start:
            self._pieces[0] = self._pieces[0][number - self.start :]
            self.start = number

    def drop_from(self, number: int) -> None:
        while self._pieces and self.end - len(self._pieces[-1]) >= number:
            self.end -= len(self._pieces.pop())
        if self._pieces and number < self.end:
            self._pieces[-1] = self._pieces[-1][: number - self.end]
            self.end = number


class AudioSource(Protocol):
    """The source of a stream's audio; all of it is there, unless a source says otherwise."""

    def is_here(self, block: int) -> bool:
        """Whether all audio that block `block` needs is available."""
        return True

    def seconds_until_silence(self, block: int) -> float | None:
        """How long a block waits for its audio until silence takes its place; None for ever."""
        return None

    def is_over(self, block: int) -> bool:
        """Whether the audio ends before this block begins."""

    def take(self, block: int) -> tuple[Tensor, Tensor]:
        """Return (audio tokens [1, F, n, C], samples [N]) of a block."""


class KeepAlive:
    """When a live stream goes on without audio, because none has been pushed in time.

    Audio is expected at its own speed, from the first question on. Times in seconds; `clock` as time.monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start: float | None = None

    def seconds_left(self, begin: float, end: float) -> float:
        """Return how long to wait for the audio between these times of the stream; 0 once it is late."""
        now = self._clock()
        if self._start is None:
            self._start = now - begin
        return max(0.0, self._start + end + MARGIN - now)

    def used(self, end: float) -> None:
        """Note that the audio until `end` has been used: after a pause what follows is expected later by as much."""
        if self._start is not None:
            self._start = max(self._start, self._clock() - end - MARGIN)


class AudioTrack:
    """Mono audio for blocks of `frames` latent frames. Samples that no later block needs are dropped.

    `keep_alive`: when silence takes the place of audio that has not been pushed; None waits for the audio.
    """

    def __init__(self, config: AudioInputs, frames: int, keep_alive: KeepAlive | None = None) -> None:
        self._config, self._frames, self._keep_alive = config, frames, keep_alive
        self._samples = SampleBuffer()
        self._resampler = Resampler(config.rate, config.rate)
        self._is_silent = False
        self._end: int | None = None  # number of samples, once the audio has ended
        self._rest: Iterator[Tensor] | None = None  # of a file, of which no more is read than a block needs

    def push(self, samples: Tensor, rate: int) -> None:
        """Append audio [N] or [channels, N] between -1 and 1, at `rate` samples per second; channels are averaged.

        The result does not depend on the sizes of the pieces. Raises PlanError.
        """
        mono, rate = _checked(samples, rate)
        if self._end is not None or self._rest is not None:
            raise PlanError("the audio of this stream has ended: begin another stream, or do not end it")
        if rate != self._resampler.rate:
            self._samples.push(self._resampler.end())
            self._resampler = Resampler(rate, self._config.rate)
        self._samples.push(self._resampler.push(mono))

    def end(self) -> None:
        """End the audio. The last block is padded with silence."""
        if self._end is None and self._rest is None:
            self._samples.push(self._resampler.end())
            self._end = self._samples.end

    def play(self, samples: Iterator[Tensor]) -> None:
        """Take samples [N] at the model's rate as blocks need them; the audio ends with them."""
        self._rest = samples

    def _read(self, end: int) -> None:
        """Read on, until sample number `end` is there or the audio ends. Raises what the samples raise."""
        while self._rest is not None and self._samples.end < end:
            piece = next(self._rest, None)
            if piece is None:
                self._rest, self._end = None, self._samples.end
            else:
                self._samples.push(piece)

    def interrupt(self, block: int) -> None:
        """Drop the audio that has been pushed for `block` and later ones; the next push is heard from there on."""
        self._samples.drop_from(self._sample(self._images(block)[0]))
        self._resampler = Resampler(self._config.rate, self._config.rate)
        if self._rest is not None or self._end is not None:
            self._rest, self._end = None, self._samples.end

    def be_silent(self) -> None:
        self._is_silent = True

    @property
    def is_kept_alive(self) -> bool:
        return self._keep_alive is not None

    def seconds_from(self, block: int) -> float:
        """Return the seconds of audio that have been pushed for `block` and later ones."""
        return max(0, self._samples.end - self._sample(self._images(block)[0])) / self._config.rate

    def is_over(self, block: int) -> bool:
        return self._end is not None and self._end <= self._sample(self._images(block)[0])

    def is_here(self, block: int) -> bool:
        """Whether all audio that block `block` needs has been pushed, or silence takes its place."""
        return (
            self._end is not None
            or self._is_silent
            or self._rest is not None
            or self._samples.end >= self._last_sample(self._images(block)[1])
            or self.seconds_until_silence(block) == 0
        )

    def seconds_until_silence(self, block: int) -> float | None:
        """Return how long a block waits for its audio, until silence takes its place; None for ever."""
        if self._keep_alive is None:
            return None
        first, end = (image / self._config.fps for image in self._images(block))
        return self._keep_alive.seconds_left(first, end)

    def take(self, block: int) -> tuple[Tensor, Tensor]:
        """Return (inputs of AudioInputs.shape, samples [N]) of a block. Missing samples are silence."""
        first, end = self._images(block)
        first_needed = max(0, first - self._config.before)
        self._read(self._last_sample(end) + 1)  # one more says whether there is a further block
        self._samples.push(torch.zeros(max(0, self._last_sample(end) - self._samples.end)))
        if self._keep_alive is not None:
            self._keep_alive.used(end / self._config.fps)
        needed = self._samples.read(self._sample(first_needed), self._last_sample(end))
        latents = range(block * self._frames, (block + 1) * self._frames)
        inputs = self._config.inputs(needed, range(first_needed, end), latents)
        samples = self._samples.read(self._sample(first), self._sample(end))
        self._samples.drop_before(self._sample(max(0, end - self._config.before)))
        return inputs, samples

    def _images(self, block: int) -> tuple[int, int]:
        """The first image frame of a block, and that of the next block."""
        ends = (first_frame_number(number * self._frames, self._config.per_latent) for number in (block, block + 1))
        return next(ends), next(ends)

    def _sample(self, image: int) -> int:
        return math.floor(image * self._config.rate / self._config.fps)

    def _last_sample(self, image: int) -> int:
        """The end of the samples that image frames before `image` need."""
        return math.ceil(image * self._config.rate / self._config.fps)


def _checked(samples: Tensor, rate: float) -> tuple[Tensor, int]:
    """Return one channel [N] in float32, and the rate as a whole number. Raises PlanError."""
    if samples.ndim not in (1, 2) or (samples.ndim == 2 and samples.shape[0] > 8):
        raise PlanError(
            f"audio of shape {tuple(samples.shape)}: it has to be (samples,) or (at most 8 channels, samples)"
        )
    known = plain(rate)
    if not is_number(known, 1000, 384_000) or known != int(known):
        raise PlanError(f"audio at {rate} samples per second: 1000 to 384000 are understood")
    if not samples.is_floating_point():
        raise PlanError(f"audio in {samples.dtype}: divide it by its largest value, so that it lies between -1 and 1")
    # A copy, since the caller may use its buffer again; in host memory, where the audio of a stream is.
    mono = samples.detach().to("cpu", torch.float32, copy=True)
    mono = mono if samples.ndim == 1 else mono.mean(0)
    if not torch.isfinite(mono).all():
        raise PlanError("the audio has values that are no numbers")
    return mono, int(known)
