"""The loop that trains a run: batches decided by seed and step, state files, reports, and the arguments for it."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from training.batches import Batch, sample_batch
from training.checkpoint import Run, load, save
from training.stages import Schedule, Stage
from training.stop import StopSignal
from training.tokenizer import build_tokenizer

OBJECT_WEIGHT = 5.0
"""Objects cover a tenth of an image; with this weight they make about a third of the loss. The best prediction stays
the same, because every cell has its own."""
SAVE_EVERY_SECONDS, REPORT_EVERY_STEPS = 120, 25

Step = Callable[[Run, Batch, float], Mapping[str, float]]
"""One step of the optimizer at a learning rate; returns its errors by name."""


def object_weighted(error_BCHW: Tensor, mask_B1HW: Tensor) -> Tensor:
    """The mean of squared errors, weighted towards objects."""
    weight = 1 + (OBJECT_WEIGHT - 1) * mask_B1HW
    return (weight * error_BCHW**2).mean() / weight.mean()


def optimise(run: Run, loss: Tensor, rate: float, samples: int) -> None:
    """One step of the optimizer and of the moving average down this loss of so many samples."""
    for group in run.optimizer.param_groups:
        group["lr"] = rate
    run.optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(run.networks.parameters(), 1.0)
    run.optimizer.step()
    run.average_step()
    run.progress.step += 1
    run.progress.stage_step += 1
    run.progress.samples += samples


class Named(Protocol):
    """A stage of training, whatever it is made of."""

    @property
    def name(self) -> str:
        """By which a state file knows it."""


def begin_stage(run: Run, stage: Named) -> None:
    """Count the steps of a stage from zero, unless the run stopped in the middle of this very stage."""
    if run.progress.stage != stage.name:
        run.progress.stage, run.progress.stage_step = stage.name, 0


def batches(run: Run, stage: Stage, arguments: argparse.Namespace, executor: Executor | None) -> Iterator[Batch]:
    """The batches of the steps that are left, each decided by seed and step."""
    tokenizer = build_tokenizer()
    for step in range(run.progress.stage_step, arguments.steps):
        key = f"{arguments.seed} {stage.name} {step} {run.progress.step - run.progress.stage_step}"
        rendered = stage.sample(key)
        size = max(1, round(rendered.batch * arguments.batch_scale))
        yield sample_batch(key, replace(rendered, batch=size), tokenizer, executor, arguments.night_fraction)


def train(run: Run, stage: Named, arguments: argparse.Namespace, step: Step, sample: Callable = batches) -> None:
    """Run a stage to its end, or until a stop signal. `sample` gives the batches that are left, as `batches` does."""
    begin_stage(run, stage)
    stop, device = StopSignal().listen(), next(run.networks.parameters()).device
    first = run.progress.step == run.progress.stage_step  # later stages have an optimizer that knows its way
    rise = 60 if first else 1
    schedule = Schedule(steps=arguments.steps, peak=arguments.rate, rise=rise, decay_from=arguments.decay_from)
    saved, smooth = time.monotonic(), {}
    with renderers(arguments.render_workers) as executor:
        for batch in sample(run, stage, arguments, executor):
            losses = step(run, batch.to(device), schedule.rate(run.progress.stage_step))
            smooth = {name: 0.98 * smooth.get(name, new) + 0.02 * new for name, new in losses.items()}
            if run.progress.stage_step % REPORT_EVERY_STEPS == 0:
                report(run, schedule, smooth)
            if stop.raised:
                break
            if time.monotonic() - saved > SAVE_EVERY_SECONDS:
                save(run, arguments.state)
                saved = time.monotonic()
    save(run, arguments.state)
    print("stopped" if stop.raised else "finished", run.progress, flush=True)


def report(run: Run, schedule: Schedule, losses: Mapping[str, float]) -> None:
    """One line on how far the run is."""
    progress = run.progress
    done = f"{progress.stage} {progress.stage_step}/{schedule.steps} samples {progress.samples}"
    displayed = " ".join(f"{name} {value:.4f}" for name, value in losses.items())
    rate, seconds = schedule.rate(progress.stage_step), time.process_time()
    print(f"{done} {displayed} rate {rate:.1e} cpu {seconds:.0f}s", flush=True)


@contextmanager
def renderers(count: int) -> Iterator[Executor | None]:
    """Processes that draw images; none where count is 0, and the training process draws them itself."""
    with ProcessPoolExecutor(count) if count else nullcontext() as executor:
        yield executor


def parse_stage(description: str | None, stages: Mapping[str, Named], words: list[str] | None) -> argparse.Namespace:
    """The command line of a training on these stages."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", choices=sorted(stages), required=True)
    add_arguments(parser)
    return parser.parse_args(words)


def take_up(run: Run, arguments: argparse.Namespace, start: Callable[[Run, Path], None]) -> None:
    """Go on from the state file; where there is none, `start` from a pipeline if one is given."""
    if arguments.state.exists():
        load(run, arguments.state)
    elif arguments.resume_from:
        start(run, arguments.resume_from)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that every training on stages has."""
    parser.add_argument("--state", type=Path, required=True, help="state file; gone on from where it exists")
    parser.add_argument("--steps", type=int, required=True, help="steps of this stage in all")
    parser.add_argument("--rate", type=float, default=1e-3, help="highest learning rate")
    parser.add_argument("--decay-from", type=float, default=0.6, help="part of the steps after which the rate falls")
    parser.add_argument("--resume-from", type=Path, help="packaged pipeline to start from where there is no state file")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch-scale", type=float, default=1.0, help="factor on batch sizes; 16 suits a large GPU")
    parser.add_argument("--render-workers", type=int, default=0, help="processes that draw images; 0: this one")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--night-fraction", type=float, help="part of the images that are at night; without it a third")
    parser.add_argument("--seed", type=int, default=0)
