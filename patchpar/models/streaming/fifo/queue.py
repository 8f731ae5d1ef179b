"""FIFO-Diffusion (Kim et al., arXiv:2405.11473): a queue of latent frames at rising noise levels.

    time                 --->
    finished | zone 3 | zone 2 | zone 1 | zone 0 | <- noise          a zone: half as many frames as the model sees
      clean    ........ noisier ........... noise                    a window: two zones, of which the later is denoised
    window of zone 1:   [ zone 2 | zone 1 ]

In each tick every frame moves down one noise level, the first one leaves the queue clean, and noise enters at the end.
A window contains cleaner frames before those that it denoises (lookahead denoising, section 4.3), and frames whose
levels differ little (latent partitioning, section 4.2). All windows of a tick read the frames of the tick before. So
each rank can hold some zones, and only neighbours exchange frames: one frame to the cleaner rank, half a window to the
noisier one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from patchpar.errors import PlanError
from patchpar.models.streaming.config import LEAST_FPS, MOST_FPS
from patchpar.models.streaming.flow_schedule import FlowSchedule, keyed_noise
from patchpar.plan.json_fields import number, whole
from patchpar.plan.scalars import is_number, is_whole, make_plain

Velocity = Callable[[Tensor, Sequence[float]], Tensor]
"""The model's prediction for frames [1, C, F, H, W] at F noise levels, 0 to 1: noise minus clean frame."""
FIRST_NOISE, AGAIN_NOISE, BEFORE_NOISE = range(3)
"""Keys of a frame's noise samples: on entry; in the first queue; for the frames before the first in that queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FifoOptions:
    """Length and start of the queue. Raises PlanError.

    `window`: latent frames per forward pass, an even number not above that of the model's training. `partitions`:
    windows in the queue, so that there are `window * partitions` noise levels. `first_steps`: denoising steps of the
    first video, of `window` frames, from which the queue is built. `shift`: see FlowSchedule.shifted.
    """

    window: int = 20
    partitions: int = 4
    first_steps: int = 50
    shift: float = 3.0

    def __post_init__(self) -> None:
        make_plain(self)
        if not is_whole(self.window, 4) or self.window % 2:
            raise PlanError(f"window={self.window!r}: it must be an even number of latent frames, at least 4")
        if not is_whole(self.partitions) or not is_whole(self.first_steps):
            raise PlanError(f"partitions={self.partitions!r}, first_steps={self.first_steps!r}: at least 1 of each")
        if not is_number(self.shift, 0) or not self.shift:
            raise PlanError(f"shift={self.shift!r}: it must be above 0; 1 leaves the levels even")

    @property
    def half(self) -> int:
        """Frames of a zone."""
        return self.window // 2

    @property
    def zones(self) -> int:
        """Zones of the queue. Each takes one forward pass per tick."""
        return 2 * self.partitions

    @property
    def levels(self) -> int:
        """Noise levels, which is also the number of frames in the queue and of ticks per frame."""
        return self.window * self.partitions

    @property
    def sigmas(self) -> tuple[float, ...]:
        """Noise levels from 1 to 0. In a tick frame p, counted from the noisy end, goes from level p to level p + 1."""
        return FlowSchedule.shifted(self.levels, shift=self.shift).sigmas

    def sigma(self, index: int) -> float:
        """Return the noise level of frame `index` before a tick; 0 for finished frames."""
        return self.sigmas[min(index, self.levels)]


class FrameQueue:
    """Frames [1, C, 1, H, W] of `zones`, and the half window `before` them. A tick is a `shift` and an `advance`."""

    def __init__(self, options: FifoOptions, zones: range, frames: Sequence[Tensor], before: Sequence[Tensor]) -> None:
        half = options.half
        assert (len(frames), len(before)) == (half * len(zones), half), "each zone is half a window, and so is `before`"
        self._options, self._zones = options, zones
        self._frames, self._before = list(frames), list(before)

    @property
    def first(self) -> Tensor:
        """The frame [1, C, 1, H, W] that leaves in the next shift."""
        return self._frames[0]

    def last(self) -> Tensor:
        """Return the last half - 1 frames, which the noisier neighbour needs as context, [1, C, half - 1, H, W]."""
        return torch.cat(self._frames[1 - self._options.half :], 2)

    def shift(self, entering: Tensor, before: Tensor | None) -> None:
        """Append `entering`, [1, C, 1, H, W], at the noisy end and remove the first frame.

        `before`: `last` of the cleaner neighbour, [1, C, half - 1, H, W], or None if there is no such neighbour.
        """
        known = self._before[1:] if before is None else list(torch.split(before, 1, 2))
        self._before = [*known, self._frames.pop(0)]
        self._frames.append(entering)

    def advance(self, velocity: Velocity) -> None:
        """Denoise every frame by one noise level."""
        options, half = self._options, self._options.half
        seen = [*self._before, *self._frames]
        made: list[Tensor] = []
        for zone in range(len(self._zones)):
            window = torch.cat(seen[zone * half : zone * half + options.window], 2)
            end = (self._zones.stop - zone + 1) * half  # indices are counted from the noisy end
            indices = range(end - 1, end - 1 - options.window, -1)
            sigmas = [options.sigma(index) for index in indices]
            found = torch.split(velocity(window, sigmas)[:, :, half:], 1, 2)
            for index, x, v in zip(indices[half:], torch.split(window[:, :, half:], 1, 2), found, strict=True):
                made.append(x + (options.sigma(index + 1) - options.sigma(index)) * v)
        self._frames = made


def generate_first_video(
    options: FifoOptions, noise_BCFHW: Tensor, velocity: Velocity, wanted: Callable[[], bool]
) -> Tensor:
    """Denoise one video of a window's length with one noise level for all frames. Stops early if not `wanted`."""
    schedule = FlowSchedule.shifted(options.first_steps, shift=options.shift)
    x_BCFHW = noise_BCFHW
    for step in range(schedule.steps):
        if not wanted():
            break
        sigmas = [schedule.sigmas[step]] * options.window
        x_BCFHW = schedule.advance(step, x_BCFHW, velocity(x_BCFHW, sigmas), None)
    return x_BCFHW


