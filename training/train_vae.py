"""Train the autoencoder: the decoder as an upsampler of anchored latents, the encoder to find them.

    python -m training.train_vae --state runs/vae.pt --steps 6000

Latents get a little noise, so that the decoder forgives what the UNet leaves imperfect.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from pathlib import Path

import torch
from diffusers import AutoencoderKL
from torch import Tensor, nn
from torch.nn import functional

from training.checkpoint import write_atomically
from training.latents import CELL, to_latent, to_tensor
from training.render import sample_render
from training.stages import Schedule
from training.stop import StopSignal
from training.vae import new_vae, reconstruction

LATENT_NOISE = 0.05
WHOLE_EVERY, ENCODER_EVERY = 16, 4
SAVE_EVERY_SECONDS = 120


def sample_batch_images(key: str, *, crop: int, images: int = 2, crops: int = 4) -> Tensor:
    """Crops (images * crops, 3, crop, crop) in -1..1 at whole cells, or whole images where crop is 256."""
    rng, found = random.Random(f"crop {key}"), []
    for index in range(images):
        whole = to_tensor(sample_render(f"vae {key} {index}", height=256, width=256).pixels)
        for _ in range(crops if crop < 256 else 1):
            top, left = (CELL * rng.randint(0, (256 - crop) // CELL) for _ in range(2))
            found.append(whole[:, :, top : top + crop, left : left + crop])
    return torch.cat(found)


def loss_of(vae: AutoencoderKL, target: Tensor, generator: torch.Generator, *, with_encoder: bool) -> Tensor:
    """Absolute, squared and edge error of the decoder; every so often also the error of the encoder's latents."""
    target = target.contiguous(memory_format=torch.channels_last)
    latent = to_latent(target)
    noise = torch.randn(latent.shape, generator=generator).to(latent) * LATENT_NOISE
    with torch.autocast(target.device.type, torch.bfloat16):
        error = vae.decode((latent + noise).contiguous(memory_format=torch.channels_last)).sample.float() - target
        guess = vae.encode(target).latent_dist if with_encoder else None
    edges = error.diff(dim=-1).abs().mean() + error.diff(dim=-2).abs().mean()
    loss = 0.5 * error.abs().mean() + 0.25 * edges + 4 * error.square().mean()
    if guess is None:
        return loss
    return loss + functional.mse_loss(guess.mean.float(), latent) + 0.01 * (guess.logvar.float() + 9).square().mean()


def image_lesson(vae: AutoencoderKL, step: int, generator: torch.Generator, seed: int) -> Tensor:
    """The loss of a step: crops of images, now and then whole ones."""
    crop = 256 if step % WHOLE_EVERY == 0 else 64
    target = sample_batch_images(f"{seed} {step}", crop=crop).to(next(vae.parameters()).device)
    return loss_of(vae, target, generator, with_encoder=step % ENCODER_EVERY == ENCODER_EVERY - 1)


Lesson = Callable[[nn.Module, int, torch.Generator, int], Tensor]
"""The loss of an autoencoder at a step, from a generator and the seed of the whole training."""


def train(vae: nn.Module, lesson: Lesson, arguments: argparse.Namespace) -> None:
    """The steps that are left, saving every two minutes and on a stop signal."""
    optimizer = torch.optim.AdamW(vae.parameters(), lr=0.0, betas=(0.9, 0.99), weight_decay=0.0, fused=True)
    start, stop = resume(vae, optimizer, arguments), StopSignal().listen()
    schedule = Schedule(steps=arguments.steps, peak=arguments.rate, decay_from=0.3)
    saved, smooth = time.monotonic(), 0.0
    for step in range(start, arguments.steps):
        generator = torch.Generator().manual_seed(arguments.seed * 1_000_003 + step)
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate(step)
        loss = lesson(vae, step, generator, arguments.seed)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(vae.parameters(), 0.5)
        optimizer.step()
        smooth += (loss.item() - smooth) * (0.02 if step > start else 1)
        if step % 100 == 0:
            print(f"step {step}/{arguments.steps} loss {smooth:.4f} cpu {time.process_time():.0f}s", flush=True)
        if stop.raised or time.monotonic() - saved > SAVE_EVERY_SECONDS or step + 1 == arguments.steps:
            save(vae, optimizer, step + 1, arguments.state)
            saved = time.monotonic()
        if stop.raised:
            break


def resume(vae: nn.Module, optimizer: torch.optim.Optimizer, arguments: argparse.Namespace) -> int:
    """Go on from the state file if there is one; returns the step that comes next."""
    if not arguments.state.exists():
        return 0
    state = torch.load(arguments.state, map_location=arguments.device, weights_only=True)
    vae.load_state_dict(state["vae"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"]


def save(vae: nn.Module, optimizer: torch.optim.Optimizer, step: int, path: Path) -> None:
    """Write the state file whole."""
    write_atomically({"vae": vae.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, path)


def parse(description: str | None = __doc__) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", type=Path, required=True, help="state file; gone on from where it exists")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--rate", type=float, default=1.5e-3, help="highest learning rate")
    parser.add_argument("--resume-from", type=Path, help="saved autoencoder to start from where there is no state file")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Train as the command line says, then print the reconstruction of 16 held-out renders."""
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    vae = new_vae(arguments.resume_from).to(arguments.device).to(memory_format=torch.channels_last)
    train(vae, image_lesson, arguments)
    print(reconstruction(vae.cpu().eval(), 16), flush=True)


if __name__ == "__main__":
    main()
