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

FRAMES, CROP, CLIPS, CROPS = 3, 48, 2, 3
WHOLE_EVERY, ENCODER_EVERY = 8, 4
MOST_NOISE = 0.3
"""With less of it a decoder turns the small errors of a young transformer into wrong colours."""


def draw_crops(key: str, *, whole: bool) -> Tensor:
    """Crops (CLIPS * CROPS, 3, FRAMES, CROP, CROP) at whole cells of short clips, or whole clips."""
    rng, found = random.Random(f"crop {key}"), []
    for index in range(CLIPS):
        pixels = clip_pixels(f"{key} vae {index}", ClipShape(side=SIDE, blocks=1, frames=FRAMES))
        for _ in range(1 if whole else CROPS):
            side = SIDE if whole else CROP
            top, left = (CELL * rng.randint(0, (SIDE - side) // CELL) for _ in range(2))
            found.append(pixels[:, :, top : top + side, left : left + side])
    return torch.stack(found)


def loss_of(vae: AutoencoderKLWan, target_BCFHW: Tensor, noise_BCFHW: Tensor) -> Tensor:
    """Absolute, squared and edge error of the decoder."""
    with torch.autocast(target_BCFHW.device.type, torch.bfloat16):
        error = decode(vae, clip_latents(target_BCFHW) + noise_BCFHW).float() - target_BCFHW
    edges = error.diff(dim=-1).abs().mean() + error.diff(dim=-2).abs().mean()
    return 0.5 * error.abs().mean() + 0.25 * edges + 4 * error.square().mean()


def encoder_loss_of(vae: AutoencoderKLWan, pictures_BCHW: Tensor) -> Tensor:
    """The error of the encoder's latents; its variance is small."""
    with torch.autocast(pictures_BCHW.device.type, torch.bfloat16):
        mean, log_variance = encode(vae, pictures_BCHW)
    wanted = to_latent(pictures_BCHW)
    return functional.mse_loss(mean.float(), wanted) + 0.01 * (log_variance.float() + 9).square().mean()


def clip_lesson(vae: AutoencoderKLWan, step: int, generator: torch.Generator, seed: int) -> Tensor:
    """The loss of a step: crops, now and then whole frames; every so often the encoder's too."""
    target = draw_crops(f"{seed} {step}", whole=step % WHOLE_EVERY == 0)
    batch, _, frames, height, width = target.shape
    noise = torch.randn(batch, 4, frames, height // CELL, width // CELL, generator=generator)
    noise = noise * MOST_NOISE * torch.rand(batch, 1, 1, 1, 1, generator=generator)
    device = next(vae.parameters()).device
    loss = loss_of(vae, target.to(device), noise.to(device))
    if step % ENCODER_EVERY:
        return loss
    return loss + encoder_loss_of(vae, target[:, :, 0].to(device))


def main() -> None:
    """Train as the command line says, then print the reconstruction of 16 held-out clips."""
    arguments = parse(__doc__)
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    vae = new_face_vae(arguments.resume_from).to(arguments.device)
    train(vae, clip_lesson, arguments)
    print(face_reconstruction(vae.cpu().eval(), 16, side=SIDE), flush=True)


if __name__ == "__main__":
    main()
