"""Published times of one device beside forecasts from the catalogue, and after one of the rows has calibrated it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from benchmarks.forecast.fp8 import with_fp8
from benchmarks.forecast.published_rows import ROWS, PublishedRow
from benchmarks.forecast.recorded import RecordedModel
from patchpar.pipeline.planner.forecast import Forecast
from patchpar.pipeline.planner.tape_recorder import DECODE, ENCODE
from patchpar.plan.plan import Plan
from patchpar.plan.replay.machine import Machine
from patchpar.plan.replay.price import ASSUMED

WITHOUT_WAITS = "https://github.com/huggingface/diffusers/pull/9475"
ASKS_THE_DEVICE = (
    "https://github.com/vllm-project/vllm-omni/blob/main/vllm_omni/diffusion/attention/backends/flash_attn.py"
)
SEEN = "https://github.com/vllm-project/vllm-omni/issues/6862"
OTHER_VERSION = "https://github.com/vllm-project/vllm-omni/issues/3266"
TUNED = "https://github.com/huggingface/diffusion-fast/blob/main/utils/pipeline_utils.py"
A100S = "https://github.com/chengzeyi/stable-fast/issues/39"
OF_FAL = "https://github.com/chengzeyi/stable-fast/issues/2"
RTX4090S = "https://github.com/chengzeyi/stable-fast"
LEFT_IN_LAYOUT = "https://github.com/pytorch/pytorch/pull/114600"
TORCH = (
    "SD 1.5, compiled, is predicted too short with torch 2.1. On the same A100 TensorRT takes 0.82 s for that image, "
    "and that row is within the limit, so that what is missing is of the software and not of the device. Compiled "
    "steps of that torch depend on the host: other A100s made "
    f"[37]({A100S}) and [51]({OF_FAL}) of them in a second, and RTX 4090s [33.5]({RTX4090S}) and 49.8 (below), where "
    "graphs that other software captured of the same network made 53 and 62 beside the slower two. What the process "
    "took is not published. "
    "It was also looked "
    "for in three places. Convolutions of small maps by one processor for each tile, of 64 x 64 or more, would halve "
    "the error of the A100's step of one image below, and make the RTX 4090's a third too long. 1,500 cycles more for "
    "each kernel change the steps by 2 %. The scheduler's waits for the device take "
    f"[no time that others could measure]({WITHOUT_WAITS}). Maps in the other layout, in which this torch "
    f"[leaves these networks]({LEFT_IN_LAYOUT}), cost 2.5 ms of a step by the law, "
    "and 6 by these rows, while for SDXL it is 3 and 2."
)
OTHER_KERNELS = (
    "Two rows are within 10 % before calibration, and not after it. SDXL by diffusers is "
    f"[compiled with max-autotune]({TUNED}), which takes the fastest of many kernels for each product; the eager row "
    "that calibrates it has those of a library. TensorRT has kernels of its own for each model: those of SDXL are "
    "faster than predicted, and those of SD 1.5 slower."
)
CALLS_OF_BLOCKS = 2 * 60
"""In a step of Qwen-Image, for both predictions."""


def lines(models: Mapping[str, RecordedModel], rows: Sequence[PublishedRow] = ROWS) -> Iterator[str]:
    """Yield the table. The longest row of a device in a source, thus of the same software, calibrates the others."""
    yield (
        "Whole calls are predicted, with encoders, safety checker and decoding in half precision, from published rates "
        "and the assumptions of the [simulator](../simulator.md#what-is-assumed); diffusers enlarges the maps of "
        "SDXL's VAE in fp32 where it is given in fp16. The parts of a peak that products "
        "reach are measurements of others, or follow from the steps in batches below; what is assumed of convolutions, "
        "attention and caches was chosen with most of these rows in sight: expect larger errors for others. Of the "
        "software of a row its attention kernel, the layout of its maps, the calls of its scheduler and whether its "
        "torch has one kernel for an RMS norm (2.9 and newer, or compiled) are known. "
        "`calibrated`: kernels of a device scaled by its longest row in the same source, thus with the same software, "
        "which waits for no launches; of that row itself it is left out. Products of FP8 have twice the rate of half "
        "precision."
    )
    yield ""
    yield "| call | device | published s | predicted s | error | calibrated | error | published are | source |"
    yield "|---|---|---|---|---|---|---|---|---|"
    predicted = {row: predicted_seconds(models[row.model], row) for row in rows}
    longest = {(row.device, row.source): row for row in sorted(rows, key=lambda row: row.seconds)}
    errors: dict[str, list[float]] = {"alone": [], "calibrated": []}
    for row in rows:
        best, found = longest[row.device, row.source], predicted[row]
        cells = [
            row.what,
            row.device,
            seconds_cell(row.seconds),
            seconds_cell(found),
            f"{found / row.seconds - 1:+.0%}",
            "",
            "",
        ]
        errors["alone"].append(found / row.seconds - 1)
        if row != best:
            scaled = replace(row.costs, scale=best.seconds / predicted[best])
            after = predicted_seconds(models[row.model], replace(row, costs=scaled))
            cells[-2:] = [seconds_cell(after), f"{after / row.seconds - 1:+.0%}"]
            errors["calibrated"].append(after / row.seconds - 1)
        yield f"| {' | '.join([*cells, row.note or 'steps alone', row.source])} |"
    yield ""
    yield (
        f"{within(errors['alone'], 0.2)} from the catalogue alone are within 20 %; "
        f"{within(errors['calibrated'], 0.1)} after calibration are within 10 %."
    )
    yield ""
    yield TORCH
    yield ""
    yield OTHER_KERNELS
    yield from _of_the_process([row for row in rows if row.model.startswith("qwen")], predicted)


def _of_the_process(rows: Sequence[PublishedRow], predicted: Mapping[PublishedRow, float]) -> Iterator[str]:
    """Yield what the steps of Qwen-Image, each of two calls of all blocks, take beside what is predicted."""
    missing = {row: 1e3 * (row.seconds - predicted[row]) / row.steps for row in rows}
    if not missing:
        return
    of_steps = " and ".join(f"{each:.0f} ms ({row.what.split(', ')[1]})" for row, each in missing.items())
    of_blocks = " and ".join(f"{each / CALLS_OF_BLOCKS:.2f}" for each in missing.values())
    yield ""
    yield (
        f"Steps of Qwen-Image take {of_steps} more than predicted: {of_blocks} ms for each call of a block. In each "
        "attention this software asks the device "
        f"[whether the mask leaves something out]({ASKS_THE_DEVICE}); until the answer is here nothing is launched. "
        f"[Others have seen]({SEEN}) the device idle there. Compiled code ends there too, and the process checks "
        "the guards of the rest before it launches anything. Both are in the forecasts, once for each attention; the "
        "functions between the block and its attention kernel, which are compiled apart then, are not. "
        f"[A later version]({OTHER_VERSION}) takes 3.03 s for the smaller image on an H200, where the one before took "
        "2.17 s."
    )


def seconds_cell(seconds: float) -> str:
    """Return what a cell of the page has."""
    return f"{seconds:.2f}" if seconds >= 1 else f"{seconds:.4f}"


def within(errors: Sequence[float], limit: float) -> str:
    """Return how many of the relative errors are within the limit."""
    return f"{sum(abs(each) <= limit for each in errors)} of {len(errors)} rows"


def predicted_seconds(model: RecordedModel, row: PublishedRow) -> float:
    """Return the seconds of a row: its steps, and encoders in eager code and decoding, of one rank; or of a phase."""
    machine = with_fp8(Machine.parse(row.device))
    if row.phase:
        return model.forecast(Plan(), machine, row.steps, row.costs).phases[row.phase].seconds
    seconds = _seconds_of_steps(model.forecast(Plan.parse(row.plan), machine, row.steps, row.costs))
    for name, costs in ((ENCODE, ASSUMED), (DECODE, row.decoding)):
        found = model.forecast(Plan(), machine, row.steps, replace(costs, scale=row.costs.scale))
        seconds += found.phases[name].seconds if name in found.phases else 0.0
    return seconds


def _seconds_of_steps(found: Forecast) -> float:
    return found.seconds - sum(found.phases[name].seconds for name in (ENCODE, DECODE) if name in found.phases)
