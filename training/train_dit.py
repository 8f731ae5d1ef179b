"""Train the DiT on scenes drawn by code: flow matching (Esser and others, arXiv:2403.03206), EMA, caption dropout.

    python -m training.train_dit --state runs/dit.pt --stage small  --steps 6000 --decay-from 1
    python -m training.train_dit --state runs/dit.pt --stage square --steps 4000      # goes on from the same file

Its text encoders are those of the packaged UNet and stay as they are. The state file is written every two minutes and
on SIGTERM or ctrl-C; the same command goes on where it stopped.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from diffusers import SD3Transformer2DModel
from torch import Tensor

from training.batches import Batch
from training.checkpoint import Run, begin, reset_average
from training.dit import PATCH, DitNetworks, ready_for_training
from training.heads import LOOK_WEIGHT, LookHeads
from training.loop import object_weighted, optimise, parse_stage, take_up, train
from training.package import FOLDER
from training.stages import DIT_STAGES


def new_dit_run(device: torch.device, text_side: Path = FOLDER) -> Run:
    """A run of the DiT with fresh weights and the text encoders of a packaged UNet pipeline."""
    networks = DitNetworks()
    networks.take_text_side(text_side)
    ready_for_training(networks)
    networks.to(device).train()
    return begin(networks, LookHeads(networks.transformer).to(device))


def start_from_dit(run: Run, folder: Path) -> None:
    """Take the weights of a packaged DiT; the optimizer and the counts start anew."""
    given = SD3Transformer2DModel.from_pretrained(folder / "transformer", variant="fp16", torch_dtype=torch.float32)
    run.networks.transformer.load_state_dict(given.state_dict())
    reset_average(run, {f"transformer.{name}": value for name, value in given.named_parameters()})


def loss_of(networks: DitNetworks, batch: Batch) -> Tensor:
    """The mean squared error of the flow from image to noise, weighted towards objects."""
    timestep = batch.timestep + 0.5
    level = (timestep / 1000).view(-1, 1, 1, 1)
    noisy = torch.lerp(batch.latent, batch.noise, level)
    with torch.autocast(batch.latent.device.type, torch.bfloat16):
        predicted = networks(noisy, timestep, batch.ids)
    return object_weighted(predicted.float() - (batch.noise - batch.latent), batch.mask)


def train_step(run: Run, batch: Batch, rate: float) -> dict[str, float]:
    """One step; returns its loss and the heads' error of looks."""
    loss = loss_of(run.networks, batch)
    look = run.heads.loss(batch.looks, batch.timestep, rows=batch.latent.shape[-2] // PATCH)
    optimise(run, loss + LOOK_WEIGHT * look, rate, len(batch.latent))
    return {"loss": loss.item(), "look": look.item()}


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    return parse_stage(__doc__, DIT_STAGES, words)


def main() -> None:
    """Train as the command line says."""
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    run = new_dit_run(torch.device(arguments.device))
    take_up(run, arguments, start_from_dit)
    trained = sum(value.numel() for value in run.average.values())
    print(f"{trained / 1e6:.2f} M parameters, {run.progress}", flush=True)
    train(run, DIT_STAGES[arguments.stage], arguments, train_step)


if __name__ == "__main__":
    main()
