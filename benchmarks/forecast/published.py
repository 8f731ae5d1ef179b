"""Published times of one device beside forecasts from the catalogue, and after one of the rows has calibrated it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.forecast.encoders import of_flux, of_sd15, of_sdxl, with_encoders
from benchmarks.forecast.models import flux, qwen, sd15, sdxl, with_vae
from benchmarks.forecast.recorded import RecordedModel
from patchpar.pipeline.planner.tape_recorder import DECODE, ENCODE
from patchpar.plan.plan import Plan
from patchpar.plan.replay.machine import Machine
from patchpar.plan.replay.price import ASSUMED, BLOCKS_COMPILED, COMPILED, CostAssumptions


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRow:
    """Seconds of so many steps on one device, with such `costs`. `note`: what is in it beside them.

    `decoding`: costs of the VAE, which not all compile with the denoiser.
    """

    what: str
    model: str
    device: str
    steps: int
    seconds: float
    source: str
    costs: CostAssumptions = ASSUMED
    decoding: CostAssumptions = ASSUMED
    note: str = ""


MODELS = {
    "sd15": with_encoders(with_vae(sd15, 4), of_sd15),
    "sdxl": with_encoders(with_vae(sdxl, 4), of_sdxl),
    "flux": with_encoders(with_vae(flux, 16), of_flux),
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
FLASH_1 = 110 / 187
"""Of the attention assumed on an A100: torch before 2.2 has FlashAttention 1, which reaches 110 TFLOP/s there by
the figures of its successor (Dao 2023, arXiv:2307.08691), where 187 are assumed."""
PNDM = 51
"""Calls of the denoiser in 50 steps of SD 1.5's own scheduler, which evaluates one step twice."""
OLD, OLD_COMPILED = (replace(costs, attention_part=FLASH_1) for costs in (ASSUMED, COMPILED))
ROWS = (
    PublishedRow(
        what="SD 1.5, 512 x 512, SDPA",
        model="sd15",
        device="A100",
        steps=PNDM,
        seconds=1.604,
        source=FAL,
        costs=OLD,
        note=WHOLE,
    ),
    PublishedRow(
        what="SD 1.5, 512 x 512, compiled",
        model="sd15",
        device="A100",
        steps=PNDM,
        seconds=1.354,
        source=FAL,
        costs=OLD_COMPILED,
        note=WHOLE,
    ),
    PublishedRow(
        what="SD 1.5, 512 x 512, compiled, channels last",
        model="sd15",
        device="A100",
        steps=PNDM,
        seconds=1.058,
        source=FAL,
        costs=replace(OLD_COMPILED, channels_last=True),
        note=WHOLE,
    ),
    PublishedRow(
        what="SDXL, 1024 x 1024, SDPA",
        model="sdxl",
        device="A100",
        steps=50,
        seconds=5.933,
        source=FAL,
        costs=OLD,
        note=WHOLE,
    ),
    PublishedRow(
        what="SDXL, 1024 x 1024, compiled",
        model="sdxl",
        device="A100",
        steps=50,
        seconds=5.246,
        source=FAL,
        costs=OLD_COMPILED,
        note=WHOLE,
    ),
    PublishedRow(
        what="SDXL, 1024 x 1024, compiled, channels last",
        model="sdxl",
        device="A100",
        steps=50,
        seconds=5.132,
        source=FAL,
        costs=replace(OLD_COMPILED, channels_last=True),
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
        what="SDXL, 1024 x 1024, compiled, channels last",
        model="sdxl",
        device="A100",
        steps=30,
        seconds=2.54,
        source=DIFFUSERS,
        costs=replace(COMPILED, channels_last=True),
        decoding=replace(COMPILED, channels_last=True),
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
        decoding=COMPILED,
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
    """Yield the table. The longest row of a device in a source, thus of the same software, calibrates the others."""
    yield (
        "Whole calls are predicted, with encoders, safety checker and decoding in half precision, from published rates "
        "and the assumptions of the [simulator](../simulator.md#what-is-assumed). The parts of a peak that products "
        "reach are measurements of others, or follow from the steps in batches below; what is assumed of convolutions, "
        "attention and caches was chosen with most of these rows in sight: expect larger errors for others. Of the "
        "software of a row its attention kernel, the layout of its maps and the calls of its scheduler are known. "
        "`calibrated`: kernels of a device scaled by its longest row in the same source, thus with the same software, "
        "which waits for no launches; of that row itself it is left out."
    )
    yield ""
    yield "| call | device | published s | predicted s | error | calibrated | error | published are | source |"
    yield "|---|---|---|---|---|---|---|---|---|"
    predicted = {row: _predicted(models[row.model], row) for row in rows}
    longest = {(row.device, row.source): row for row in sorted(rows, key=lambda row: row.seconds)}
    errors: dict[str, list[float]] = {"alone": [], "calibrated": []}
    for row in rows:
        best, found = longest[row.device, row.source], predicted[row]
        cells = [row.what, row.device, f"{row.seconds:.2f}", f"{found:.2f}", f"{found / row.seconds - 1:+.0%}", "", ""]
        errors["alone"].append(found / row.seconds - 1)
        if row != best:
            scaled = replace(row.costs, scale=best.seconds / predicted[best])
            after = _predicted(models[row.model], replace(row, costs=scaled))
            cells[-2:] = [f"{after:.2f}", f"{after / row.seconds - 1:+.0%}"]
            errors["calibrated"].append(after / row.seconds - 1)
        yield f"| {' | '.join([*cells, row.note or 'steps alone', row.source])} |"
    yield ""
    yield (
        f"{_within(errors['alone'], 0.2)} from the catalogue alone are within 20 %; "
        f"{_within(errors['calibrated'], 0.1)} after calibration are within 10 %."
    )


def _within(errors: Sequence[float], limit: float) -> str:
    return f"{sum(abs(each) <= limit for each in errors)} of {len(errors)} rows"


def _predicted(model: RecordedModel, row: PublishedRow) -> float:
    """Return the seconds of a row: its steps, encoders in eager code, and decoding at costs of its own."""
    machine = Machine.parse(row.device)
    costs = {"": row.costs, ENCODE: ASSUMED, DECODE: row.decoding}
    found = {
        name: model.forecast(Plan(), machine, row.steps, replace(each, scale=row.costs.scale))
        for name, each in costs.items()
    }
    whole = found.pop("")
    around = {name: each.phases[name].seconds for name, each in found.items() if name in whole.phases}
    return whole.seconds + sum(seconds - whole.phases[name].seconds for name, seconds in around.items())
