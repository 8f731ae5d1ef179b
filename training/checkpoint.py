"""What a training run is made of between two steps, and how it is kept: one file, replaced atomically."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import StableDiffusionXLPipeline
from torch import Tensor, nn

from training.heads import GuideHeads
from training.model import Networks

EMA_DECAY = 0.998


@dataclass(slots=True, kw_only=True)
class Progress:
    """How far a run is. stage_step counts within the stage, the others from the very start."""

    step: int = 0
    samples: int = 0
    stage: str = ""
    stage_step: int = 0


@dataclass(slots=True, kw_only=True)
class Run:
    """Networks, the heads that only training has, the moving average by parameter name, optimizer and progress."""

    networks: nn.Module
    heads: nn.Module
    average: dict[str, Tensor]
    optimizer: torch.optim.Optimizer
    progress: Progress

    def average_step(self) -> None:
        """Move the average towards the networks: fast at the start of a stage, then over about 500 steps."""
        step = self.progress.stage_step
        decay = min(EMA_DECAY, (1 + step) / (10 + step))
        live = [self.networks.get_parameter(name).detach() for name in self.average]
        torch._foreach_lerp_(list(self.average.values()), live, 1 - decay)


def new_run(device: torch.device) -> Run:
    """A run of the UNet and its text encoders with fresh weights."""
    networks = Networks().to(device).to(memory_format=torch.channels_last).train()
    return begin(networks, GuideHeads(networks.unet).to(device))


def begin(networks: nn.Module, heads: nn.Module) -> Run:
    """A run that starts with these weights. What needs no gradient is neither trained nor averaged."""
    trained = {name: parameter for name, parameter in networks.named_parameters() if parameter.requires_grad}
    parameters = [*trained.values(), *heads.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=0.0, betas=(0.9, 0.99), weight_decay=0.01, fused=True)
    average = {name: parameter.detach().clone() for name, parameter in trained.items()}
    return Run(networks=networks, heads=heads, average=average, optimizer=optimizer, progress=Progress())


def save(run: Run, path: Path) -> None:
    """Write the whole state of a run."""
    progress = {name: getattr(run.progress, name) for name in Progress.__slots__}
    state = {
        "networks": run.networks.state_dict(),
        "heads": run.heads.state_dict(),
        "average": run.average,
        "optimizer": run.optimizer.state_dict(),
        "progress": progress,
    }
    write_atomically(state, path)


def write_atomically(state: dict, path: Path) -> None:
    """Write a state file under another name first: a reader sees the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    torch.save(state, part)
    part.replace(path)


def load(run: Run, path: Path) -> None:
    """Go on from a checkpoint file."""
    state = read(path)
    run.networks.load_state_dict(state["networks"])
    run.heads.load_state_dict(state["heads"])
    run.optimizer.load_state_dict(state["optimizer"])
    for name, value in state["average"].items():
        run.average[name].copy_(value)
    run.progress = Progress(**state["progress"])


def read(path: Path) -> dict:
    """The content of a checkpoint file, on the CPU."""
    return torch.load(path, map_location="cpu", weights_only=True)


def start_from_pipeline(run: Run, folder: Path) -> None:
    """Take the weights of a packaged pipeline; the optimizer and the counts start anew."""
    pipe = StableDiffusionXLPipeline.from_pretrained(folder, variant="fp16", torch_dtype=torch.float32)
    parts = {"unet": pipe.unet, "text_encoder": pipe.text_encoder, "text_encoder_2": pipe.text_encoder_2}
    for name, module in parts.items():
        getattr(run.networks, name).load_state_dict(module.state_dict())
    reset_average(run, dict(run.networks.named_parameters()))


def reset_average(run: Run, values: Mapping[str, Tensor]) -> None:
    """Let the moving average start from these values."""
    for name, value in values.items():
        run.average[name].copy_(value.detach())
