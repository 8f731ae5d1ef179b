"""The input audio of a stream: pushed in pieces of any length, read block by block."""

import math

import torch
from torch import Tensor
from torch.nn import functional

from patchpar.errors import PlanError
from patchpar.stream.audio.conditioner import AudioConfig, audio_levels, last_image_frame, latent_tokens
from patchpar.stream.audio.resample import Resampler


def first_frame_number(latent: int, per_latent: int) -> int:
    """Return the first image frame that latent frame `latent` decodes to. Latent frame 0 decodes to one image."""
    return 0 if latent == 0 else last_image_frame(latent - 1, per_latent) + 1


class AudioTrack:
    """Mono audio for blocks of `frames` latent frames. Samples that no later block needs are dropped."""

    def __init__(self, config: AudioConfig, frames: int) -> None:
        self._config, self._frames = config, frames
        self._samples = torch.zeros(0)
        self._start = 0  # index of the first buffered sample
        self._resampler = Resampler(config.rate, config.rate)
        self._has_ended = self._is_silent = False

    def push(self, samples: Tensor, rate: int) -> None:
        """Append audio [N] or [channels, N] between -1 and 1, at `rate` samples per second; channels are averaged.

        The result does not depend on the sizes of the pieces. Raises PlanError.
        """
        mono = _checked(samples, rate)
        if self._has_ended:
            raise PlanError("the audio of this stream has ended: begin another stream, or do not end it")
        if rate != self._resampler.rate:
            self._add(self._resampler.end())
            self._resampler = Resampler(rate, self._config.rate)
        self._add(self._resampler.push(mono))

    def end(self) -> None:
        """End the audio. The last block is padded with silence."""
        if not self._has_ended:
            self._add(self._resampler.end())
        self._has_ended = True

    def be_silent(self) -> None:
        """Use silence without end."""
        self._is_silent = True

    def is_over(self, block: int) -> bool:
        """Whether the audio ends before this block begins."""
        return self._has_ended and self._start + len(self._samples) <= self._sample(self._images(block)[0])

    def is_here(self, block: int) -> bool:
        """Whether all audio that block `block` needs has been pushed."""
        return (
            self._has_ended
            or self._is_silent
            or self._start + len(self._samples) >= self._last_sample(self._images(block)[1])
        )

    def take(self, block: int) -> tuple[Tensor, Tensor]:
        """Return (audio tokens [1, F, n, C], samples [N]) of a block. Missing samples are silence."""
        first, end = self._images(block)
        first_needed = max(0, first - self._config.tokens + 1)
        missing = self._last_sample(end) - self._start - len(self._samples)
        self._samples = functional.pad(self._samples, (0, max(0, missing)))
        levels = audio_levels(self._between(self._sample(first_needed), self._last_sample(end)), self._config)
        latents = range(block * self._frames, (block + 1) * self._frames)
        tokens = latent_tokens(levels[: end - first_needed], latents, self._config, first=first_needed)
        samples = self._between(self._sample(first), self._sample(end)).clone()
        self._drop(self._sample(max(0, end - self._config.tokens + 1)))
        return tokens[None], samples

    def _images(self, block: int) -> tuple[int, int]:
        """The first image frame of a block, and that of the next block."""
        ends = (first_frame_number(number * self._frames, self._config.per_latent) for number in (block, block + 1))
        return next(ends), next(ends)

    def _sample(self, image: int) -> int:
        """The first sample of an image frame."""
        return math.floor(image * self._config.rate / self._config.fps)

    def _last_sample(self, image: int) -> int:
        """The end of the samples that image frames before `image` need."""
        return math.ceil(image * self._config.rate / self._config.fps)

    def _add(self, samples: Tensor) -> None:
        self._samples = torch.cat([self._samples, samples])

    def _between(self, start: int, end: int) -> Tensor:
        return self._samples[start - self._start : end - self._start]

    def _drop(self, start: int) -> None:
        self._samples, self._start = self._samples[start - self._start :], start


def _checked(samples: Tensor, rate: int) -> Tensor:
    """Return one channel [N] in float32. Raises PlanError."""
    if samples.ndim not in (1, 2) or (samples.ndim == 2 and samples.shape[0] > 8):
        raise PlanError(
            f"audio of shape {tuple(samples.shape)}: it has to be (samples,) or (at most 8 channels, samples)"
        )
    if not 1000 <= rate <= 384_000:
        raise PlanError(f"audio at {rate} samples per second: 1000 to 384000 are understood")
    if not samples.is_floating_point():
        raise PlanError(f"audio in {samples.dtype}: divide it by its largest value, so that it lies between -1 and 1")
    mono = samples.float() if samples.ndim == 1 else samples.float().mean(0)
    if not torch.isfinite(mono).all():
        raise PlanError("the audio has values that are no numbers")
    return mono
