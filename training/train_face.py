"""Train the avatar on clips drawn by code: flow matching with a noise level per block (diffusion forcing), EMA.

    python -m training.train_face --state runs/face.pt --stage short --steps 8000 --decay-from 1
    python -m training.train_face --state runs/face.pt --stage long  --steps 4000      # goes on from the same file

The state file is written every two minutes and on SIGTERM or ctrl-C; the same command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import WanTransformer3DModel
from torch import Tensor, nn
from transformers import UMT5EncoderModel

from patchpar.models.streaming.causal.audio_conditioner import AudioConditioner
from training.checkpoint import Run, begin, reset_average
from training.face import OPTIONS, SIDE, ClipTraining, FaceNetworks
from training.face_data import Batch, ClipShape, sample_batch
from training.loop import object_weighted, optimise, parse_stage, take_up, train


@dataclass(frozen=True, slots=True, kw_only=True)
class FaceStage:
    """Pairs of blocks per clip and clips per step, all drawn equally often."""

    name: str
    lengths: tuple[tuple[int, int], ...]


SHORT = FaceStage(name="short", lengths=((2, 12), (3, 8)))
LONG = FaceStage(name="long", lengths=((3, 8), (6, 4)))
FACE_STAGES = {stage.name: stage for stage in (SHORT, LONG)}


def new_face_run(device: torch.device) -> Run:
    """A run of the avatar with fresh weights."""
    return begin(FaceNetworks().to(device).train(), nn.Module())


def start_from_face(run: Run, folder: Path) -> None:
    """Take the weights of a packaged avatar; the optimizer and the counts start anew."""
    kept = {"variant": "fp16", "torch_dtype": torch.float32}
    given = {
        "transformer": WanTransformer3DModel.from_pretrained(folder / "transformer", **kept),
        "text_encoder": UMT5EncoderModel.from_pretrained(folder / "text_encoder", **kept),
        "audio": AudioConditioner.load(folder / "transformer"),
    }
    for name, module in given.items():
        getattr(run.networks, name).load_state_dict(module.state_dict())
    reset_average(run, {name: run.networks.get_parameter(name) for name in run.average})


def loss_of(training: ClipTraining, batch: Batch) -> Tensor:
    """The mean squared error of the flow from image to noise, weighted towards mouth and eyes."""
    frames = training.options.frames
    level = batch.level.repeat_interleave(frames, 1)[:, None, :, None, None]
    noisy = torch.lerp(batch.latent, batch.noise, level)
    with torch.autocast(batch.latent.device.type, torch.bfloat16):
        predicted = training.velocity(noisy, batch)
    return object_weighted(predicted.float() - (batch.noise - batch.latent), batch.mask)


def train_step(run: Run, batch: Batch, rate: float, training: ClipTraining) -> dict[str, float]:
    """One step; returns its loss."""
    loss = loss_of(training, batch)
    optimise(run, loss, rate, len(batch.latent))
    return {"loss": loss.item()}


def batches(run: Run, stage: FaceStage, arguments: argparse.Namespace, drawers: Executor | None) -> Iterator[Batch]:
    """The batches of the steps that are left, each decided by seed and step."""
    for step in range(run.progress.stage_step, arguments.steps):
        key = f"{arguments.seed} {stage.name} {step} {run.progress.step - run.progress.stage_step}"
        blocks, clips = random.Random(f"length {key}").choice(stage.lengths)
        shape = ClipShape(side=SIDE, blocks=blocks, frames=OPTIONS.frames)
        yield sample_batch(key, shape, max(1, round(clips * arguments.batch_scale)), drawers)


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    return parse_stage(__doc__, FACE_STAGES, words)


def main() -> None:
    """Train as the command line says."""
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    run = new_face_run(torch.device(arguments.device))
    take_up(run, arguments, start_from_face)
    trained = sum(value.numel() for value in run.average.values())
    print(f"{trained / 1e6:.2f} M parameters, {run.progress}", flush=True)
    training = ClipTraining(run.networks)
    train(run, FACE_STAGES[arguments.stage], arguments, lambda *step: train_step(*step, training), batches)


if __name__ == "__main__":
    main()
