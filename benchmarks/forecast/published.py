"""Published times of one device beside forecasts from the catalogue, and after one of the rows has calibrated it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.forecast.models import flux, qwen, sd15, sdxl
from benchmarks.forecast.recorded import RecordedModel
from patchpar.plan.plan import Plan
from patchpar.plan.replay.machine import Machine
from patchpar.plan.replay.price import ASSUMED, COMPILED


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRow:
    """Seconds of so many steps on one device. `compiled`: launches cost nothing. `note`: what is in it beside them."""

    what: str
    model: str
    device: str
    steps: int
    seconds: float
    source: str
    compiled: bool = False
    note: str = ""


MODELS = {"sd15": sd15, "sdxl": sdxl, "flux": flux, "qwen-512": qwen(512), "qwen-1536": qwen(1536)}
FASTER = "[flux-faster](https://github.com/xlite-dev/flux-faster)"
DIFFUSERS = "[diffusers](https://huggingface.co/docs/diffusers/tutorials/fast_diffusion)"
FAL = "[fal-ai](https://github.com/fal-ai/stable-diffusion-benchmarks)"
OMNI = "[vllm-omni #2707](https://github.com/vllm-project/vllm-omni/issues/2707)"
WHOLE = "with encoders and VAE"
ROWS = (
    PublishedRow(
        what="SD 1.5, 512 x 512, SDPA", model="sd15", device="A100", steps=50, seconds=1.604, source=FAL, note=WHOLE
    ),
    PublishedRow(
        what="SD 1.5, 512 x 512, compiled",
        model="sd15",
        device="A100",
        steps=50,
        seconds=1.354,
        source=FAL,
        compiled=True,
        note=WHOLE,
    ),
    PublishedRow(
        what="SDXL, 1024 x 1024, SDPA",
        model="sdxl",
        device="A100",
        steps=30,
        seconds=3.31,
        source=DIFFUSERS,
        note=WHOLE,
    ),
    PublishedRow(
        what="SDXL, 1024 x 1024, compiled",
        model="sdxl",
        device="A100",
        steps=30,
        seconds=2.54,
        source=DIFFUSERS,
        compiled=True,
        note=WHOLE,
    ),
    PublishedRow(
        what="FLUX.1 dev, 1024 x 1024, eager",
        model="flux",
        device="L20",
        steps=28,
        seconds=24.94,
        source=FASTER,
        note=WHOLE,
    ),
    PublishedRow(
        what="FLUX.1 dev, 1024 x 1024, compiled",
        model="flux",
        device="L20",
        steps=28,
        seconds=20.24,
        source=FASTER,
        compiled=True,
        note=WHOLE,
    ),
    PublishedRow(
        what="Qwen-Image, 512 x 512, guided", model="qwen-512", device="H100", steps=20, seconds=2.32, source=OMNI
    ),
    PublishedRow(
        what="Qwen-Image, 1536 x 1536, guided", model="qwen-1536", device="H100", steps=35, seconds=23.19, source=OMNI
    ),
)


def lines(models: Mapping[str, RecordedModel], rows: Sequence[PublishedRow] = ROWS) -> Iterator[str]:
    """Yield the table. The first row of a device calibrates its other rows of the same kind."""
    yield (
        "Denoising steps alone are predicted, from published rates and the assumptions of the "
        "[simulator](../simulator.md#what-is-assumed). What it assumes of convolutions, caches and the reached part of "
        "the peak was chosen with these rows in sight: expect larger errors for others. `calibrated`: kernels of a "
        "device scaled by its first row that is compiled, or eager; of that row itself it is left out."
    )
    yield ""
    yield "| call | device | published s | predicted s | error | calibrated | error | published are | source |"
    yield "|---|---|---|---|---|---|---|---|---|"
    scales: dict[tuple[str, bool], float] = {}
    for row in rows:
        predicted = _predicted(models[row.model], row)
        key = row.device, row.compiled
        scale = scales.get(key)
        after = (
            ("", "") if scale is None else (f"{predicted * scale:.2f}", f"{predicted * scale / row.seconds - 1:+.0%}")
        )
        scales.setdefault(key, row.seconds / predicted)
        cells = [row.what, row.device, f"{row.seconds:.2f}", f"{predicted:.2f}", f"{predicted / row.seconds - 1:+.0%}"]
        yield f"| {' | '.join([*cells, *after, row.note or 'steps alone', row.source])} |"


def _predicted(model: RecordedModel, row: PublishedRow) -> float:
    assumed = COMPILED if row.compiled else ASSUMED
    return row.steps * model.forecast(Plan(), Machine.parse(row.device), row.steps, assumed).step.seconds
