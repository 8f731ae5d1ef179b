"""Training clips of talking faces: what is drawn, what is heard and what is asked for, all from one key.

A clip is a reference image and some frames that follow audio: mouth opening follows the loudness of a frame, mouth
width the brightness of its audio, and brows and cheeks the prompt. Head and lids move by themselves.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from patchpar.models.streaming.causal.audio_conditioner import AudioConfig, audio_levels, latent_tokens
from patchpar.models.streaming.flow_schedule import FlowSchedule
from training.faces import (
    EYE_X,
    EYES_Y,
    HEAD_Y,
    MIDDLE,
    MOODS,
    MOUTH_Y,
    UNITS,
    Identity,
    Pose,
    render_face,
    sample_identity,
)
from training.latents import CELL, to_latent
from training.speech import RATE, speech

FPS = 16
WIDTH = 256
"""Of the transformer."""
AUDIO = AudioConfig(dim=WIDTH, heads=8, after=(0, 2), fps=FPS, rate=RATE, bands=8, tokens=2)
SWITCH_FRACTION, STRANGE_SINK_FRACTION = 0.15, 0.2
"""Of clips whose prompt changes on the way, and of those whose sink frame was read under another prompt."""
SINK_NOISE = 0.05
"""Added to references, so that one whose latents an encoder found, or the model itself made, will do as well."""
QUIET_LEVEL, LOUD_LEVEL = 0.0, 0.78
"""Loudness (1 is full scale, 0 is -50 dB) at which the mouth begins to open, and at which it is wide open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """Frames (F, H, W, 3) uint8 with their audio as tokens (F, n, C), and a reference image (H, W, 3).

    `openings`: of the mouth, 0 to 1, one per frame. `moods`: what is asked for, one per frame. `sink_mood`: under which
    prompt the reference is read.
    """

    identity: Identity
    reference: np.ndarray
    frames: np.ndarray
    openings: Tensor
    audio: Tensor
    moods: tuple[str, ...]
    sink_mood: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Clean latents (B, 4, F, H, W), reference latents (B, 4, 1, H, W), audio tokens (B, F, n, C).

    `moods` (B, N) and `sink_mood` (B): indices of prompts, per block. `mask` (B, 1, 1, H, W): 1 at mouth and eyes.
    `noise` as the latents, `level` (B, N): noise levels from 0 (image) to 1 (noise), one per block.
    """

    latent: Tensor
    reference: Tensor
    audio: Tensor
    moods: Tensor
    sink_mood: Tensor
    mask: Tensor
    noise: Tensor
    level: Tensor

    def to(self, device: torch.device) -> Batch:
        """The batch on that device."""
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in self.__slots__}
        return Batch(**moved)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipShape:
    """`side` in pixels, `blocks` of `frames` frames."""

    side: int
    blocks: int
    frames: int


def prompt_of(mood: str) -> str:
    """The prompt that asks for a mood."""
    return f"a person with {'an' if mood == 'angry' else 'a'} {mood} face is talking"


PROMPTS = (*(prompt_of(mood) for mood in MOODS), "")
"""By index in `Batch.moods`; an empty one asks for calm."""


def openings(levels_PC: Tensor) -> Tensor:
    """How far the mouth is open, 0 to 1, in image frames of these audio levels."""
    return ((levels_PC[:, 0] - QUIET_LEVEL) / (LOUD_LEVEL - QUIET_LEVEL)).clamp(0, 1)


def spreads(levels_PC: Tensor) -> Tensor:
    """How wide the mouth is, 0 to 1: by how much audio above 1500 Hz is weaker than below, from 30 dB to none."""
    high, low = levels_PC[:, 6:].amax(1), levels_PC[:, 1:6].amax(1)
    return (1 + (high - low) * (50 / 30)).clamp(0, 1)


def sample_clip(key: str, shape: ClipShape) -> Clip:
    """The clip of a key. One in five begins with its audio; the others have been going on."""
    rng = random.Random(f"face {key}")
    identity = sample_identity(rng)
    count = shape.blocks * shape.frames
    before = 0 if rng.random() < 0.2 else AUDIO.tokens - 1
    levels = audio_levels(torch.from_numpy(_audio(rng, (before + count) * RATE // FPS)), AUDIO)
    heard = levels[before:]
    moods = _moods(rng, shape)
    motion = zip(openings(heard).tolist(), spreads(heard).tolist(), poses(rng, count), moods, strict=True)
    displayed = [replace(pose, opening=opening, spread=spread, mood=mood) for opening, spread, pose, mood in motion]
    displayed = [replace(pose, dy=pose.dy - 1.2 * pose.opening) for pose in displayed]
    return Clip(
        identity=identity,
        reference=render_face(identity, _reference_pose(rng), side=shape.side),
        frames=np.stack([render_face(identity, pose, side=shape.side) for pose in displayed]),
        openings=openings(heard),
        audio=latent_tokens(levels, range(before, before + count), AUDIO),
        moods=moods,
        sink_mood=rng.choice(MOODS) if rng.random() < STRANGE_SINK_FRACTION else moods[0],
    )


def poses(rng: random.Random, count: int) -> list[Pose]:
    """What moves by itself: the head swings slowly, the lids close now and then for three frames."""
    phases = [rng.uniform(0, 2 * math.pi) for _ in range(2)]
    lids = [0.0] * (count + 2)
    for frame in range(count):
        if rng.random() < 0.03:
            lids[frame : frame + 3] = [0.6, 1.0, 0.5]
    return [
        Pose(
            lids=lids[frame],
            dx=2.2 * math.sin(0.11 * frame + phases[0]),
            dy=1.1 * math.sin(0.17 * frame + phases[1]),
        )
        for frame in range(count)
    ]


def sample_batch(key: str, shape: ClipShape, size: int, executor: Executor | None = None) -> Batch:
    """The batch of a key: clips, noise and noise levels. The executor's processes draw where one is given."""
    spread: Callable = map if executor is None else executor.map
    clips = list(spread(sample_clip, [f"{key} {index}" for index in range(size)], [shape] * size))
    generator = torch.Generator().manual_seed(random.Random(f"noise {key}").getrandbits(62))
    latent = torch.stack([latents_of(clip.frames) for clip in clips])
    reference = torch.stack([latents_of(clip.reference[None]) for clip in clips])
    return Batch(
        latent=latent,
        reference=reference + SINK_NOISE * torch.randn(reference.shape, generator=generator),
        audio=torch.stack([clip.audio for clip in clips]),
        moods=torch.tensor([[_prompt(mood, generator) for mood in clip.moods[:: shape.frames]] for clip in clips]),
        sink_mood=torch.tensor([MOODS.index(clip.sink_mood) for clip in clips]),
        mask=speaking_mask(shape.side).expand(size, 1, 1, -1, -1),
        noise=torch.randn(latent.shape, generator=generator),
        level=sample_levels(size, shape.blocks, generator),
    )


