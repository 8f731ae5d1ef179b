"""Train the UNet and the text encoders on scenes drawn by code: v-prediction, EMA, caption dropout.

    python -m training.train_unet --state runs/unet.pt --stage small --steps 4000
    python -m training.train_unet --state runs/unet.pt --stage medium --steps 2000      # goes on from the same file

The state file is written every two minutes and on SIGTERM or ctrl-C; the same command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from training.attention import use_plain_attention
from training.batches import Batch, draw_batch
from training.checkpoint import Run, load, new_run, save, start_from_pipeline
from training.heads import LOOK_WEIGHT, PLACE_WEIGHT
from training.model import Networks, noise_scheduler
from training.stages import STAGES, Schedule, Stage
from training.stop import StopSignal
from training.tokenizer import build_tokenizer

OBJECT_WEIGHT = 5.0
"""Objects cover a tenth of a picture; with this weight they make about a third of the loss. The best prediction stays
the same, because every cell has its own."""
SAVE_EVERY_SECONDS, REPORT_EVERY_STEPS = 120, 25


def loss_of(networks: Networks, batch: Batch, alphas: Tensor) -> Tensor:
    """The mean squared error of v (Salimans and Ho, arXiv:2202.00512), weighted towards objects."""
    alpha = alphas[batch.timestep].view(-1, 1, 1, 1)
    noisy = alpha.sqrt() * batch.latent + (1 - alpha).sqrt() * batch.noise
    target = alpha.sqrt() * batch.noise - (1 - alpha).sqrt() * batch.latent
    with torch.autocast(batch.latent.device.type, torch.bfloat16):
        predicted = networks(noisy.contiguous(memory_format=torch.channels_last), batch.timestep, batch.ids)
    weight = 1 + (OBJECT_WEIGHT - 1) * batch.mask
    return (weight * (predicted.float() - target) ** 2).mean() / weight.mean()


def train_step(run: Run, batch: Batch, rate: float, alphas: Tensor) -> tuple[float, float, float]:
    """One step of the optimizer and of the moving average; returns its loss and the heads' errors of place and look."""
    for group in run.optimizer.param_groups:
        group["lr"] = rate
    loss = loss_of(run.networks, batch, alphas)
    place, look = run.heads.loss(batch.looks, batch.timestep)
    run.optimizer.zero_grad(set_to_none=True)
    (loss + PLACE_WEIGHT * place + LOOK_WEIGHT * look).backward()
    nn.utils.clip_grad_norm_(run.networks.parameters(), 1.0)
    run.optimizer.step()
    run.average_step()
    run.progress.step += 1
    run.progress.stage_step += 1
    run.progress.samples += len(batch.latent)
    return loss.item(), place.item(), look.item()


def begin_stage(run: Run, stage: Stage) -> None:
    """Count the steps of a stage from zero, unless the run stopped in the middle of this very stage."""
    if run.progress.stage != stage.name:
        run.progress.stage, run.progress.stage_step = stage.name, 0


def batches(run: Run, stage: Stage, arguments: argparse.Namespace, executor: Executor | None) -> Iterator[Batch]:
    """The batches of the steps that are left, each decided by seed and step."""
    tokenizer = build_tokenizer()
    for step in range(run.progress.stage_step, arguments.steps):
        key = f"{arguments.seed} {stage.name} {step} {run.progress.step - run.progress.stage_step}"
        drawn = stage.draw(key)
        size = max(1, round(drawn.batch * arguments.batch_scale))
        yield draw_batch(key, replace(drawn, batch=size), tokenizer, executor)


def train(run: Run, stage: Stage, arguments: argparse.Namespace) -> None:
    """Run a stage to its end, or until a stop signal."""
    begin_stage(run, stage)
    stop, device = StopSignal().listen(), next(run.networks.parameters()).device
    first = run.progress.step == run.progress.stage_step  # later stages have an optimizer that knows its way
    rise = 60 if first else 1
    schedule = Schedule(steps=arguments.steps, peak=arguments.rate, rise=rise, decay_from=arguments.decay_from)
    alphas = noise_scheduler().alphas_cumprod.to(device)
    saved, smooth = time.monotonic(), None
    with renderers(arguments.render_workers) as executor:
        for batch in batches(run, stage, arguments, executor):
            losses = train_step(run, batch.to(device), schedule.rate(run.progress.stage_step), alphas)
            smooth = [0.98 * old + 0.02 * new for old, new in zip(smooth or losses, losses, strict=True)]
            if run.progress.stage_step % REPORT_EVERY_STEPS == 0:
                report(run, schedule, smooth)
            if stop.raised:
                break
            if time.monotonic() - saved > SAVE_EVERY_SECONDS:
                save(run, arguments.state)
                saved = time.monotonic()
    save(run, arguments.state)
    print("stopped" if stop.raised else "finished", run.progress, flush=True)


def report(run: Run, schedule: Schedule, losses: list[float]) -> None:
    """One line on how far the run is."""
    progress = run.progress
    done = f"{progress.stage} {progress.stage_step}/{schedule.steps} samples {progress.samples}"
    rate, seconds = schedule.rate(progress.stage_step), time.process_time()
    print(
        f"{done} loss {losses[0]:.4f} place {losses[1]:.4f} look {losses[2]:.3f} rate {rate:.1e} cpu {seconds:.0f}s",
        flush=True,
    )


@contextmanager
def renderers(count: int) -> Iterator[Executor | None]:
    """Processes that draw pictures; none where count is 0, and the training process draws them itself."""
    with ProcessPoolExecutor(count) if count else nullcontext() as executor:
        yield executor


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", type=Path, required=True, help="state file; gone on from where it exists")
    parser.add_argument("--stage", choices=sorted(STAGES), required=True)
    parser.add_argument("--steps", type=int, required=True, help="steps of this stage in all")
    parser.add_argument("--rate", type=float, default=1e-3, help="highest learning rate")
    parser.add_argument("--decay-from", type=float, default=0.6, help="part of the steps after which the rate falls")
    parser.add_argument("--resume-from", type=Path, help="packaged pipeline to start from where there is no state file")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch-scale", type=float, default=1.0, help="factor on batch sizes; 16 suits a large GPU")
    parser.add_argument("--render-workers", type=int, default=0, help="processes that draw pictures; 0: this one")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(words)


def main() -> None:
    """Train as the command line says."""
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    run = new_run(torch.device(arguments.device))
    if arguments.device == "cpu":
        use_plain_attention(run.networks)
    if arguments.state.exists():
        load(run, arguments.state)
    elif arguments.resume_from:
        start_from_pipeline(run, arguments.resume_from)
    print(f"{sum(p.numel() for p in run.networks.parameters()) / 1e6:.2f} M parameters, {run.progress}", flush=True)
    train(run, STAGES[arguments.stage], arguments)


if __name__ == "__main__":
    main()
