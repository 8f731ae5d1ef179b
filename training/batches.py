"""Training batches, each a function of the seed and the step alone: stopping and going on changes nothing."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from transformers import CLIPTokenizer

from training.latents import CELL, object_mask, to_latent, to_tensor
from training.render import sample_render, scene_of
from training.scenes import Scene, caption, flipped, look_indices
from training.stages import Bucket
from training.tokenizer import token_ids

CAPTION_DROPOUT = 0.1
"""Share of empty captions, so that guidance has an unconditional prediction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Clean latents (B, 4, H, W), object masks (B, 1, H, W), token ids (B, T), timesteps (B), noise as the latents.

    looks (B, 2) are the indices of what the caption puts left and right, -1 where the caption was dropped.
    """

    latent: Tensor
    mask: Tensor
    ids: Tensor
    looks: Tensor
    timestep: Tensor
    noise: Tensor

    def to(self, device: torch.device) -> Batch:
        """The batch on that device."""
        names = ("latent", "mask", "ids", "looks", "timestep", "noise")
        return Batch(**{name: getattr(self, name).to(device, non_blocking=True) for name in names})


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One training image: latent (4, H, W), object mask (1, H, W), what it shows, in words too."""

    latent: Tensor
    mask: Tensor
    scene: Scene
    caption: str


def sample_example(key: str, height: int, width: int, night_fraction: float | None = None) -> Sample:
    """The training image of a key, height and width in latent cells; half of them mirrored, caption and all.

    night_fraction is the probability of a night scene; without it, as often as any time of day.
    """
    displayed = sample_render(key_at_time(key, night_fraction), height=height * CELL, width=width * CELL)
    latent, mask = to_latent(to_tensor(displayed.pixels))[0], object_mask(displayed)
    rng = random.Random(f"mirror {key}")
    if rng.random() < 0.5:
        scene = flipped(displayed.scene)
        words = caption(scene, right_first=rng.random() < 0.5)
        return Sample(latent=latent.flip(-1), mask=mask.flip(-1), scene=scene, caption=words)
    return Sample(latent=latent, mask=mask, scene=displayed.scene, caption=displayed.caption)


def key_at_time(key: str, night_fraction: float | None) -> str:
    """The first key derived from this one whose scene is at night with that probability, by day otherwise."""
    if night_fraction is None:
        return key
    night = random.Random(f"night {key}").random() < night_fraction
    derived = (f"{key} {index}" for index in itertools.count())
    return next(one for one in derived if (scene_of(one).time == "at night") == night)


def sample_batch(
    key: str,
    bucket: Bucket,
    tokenizer: CLIPTokenizer,
    executor: Executor | None = None,
    night_fraction: float | None = None,
) -> Batch:
    """The batch of a key. Images are drawn in the executor's processes where one is given."""
    keys = [f"{key} {index}" for index in range(bucket.batch)]
    spread: Callable = map if executor is None else executor.map
    example = partial(sample_example, height=bucket.height, width=bucket.width, night_fraction=night_fraction)
    samples = list(spread(example, keys))
    generator = torch.Generator().manual_seed(random.Random(f"noise {key}").getrandbits(62))
    dropped = torch.rand(bucket.batch, generator=generator) < CAPTION_DROPOUT
    words = ["" if drop else sample.caption for drop, sample in zip(dropped, samples, strict=True)]
    latent = torch.stack([sample.latent for sample in samples])
    return Batch(
        latent=latent,
        mask=torch.stack([sample.mask for sample in samples]),
        ids=token_ids(tokenizer, words),
        looks=torch.tensor([look_indices(sample.scene) for sample in samples]).masked_fill(dropped[:, None], -1),
        timestep=sample_timesteps(bucket.batch, bucket.noise_shift, generator),
        noise=torch.randn(latent.shape, generator=generator),
    )


def sample_timesteps(count: int, shift: float, generator: torch.Generator) -> Tensor:
    """Stratified timesteps 0..999: a quarter uniform, the rest logit-normal around the shift.

    What is where gets decided at the higher noise levels; v-prediction with uniform timesteps would spend a third of
    the work on the lowest ones, where the image is all but finished.
    """
    order = torch.randperm(count, generator=generator)
    quantile = ((order + torch.rand(count, generator=generator)) / count).clamp(1e-4, 1 - 1e-4)
    uniform = torch.rand(count, generator=generator) < 0.25
    shifted = torch.sigmoid(shift + 1.3 * torch.special.ndtri(quantile))
    return (torch.where(uniform, quantile, shifted) * 1000).long().clamp(0, 999)