SCHEDULE = FlowSchedule.shifted(4)
"""The four denoising steps of a stream: noise levels 1, 0.9, 0.75 and 0.5."""


def sample_levels(size: int, blocks: int, generator: torch.Generator) -> Tensor:
    """Noise levels (B, N). Half of the clips have that of one of the four steps in all blocks, as in a stream.

    A quarter have any level in all blocks, a quarter have a level of its own in each (diffusion forcing, Chen and
    others, arXiv:2407.01392), so that any history is in distribution.
    """
    order = torch.randperm(size, generator=generator)
    quantile = ((order + torch.rand(size, generator=generator)) / size)[:, None].expand(-1, blocks)
    independent = torch.rand(size, blocks, generator=generator)
    kind = torch.rand(size, 1, generator=generator)
    staged = torch.tensor(SCHEDULE.sigmas)[(quantile * SCHEDULE.steps).long().clamp(max=SCHEDULE.steps - 1)]
    free = torch.where(kind < 0.75, quantile, independent)
    return torch.where(kind < 0.5, staged, 3 * free / (1 + 2 * free))


def latents_of(pixels_FHWC: np.ndarray) -> Tensor:
    """Anchored latents (4, F, H/4, W/4) of frames."""
    images = torch.from_numpy(np.array(pixels_FHWC)).permute(0, 3, 1, 2).float() / 127.5 - 1
    return to_latent(images).transpose(0, 1)


def speaking_mask(side: int) -> Tensor:
    """(1, 1, H/4, W/4): 1 where mouth and eyes can be, 0 elsewhere."""
    cells, scale = side // CELL, side / (CELL * UNITS)
    mask = torch.zeros(1, 1, cells, cells)
    for middle, across, down in ((MOUTH_Y, 16, 12), (EYES_Y - 3, EYE_X + 10, 10)):
        rows, columns = (
            slice(math.floor((at - reach) * scale), math.ceil((at + reach) * scale))
            for at, reach in ((HEAD_Y + middle, down), (MIDDLE, across))
        )
        mask[..., rows, columns] = 1
    return mask


def _prompt(mood: str, generator: torch.Generator) -> int:
    if mood == "calm" and torch.rand((), generator=generator) < 0.4:
        return PROMPTS.index("")
    return MOODS.index(mood)


def _moods(rng: random.Random, shape: ClipShape) -> tuple[str, ...]:
    first = rng.choice(MOODS)
    switches = rng.random() < SWITCH_FRACTION
    at, then = (rng.randrange(shape.blocks) if switches else shape.blocks), rng.choice(MOODS)
    return tuple(mood for block in range(shape.blocks) for mood in [first if block < at else then] * shape.frames)


def _audio(rng: random.Random, samples: int) -> np.ndarray:
    """Speech, or one time in ten none at all."""
    key = str(rng.getrandbits(62))
    return np.zeros(samples, np.float32) if rng.random() < 0.1 else speech(key, samples)


def _reference_pose(rng: random.Random) -> Pose:
    """At rest half of the time, else caught in the middle of a word."""
    if rng.random() < 0.5:
        return Pose()
    return Pose(
        opening=rng.random() ** 2,
        spread=rng.random(),
        dx=rng.uniform(-2, 2),
        dy=rng.uniform(-2, 1),
        mood=rng.choice(MOODS),
    )
