"""Published times of one device beside forecasts from the catalogue, and after one of the rows has calibrated it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.forecast.models import flux, qwen, sd15, sdxl, with_vae
from benchmarks.forecast.recorded import RecordedModel
from patchpar.plan.plan import Plan
from patchpar.plan.replay.machine import Machine
from patchpar.plan.replay.price import ASSUMED, BLOCKS_COMPILED, COMPILED, CostAssumptions


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRow:
    """Seconds of so many steps on one device, with such `costs`. `note`: what is in it beside them."""

    what: str
    model: str
    device: str
    steps: int
    seconds: float
    source: str
    costs: CostAssumptions = ASSUMED
    note: str = ""


MODELS = {
    "sd15": with_vae(sd15, 4),
    "sdxl": with_vae(sdxl, 4),
    "flux": with_vae(flux, 16),
    "qwen-512": qwen(512),
    "qwen-1536": qwen(1536),
}
FASTER = "[flux-faster](https://github.com/xlite-dev/flux-faster)"
DIFFUSERS = "[diffusers](https://huggingface.co/docs/diffusers/tutorials/fast_diffusion)"
FAL = "[fal-ai](https://github.com/fal-ai/stable-diffusion-benchmarks)"
OMNI = (
    "[vllm-omni #2707](https://github.com/vllm-project/vllm-omni/issues/2707), which "
    "[compiles blocks](https://docs.vllm.ai/projects/vllm-omni/en/latest/user_guide/diffusion/regional_compilation/)"
)
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
        costs=COMPILED,
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
        costs=COMPILED,
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
        costs=COMPILED,
        note=WHOLE,
    ),
    PublishedRow(
        what="Qwen-Image, 512 x 512, guided, blocks compiled",
        model="qwen-512",
        device="H100",
        steps=20,
        seconds=2.32,
        source=OMNI,
        costs=BLOCKS_COMPILED,
    ),
    PublishedRow(
        what="Qwen-Image, 1536 x 1536, guided, blocks compiled",
        model="qwen-1536",
        device="H100",
        steps=35,
        seconds=23.19,
        source=OMNI,
        costs=BLOCKS_COMPILED,
    ),
)


def lines(models: Mapping[str, RecordedModel], rows: Sequence[PublishedRow] = ROWS) -> Iterator[str]:
    """Yield the table. The first row of a device calibrates its other rows."""
    yield (
        "Denoising and decoding are predicted, without encoders, from published rates and the assumptions of the "
        "[simulator](../simulator.md#what-is-assumed). The parts of a peak that products reach are measurements of "
        "others; what is assumed of convolutions, attention and caches was chosen with these rows in sight: expect "
        "larger errors for others. `calibrated`: times of a device scaled by its first row; of that row itself it is "
        "left out."
    )
    yield ""
    yield "| call | device | published s | predicted s | error | calibrated | error | published are | source |"
    yield "|---|---|---|---|---|---|---|---|---|"
    scales: dict[str, float] = {}
    for row in rows:
        predicted = _predicted(models[row.model], row)
        scale = scales.get(row.device)
        after = (
            ("", "") if scale is None else (f"{predicted * scale:.2f}", f"{predicted * scale / row.seconds - 1:+.0%}")
        )
        scales.setdefault(row.device, row.seconds / predicted)
        cells = [row.what, row.device, f"{row.seconds:.2f}", f"{predicted:.2f}", f"{predicted / row.seconds - 1:+.0%}"]
        yield f"| {' | '.join([*cells, *after, row.note or 'steps alone', row.source])} |"


def _predicted(model: RecordedModel, row: PublishedRow) -> float:
    return model.forecast(Plan(), Machine.parse(row.device), row.steps, row.costs).seconds
