"""What the networks that judge images have in common: how they see them, are trained on renders, and are kept."""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from training.stages import Schedule

SIDE_PX = 128
"""Images are looked at with their shorter side at this many pixels."""
SIZES = ((256, 256), (256, 384), (384, 256), (512, 512))
"""Heights and widths, in pixels, at which judges are tested after training."""
N = TypeVar("N", bound=nn.Module)


def fit(network: N, loss_of: Callable[[str], Tensor], *, steps: int, rate: float, seed: int) -> N:
    """Train a network. `loss_of` gets the key of a step, which decides its renders."""
    network.train()
    optimizer = torch.optim.AdamW(network.parameters(), lr=rate, weight_decay=0.01, fused=True)
    schedule = Schedule(steps=steps, peak=rate, decay_from=0.3)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate(step)
        loss = loss_of(f"{seed} {step}")
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step % 200 == 0:
            print(f"step {step}/{steps} loss {loss.item():.4f}", flush=True)
    return network.eval()


def render_size(rng: random.Random) -> tuple[int, int]:
    """Height and width of the renders of a step, in pixels."""
    return rng.choice(((SIDE_PX, SIDE_PX), (SIDE_PX, SIDE_PX), (192, SIDE_PX), (SIDE_PX, 192)))


def worn(images: Tensor, rng: random.Random) -> Tensor:
    """The images a little blurred and noisy, as those of a model are."""
    if rng.random() < 0.3:
        images = functional.interpolate(functional.avg_pool2d(images, 2), scale_factor=2, mode="bilinear")
    return images + rng.choice((0.0, 0.03, 0.08)) * torch.randn_like(images)


def looked_at(images: Tensor) -> Tensor:
    """The images (B, 3, H, W) with the shorter side that judges are trained at."""
    scale = SIDE_PX / min(images.shape[-2:])
    if scale == 1:
        return images
    return functional.interpolate(images, scale_factor=scale, mode="bilinear", antialias=True)


def load_into(network: N, path: Path) -> N:
    """The network with the weights of a file."""
    network.load_state_dict({name: value.float() for name, value in load_file(path).items()})
    return network.eval()


def main_of(about: str | None, train: Callable[[int], nn.Module], score: Callable, *, steps: int, output: Path) -> None:
    """Train as the command line says, print the scores on held-out renders, save."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--output", type=Path, default=output)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    network = train(arguments.steps)
    for height, width in SIZES:
        print(f"{height}x{width}", score(network, 200, height=height, width=width), flush=True)
    save_file({name: value.half().contiguous() for name, value in network.state_dict().items()}, arguments.output)
