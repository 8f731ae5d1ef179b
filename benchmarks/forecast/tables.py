"""Predicted steps of common models under plans on machines by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.forecast.models import Model, flux, qwen, sdxl, wan
from benchmarks.forecast.recorded import RecordedModel
from patchpar.errors import PlanError
from patchpar.pipeline.planner.forecast import Forecast
from patchpar.plan.plan import Plan
from patchpar.plan.replay.machine import Machine
from patchpar.plan.replay.price import AS_GRAPH

MACHINES = ("8xH100-nvlink", "8xA100-nvlink", "8xL40S-pcie4", "8xRTX4090-pcie4", "2x(8xH100-nvlink)-ib400")
STEPS = 28


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model and the plans to predict."""

    title: str
    model: Model
    plans: Sequence[str]


GUIDED = ("single", "cfg=2", "patch=4,strategy=exact:ulysses=4", "cfg=2,patch=4,strategy=exact:ulysses=4")
SUBJECTS = {
    "sdxl": Subject(
        title="SDXL base 1.0, fp16, 1024 x 1024, both guidance branches",
        model=sdxl,
        plans=("single", "cfg=2", "patch=2", "cfg=2,patch=2", "cfg=2,patch=4", "cfg=2,patch=4,strategy=fresh-edges"),
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
    ),
    "qwen": Subject(title="Qwen-Image, bf16, 1536 x 1536, guidance in two calls", model=qwen(1536), plans=GUIDED),
    "wan": Subject(
        title="Wan 2.1 14B, bf16, 81 frames of 832 x 480, guidance in two calls",
        model=wan,
        plans=(*GUIDED, "cfg=2,patch=8,strategy=exact:ulysses=8"),
    ),
}


def lines(models: Mapping[str, RecordedModel], names: Sequence[str], machines: Sequence[str]) -> Iterator[str]:
    """Yield a table for each model."""
    for name in names:
        yield f"## Predicted: {SUBJECTS[name].title}"
        yield ""
        yield (
            "**Predictions, not measurements**, from published rates and the assumptions of the "
            "[simulator](../simulator.md#what-is-assumed). Milliseconds of a step after the first; no encoders and no "
            "VAE. `as graph`: launches cost nothing. `sent`: MB, by the rank that sends most."
        )
        yield ""
        yield from _table(SUBJECTS[name], models[name], [Machine.parse(each) for each in machines])
        yield ""


def _table(subject: Subject, model: RecordedModel, machines: Sequence[Machine]) -> Iterator[str]:
    yield "| machine | plan | step | as graph | compute | launches | waits | sent | GiB per rank | speed-up |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for machine in machines:
        alone = 0.0
        for plan in map(Plan.parse, subject.plans):
            if plan.world_size > machine.devices or (machine.hosts > 1 and 1 < plan.world_size <= 8):
                continue  # of several hosts only what needs them
            try:
                eager, graph = (model.forecast(plan, machine, STEPS, *each) for each in ((), (AS_GRAPH,)))
            except PlanError as error:
                yield f"| {machine} | `{plan}` | refused: {error} | | | | | | | |"
                continue
            alone = alone or eager.step.seconds
            yield _row(eager, graph, alone)


def _row(eager: Forecast, graph: Forecast, alone: float) -> str:
    step, memory = eager.step, max(each.total for each in eager.memory)
    waits, sent = sum(step.exposed.values()), max(sum(each.values()) for each in eager.bytes_sent)
    times = (step.seconds, graph.step.seconds, step.compute, step.launch, waits)
    fits = "" if eager.fits else ", does not fit"
    cells = [str(eager.machine), f"`{eager.plan}`", *(f"{1e3 * each:.1f}" for each in times)]
    cells += [f"{sent / 1e6:.0f}", f"{memory / 2**30:.1f}{fits}", f"{alone / step.seconds:.2f}x"]
    return f"| {' | '.join(cells)} |"
