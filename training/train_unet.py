"""Train the UNet and the text encoders on scenes drawn by code: v-prediction, EMA, caption dropout.

    python -m training.train_unet --state runs/unet.pt --stage small --steps 4000
    python -m training.train_unet --state runs/unet.pt --stage medium --steps 2000      # goes on from the same file

The state file is written every two minutes and on SIGTERM or ctrl-C; the same command goes on where it stopped.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from training.attention import use_plain_attention
from training.batches import Batch
from training.checkpoint import Run, new_run, start_from_pipeline
from training.heads import LOOK_WEIGHT, POSITION_WEIGHT
from training.loop import object_weighted, optimise, parse_stage, take_up, train
from training.model import Networks, noise_scheduler
from training.stages import STAGES


def loss_of(networks: Networks, batch: Batch, alphas: Tensor) -> Tensor:
    """The mean squared error of v (Salimans and Ho, arXiv:2202.00512), weighted towards objects."""
    alpha = alphas[batch.timestep].view(-1, 1, 1, 1)
    noisy = alpha.sqrt() * batch.latent + (1 - alpha).sqrt() * batch.noise
    target = alpha.sqrt() * batch.noise - (1 - alpha).sqrt() * batch.latent
    with torch.autocast(batch.latent.device.type, torch.bfloat16):
        predicted = networks(noisy.contiguous(memory_format=torch.channels_last), batch.timestep, batch.ids)
    return object_weighted(predicted.float() - target, batch.mask)


def train_step(run: Run, batch: Batch, rate: float, alphas: Tensor) -> dict[str, float]:
    """One step; returns its loss and the heads' errors of place and look."""
    loss = loss_of(run.networks, batch, alphas)
    position, look = run.heads.loss(batch.looks, batch.timestep)
    optimise(run, loss + POSITION_WEIGHT * position + LOOK_WEIGHT * look, rate, len(batch.latent))
    return {"loss": loss.item(), "position": position.item(), "look": look.item()}


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    return parse_stage(__doc__, STAGES, words)


def main() -> None:
    """Train as the command line says."""
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    run = new_run(torch.device(arguments.device))
    if arguments.device == "cpu":
        use_plain_attention(run.networks)
    take_up(run, arguments, start_from_pipeline)
    print(f"{sum(p.numel() for p in run.networks.parameters()) / 1e6:.2f} M parameters, {run.progress}", flush=True)
    alphas = noise_scheduler().alphas_cumprod.to(arguments.device)
    train(run, STAGES[arguments.stage], arguments, lambda *step: train_step(*step, alphas))


if __name__ == "__main__":
    main()