def first_queue(options: FifoOptions, zones: range, video_BCFHW: Tensor, seed: int, first: int) -> FrameQueue:
    """Return a full queue of the video, its first frame (number `first`) repeated before it, with noise added."""
    frames = torch.split(video_BCFHW, 1, 2)
    extra = options.levels - options.window

    def at(time: int) -> Tensor:
        """Frame `time` of the queue, counted from the clean end; negative for finished frames."""
        clean = frames[max(0, time - extra)]
        if time < 0:
            return clean
        key = (first, BEFORE_NOISE + time) if time < extra else (first + time - extra, AGAIN_NOISE)
        sigma = options.sigma(options.levels - time)
        noise = keyed_noise(seed, *key, tuple(clean.shape), clean.device).to(clean.dtype)
        return (1 - sigma) * clean + sigma * noise

    start, stop = (options.levels - zone * options.half for zone in (zones.stop, zones.start))
    before = [at(time) for time in range(start - options.half, start)]
    return FrameQueue(options, zones, [at(time) for time in range(start, stop)], before)


@dataclass(frozen=True, slots=True, kw_only=True)
class FifoConfig:
    """How a model of short videos is streamed. Defaults are those of Wan 2.1 at 480p. Raises PlanError.

    `fps`: frames per second. `height`, `width`: pixels. `queue`: windows and noise levels. `text_tokens`: maximum
    tokens of a prompt.
    """

    fps: float = 16.0
    height: int = 480
    width: int = 832
    queue: FifoOptions = field(default_factory=FifoOptions)
    text_tokens: int = 512

    def __post_init__(self) -> None:
        make_plain(self)
        number("fps", self.fps, LEAST_FPS, MOST_FPS)
        for name in ("height", "width", "text_tokens"):
            whole(name, getattr(self, name), 1, 2**16)
