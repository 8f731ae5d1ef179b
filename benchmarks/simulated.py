"""Predict a step of SDXL and FLUX under plans on machines by name, beside published times of one device. Without GPUs.

python -m benchmarks.simulated --write docs/figures/simulated.md
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.quiet import quiet_process
from benchmarks.page import publish
from benchmarks.volumes.shapes import SDXL
from patchpar.errors import PlanError
from patchpar.pipeline.planner.forecast import Forecast, forecast
from patchpar.pipeline.planner.image_ranks import ImageRanks, ranks_of_image
from patchpar.pipeline.planner.record import Recording, RecordOptions
from patchpar.pipeline.planner.simulate import SimulatedSteps
from patchpar.plan.plan import Plan
from patchpar.plan.replay.machine import Machine
from patchpar.plan.replay.price import AS_GRAPH, ASSUMED

STEPS = 28
MACHINES = ("8xH100-nvlink", "8xA100-nvlink", "8xL40S-pcie4", "8xRTX4090-pcie4")
Model = Callable[[int], tuple[Any, dict[str, Any]]]


def flux(pixels: int) -> tuple[Any, dict[str, Any]]:
    """FLUX.1 dev in bf16 without weights, encoders and VAE, and a call with 512 tokens of text."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

    dtype = torch.bfloat16
    with torch.device("meta"):
        network = FluxTransformer2DModel(guidance_embeds=True).to(dtype).eval()
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    missing = dict.fromkeys(("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
    texts = {"prompt_embeds": (1, 512, 4096), "pooled_prompt_embeds": (1, 768)}
    return FluxPipeline(scheduler=scheduler, transformer=network, **missing), _call(pixels, texts, dtype)


def sdxl(pixels: int) -> tuple[Any, dict[str, Any]]:
    """The UNet of SDXL base 1.0 in fp16, likewise, with guidance."""
    from diffusers import EulerDiscreteScheduler, StableDiffusionXLPipeline, UNet2DConditionModel

    dtype = torch.float16
    with torch.device("meta"):
        network = UNet2DConditionModel(**SDXL).to(dtype).eval()
    missing = dict.fromkeys(("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
    texts = {"prompt_embeds": (1, 77, 2048), "pooled_prompt_embeds": (1, 1280)}
    texts |= {f"negative_{name}": shape for name, shape in texts.items()}
    pipe = StableDiffusionXLPipeline(unet=network, scheduler=EulerDiscreteScheduler(), **missing)
    return pipe, _call(pixels, texts, dtype)


def _call(pixels: int, texts: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> dict[str, Any]:
    given = {name: torch.zeros(shape, dtype=dtype) for name, shape in texts.items()}
    return {**given, "height": pixels, "width": pixels, "num_inference_steps": STEPS, "output_type": "latent"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model, the plans to predict, and what others have measured of a step on one device, in ms, with its source."""

    title: str
    model: Model
    plans: Sequence[str]
    published: Mapping[str, tuple[float, str]]


SUBJECTS = {
    "sdxl": Subject(
        title="SDXL base 1.0, fp16, 1024 x 1024, both guidance branches",
        model=sdxl,
        plans=("single", "cfg=2", "patch=2", "cfg=2,patch=2", "cfg=2,patch=4", "cfg=2,patch=4,strategy=fresh-edges"),
        published={"A100": (110, "[PyTorch](https://pytorch.org/blog/accelerating-generative-ai-3/), 3.31 s / 30")},
    ),
    "flux": Subject(
        title="FLUX.1 dev, bf16, 1024 x 1024",
        model=flux,
        plans=(
            "single",
            "patch=2,strategy=exact:ulysses=2",
            "patch=4,strategy=exact:ulysses=4",
            "patch=8,strategy=exact:ulysses=8",
            "patch=8,strategy=exact:attention=ring",
        ),
        published={
            "H100": (
                240,
                "[xDiT](https://github.com/xdit-project/xDiT/blob/main/docs/performance/flux.md), 6.71 s / 28",
            )
        },
    ),
}


def lines(names: Sequence[str], machines: Sequence[str]) -> Iterator[str]:
    """Yield the page."""
    yield "# Predicted steps on machines by name"
    yield ""
    yield (
        "**Predictions, not measurements**, by `patchpar simulate`'s parts: recorded programs of all ranks, published "
        "rates, and the assumptions of the [simulator](../simulator.md#what-is-assumed). Milliseconds of a step after "
        "the first; no encoders and no VAE. `graph`: launches cost nothing. `sent`: MB, by the rank that sends most."
    )
    for name in names:
        yield ""
        yield from _subject(SUBJECTS[name], [Machine.parse(each) for each in machines])


def _subject(subject: Subject, machines: Sequence[Machine]) -> Iterator[str]:
    pipe, kwargs = subject.model(1024)
    pipe.set_progress_bar_config(disable=True)
    yield f"## {subject.title}"
    yield ""
    yield "| machine | plan | step | as graph | compute | launches | waits | sent | GiB per rank | speed-up |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    known: dict[Any, Any] = {}
    recorded = [(plan, _recorded(pipe, plan, kwargs, known)) for plan in map(Plan.parse, subject.plans)]
    for machine in machines:
        alone = 0.0
        for plan, ranks in recorded:
            eager, graph = (
                forecast(ranks, plan, machine, steps=STEPS, warm_up_steps=0, assumed=assumed)
                for assumed in (ASSUMED, AS_GRAPH)
            )
            alone = alone or eager.step.seconds
            yield _row(eager, graph, alone)
    yield ""
    for device, (published, source) in subject.published.items():
        plan, ranks = recorded[0]
        found = forecast(ranks, plan, Machine.parse(device), steps=STEPS, warm_up_steps=0)
        predicted = 1e3 * found.step.seconds
        yield (
            f"One {device}: {predicted:.0f} ms predicted. Measured by others, eager, with all that a pipeline does "
            f"beside its steps: {published:.0f} ms ({source}), {predicted / published - 1:+.0%}. No figure was fitted."
        )


def _recorded(pipe: Any, plan: Plan, kwargs: Mapping[str, Any], known: dict[Any, Any]) -> ImageRanks:
    steps = SimulatedSteps.of(plan)
    options = RecordOptions(steps=steps.recorded, joined=True, known=known)
    return ranks_of_image(steps.plan, Recording(pipe, steps.plan, kwargs, options).of_rank)


def _row(eager: Forecast, graph: Forecast, alone: float) -> str:
    step, memory = eager.step, max(each.total for each in eager.memory)
    waits, sent = sum(step.exposed.values()), max(sum(each.values()) for each in eager.bytes_sent)
    times = (step.seconds, graph.step.seconds, step.compute, step.launch, waits)
    fits = "" if memory <= eager.machine.device.memory else ", does not fit"
    cells = [eager.machine.device.name, f"`{eager.plan}`", *(f"{1e3 * each:.1f}" for each in times)]
    cells += [f"{sent / 1e6:.0f}", f"{memory / 2**30:.1f}{fits}", f"{alone / step.seconds:.2f}x"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(SUBJECTS), default=list(SUBJECTS))
    parser.add_argument("--machines", nargs="+", default=MACHINES, metavar="NAME")
    parser.add_argument("--write", type=Path, help="also write the tables to this file")
    options = parser.parse_args()
    quiet_process(threads=1)
    try:
        publish(lines(options.models, options.machines), options.write)
    except PlanError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
