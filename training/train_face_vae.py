"""Train the avatar's autoencoder: the decoder as an upsampler of anchored latents over time, the encoder to find them.

    python -m training.train_face_vae --state runs/face_vae.pt --steps 6000

Latents get noise, from none to much, so that the decoder forgives what the transformer leaves imperfect.
"""

from __future__ import annotations

import random

import torch
from diffusers import AutoencoderKLWan
from torch import Tensor
from torch.nn import functional

from training.face import SIDE
from training.face_data import ClipShape
from training.face_vae import clip_latents, clip_pixels, decode, encode, face_reconstruction, new_face_vae
from training.latents import CELL, to_latent
from training.train_vae import parse, train

CLIPS, CROPS = 2, 3
FRAMES, CROP = 3, 48
LONG_FRAMES, LONG_CROP = 24, 24
"""Every other step has long clips, for the decoder sees some twenty frames back: one that was trained on three alone
grew brighter with every frame of a stream."""
WHOLE_EVERY, ENCODER_EVERY = 8, 4
MOST_NOISE = 0.2
"""A young transformer's latents are off by as much."""


def sample_crops(key: str, side: int, frames: int) -> Tensor:
    """Crops (B, 3, frames, side, side) at whole cells of clips: CROPS of each clip, or all of it."""
    rng, found = random.Random(f"crop {key}"), []
    for index in range(CLIPS):
        pixels = clip_pixels(f"{key} vae {index}", ClipShape(side=SIDE, blocks=1, frames=frames))
        for _ in range(CROPS if side < SIDE else 1):
            top, left = (CELL * rng.randint(0, (SIDE - side) // CELL) for _ in range(2))
            found.append(pixels[:, :, top : top + side, left : left + side])
    return torch.stack(found)


def loss_of(vae: AutoencoderKLWan, target_BCFHW: Tensor, noise_BCFHW: Tensor) -> Tensor:
    """Absolute, squared and edge error of the decoder."""
    with torch.autocast(target_BCFHW.device.type, torch.bfloat16):
        error = decode(vae, clip_latents(target_BCFHW) + noise_BCFHW).float() - target_BCFHW
    edges = error.diff(dim=-1).abs().mean() + error.diff(dim=-2).abs().mean()
    return 0.5 * error.abs().mean() + 0.25 * edges + 4 * error.square().mean()


def encoder_loss_of(vae: AutoencoderKLWan, images_BCHW: Tensor) -> Tensor:
    """The error of the encoder's latents; its variance is small."""
    with torch.autocast(images_BCHW.device.type, torch.bfloat16):
        mean, log_variance = encode(vae, images_BCHW)
    wanted = to_latent(images_BCHW)
    return functional.mse_loss(mean.float(), wanted) + 0.01 * (log_variance.float() + 9).square().mean()


def clip_lesson(vae: AutoencoderKLWan, step: int, generator: torch.Generator, seed: int) -> Tensor:
    """The loss of a step: small crops of long clips in turn with large ones of short clips, and the encoder's."""
    side, frames = (LONG_CROP, LONG_FRAMES) if step % 2 else (SIDE if step % WHOLE_EVERY == 0 else CROP, FRAMES)
    target = sample_crops(f"{seed} {step}", side, frames)
    batch, _, frames, height, width = target.shape
    noise = torch.randn(batch, 4, frames, height // CELL, width // CELL, generator=generator)
    noise = noise * MOST_NOISE * torch.rand(batch, 1, 1, 1, 1, generator=generator)
    device = next(vae.parameters()).device
    loss = loss_of(vae, target.to(device), noise.to(device))
    if step % ENCODER_EVERY:
        return loss
    return loss + encoder_loss_of(vae, target[:, :, 0].to(device))


def main() -> None:
    """Train as the command line says, then print the reconstruction of 6 held-out clips."""
    arguments = parse(__doc__)
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    vae = new_face_vae(arguments.resume_from).to(arguments.device)
    train(vae, clip_lesson, arguments)
    print(face_reconstruction(vae.cpu().eval(), 6, side=SIDE), flush=True)


if __name__ == "__main__":
    main()
