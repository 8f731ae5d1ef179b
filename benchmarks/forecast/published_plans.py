"""Published times of several devices, by other software, beside forecasts of our plans that divide a model alike.

Nothing of the catalogue and of what is assumed was chosen by these rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from benchmarks.forecast.encoders import of_flux, with_encoders
from benchmarks.forecast.models import flux, flux_schnell, hunyuan_video, qwen, wide_sdxl, with_vae
from benchmarks.forecast.published import predicted_seconds, seconds_cell, within
from benchmarks.forecast.published_rows import MODELS as OF_ONE_DEVICE
from benchmarks.forecast.published_rows import SECOND, WHOLE, PublishedRow
from benchmarks.forecast.recorded import RecordedModel
from patchpar.plan.replay.price import AS_GRAPH, ASSUMED, BLOCKS_COMPILED

MODELS = {
    "flux": OF_ONE_DEVICE["flux"],
    "flux-before-2.9": OF_ONE_DEVICE["flux-before-2.9"],
    "flux-steps": flux,
    "sdxl-wide": with_vae(wide_sdxl, 4),
    "schnell-1024": with_encoders(with_vae(flux_schnell(1024), 16), of_flux),
    "schnell-2048": with_encoders(with_vae(flux_schnell(2048), 16), of_flux),
    "qwen-1024": qwen(1024),
    "qwen-2048": qwen(2048),
    "hunyuan-720": hunyuan_video(720, 1280),
    "hunyuan-960": hunyuan_video(960, 960),
}
XDIT = "https://github.com/xdit-project/xDiT/blob/main/docs/performance"
XDIT_FLUX = f"[xDiT]({XDIT}/flux.md)"
XDIT_HUNYUAN = f"[xDiT]({XDIT}/hunyuanvideo.md)"
DIFFUSERS = "[diffusers](https://huggingface.co/docs/diffusers/main/en/training/distributed_inference)"
DISTRIFUSION = "[DistriFusion, figure 1](https://arxiv.org/abs/2402.19481)"
OMNI = (
    "[vllm-omni](https://github.com/vllm-project/vllm-omni/blob/00b5a4ce487aa57fb96cb50364b2582240f42be9/"
    "docs/user_guide/diffusion/parallelism_acceleration.md)"
)
PLAN = "patch={},strategy=exact:{}"
ULYSSES, RING, BOTH = "ulysses={}", "attention=ring", "ulysses=2:attention=ring"
BY_PYTHON = "launched by Python"
LAUNCHED: dict[str, Any] = {"launch": BLOCKS_COMPILED.launch, "region": BLOCKS_COMPILED.region, "fused": True}
"""xDiT compiles the transformer's forward by torch.compile in its default mode, which has no graphs, and nothing else:
https://github.com/xdit-project/xDiT/blob/main/xfuser/model_executor/pipelines/base_pipeline.py. Its attention between
devices is not compiled, so that compiled code begins once in each block."""

OF_TORCH = 15e-6
"""Seconds that the process takes to begin a collective."""


def _ulysses(ranks: int) -> str:
    return PLAN.format(ranks, ULYSSES.format(ranks)) if ranks > 1 else "single"


def _rows(common: PublishedRow, seconds: Mapping[str, float]) -> list[PublishedRow]:
    return [replace(common, plan=plan, seconds=each) for plan, each in seconds.items()]


def _of_xdit() -> Iterator[PublishedRow]:
    """FLUX on H100s, eager and compiled; HunyuanVideo on three kinds of cards."""
    plans = ["single", _ulysses(2), PLAN.format(2, RING), _ulysses(4), PLAN.format(4, RING), PLAN.format(4, BOTH)]
    common = PublishedRow(
        what="FLUX.1 dev, 1024 x 1024, eager",
        model="flux-before-2.9",
        device="4xH100-nvlink",
        steps=28,
        seconds=0.0,
        source=XDIT_FLUX,
        costs=SECOND,
        note=f"{WHOLE}, {BY_PYTHON}",
    )
    yield from _rows(common, dict(zip(plans, (6.71, 4.38, 5.31, 4.24, 5.11, 5.19), strict=True)))
    compiled = replace(
        common,
        what="FLUX.1 dev, 1024 x 1024, compiled",
        model="flux",
        costs=replace(SECOND, **LAUNCHED),
        note=WHOLE,
    )
    yield from _rows(compiled, dict(zip(plans, (4.30, 2.68, 2.60, 1.63, 1.98, 1.80), strict=True)))
    for device, costs, wide, square in (
        ("8xH100-nvlink", SECOND, (1904.08, 925.04, 514.08, 337.58), (1735.01, 934.09, 645.45, 367.02)),
        ("8xH20-nvlink", ASSUMED, (6639.17, 3400.55, 1762.86, 940.97), (6621.46, 3400.55, 2310.48, 1214.67)),
        ("8xL20-pcie4", ASSUMED, (6043.88, 3271.44, 2080.05), (6039.08, 3260.62, 2284.74)),
    ):
        of_video = replace(common, device=device, steps=50, source=XDIT_HUNYUAN, costs=costs, note=WHOLE)
        for name, what, ranks, seconds in (
            ("hunyuan-720", "1280 x 720", (1, 2, 4, 8), wide),
            ("hunyuan-960", "960 x 960", (1, 2, 3, 6), square),
        ):
            each = replace(of_video, what=f"HunyuanVideo, {what}, 129 frames, eager", model=name)
            yield from _rows(each, dict(zip(map(_ulysses, ranks), seconds, strict=False)))


def _of_schnell() -> Iterator[PublishedRow]:
    """Calls of four steps, compiled, of which the text names the plan. xDiT's examples give T5 256 tokens."""
    common = PublishedRow(
        what="FLUX.1 schnell, 1024 x 1024, compiled",
        model="schnell-1024",
        device="8xA100-nvlink",
        steps=4,
        seconds=0.82,
        source=XDIT_FLUX,
        costs=replace(ASSUMED, **LAUNCHED),
        note=WHOLE,
        plan=_ulysses(8),
    )
    yield common
    yield replace(common, what="FLUX.1 schnell, 2048 x 2048, compiled", model="schnell-2048", seconds=2.4)
    yield replace(common, device="4xL40-pcie4", seconds=1.41, plan=PLAN.format(4, BOTH))


def _of_omni() -> Iterator[PublishedRow]:
    """Qwen-Image with guidance; one device is diffusers."""
    common = PublishedRow(
        what="Qwen-Image, 1024 x 1024, guided, eager",
        model="qwen-1024",
        device="4xA100-nvlink",
        steps=50,
        seconds=0.0,
        source=OMNI,
        note=f"with encoder and VAE, which are not predicted, {BY_PYTHON}",
    )
    plans = ["single", PLAN.format(2, RING), PLAN.format(4, RING), PLAN.format(4, BOTH)]
    yield from _rows(common, dict(zip(plans, (45.2, 29.9, 23.3, 24.3), strict=True)))
    wide = replace(
        common,
        what="Qwen-Image, 2048 x 2048, guided, eager",
        model="qwen-2048",
        device="8xH800-nvlink",
        costs=SECOND,
        note="with encoder and VAE, which are not predicted",
    )
    yield from _rows(wide, dict(zip(map(_ulysses, (1, 2, 4)), (112.5, 65.2, 39.6), strict=True)))
    yield replace(wide, plan=_ulysses(8), seconds=30.8, note=f"{wide.note}, {BY_PYTHON}")


def _of_distrifusion() -> Iterator[PublishedRow]:
    """SDXL on the A100s of the paper, with four exact steps at first, and of four devices two for each branch.

    Its code captures steps as CUDA graphs unless told otherwise: mit-han-lab/distrifuser, distrifuser/utils.py.
    """
    common = PublishedRow(
        what="SDXL, 1280 x 1920, guided, graphs",
        model="sdxl-wide",
        device="8xA100-nvlink",
        steps=50,
        seconds=12.3,
        source=DISTRIFUSION,
        costs=AS_GRAPH,
        note="steps, and VAE",
    )
    yield common
    yield replace(common, plan="cfg=2,patch=2,strategy=displaced:preset=paper:warmup_steps=4", seconds=4.16)


def _of_diffusers() -> Iterator[PublishedRow]:
    """Steps of FLUX on four cards. Its rings gather all keys at once, unless they are asked to pass them on."""
    plans = [_ulysses(4), "patch=4", PLAN.format(4, "ulysses=2")]
    for device, seconds, note in (
        ("4xH100-nvlink", (0.13342, 0.26153, 0.22137), BY_PYTHON),
        ("4xL20-pcie4", (0.28107, 0.35134, 0.32437), ""),
        ("4xRTX4090-pcie4", (0.25907, 0.33898, 0.32154), "cards of 48 GB"),
    ):
        common = PublishedRow(
            what="FLUX.1 dev, 1024 x 1024, a step",
            model="flux-steps",
            device=device,
            steps=1,
            seconds=0.0,
            source=DIFFUSERS,
            note=note,
        )
        yield from _rows(common, dict(zip(plans, seconds, strict=True)))


def _of_others(row: PublishedRow) -> PublishedRow:
    """What others' code does at an exchange is not known: a call of torch.distributed, where it is launched."""
    return replace(row, costs=replace(row.costs, message=min(row.costs.message, OF_TORCH)))


ROWS = tuple(map(_of_others, (*_of_xdit(), *_of_schnell(), *_of_omni(), *_of_distrifusion(), *_of_diffusers())))


INTRO = (
    "By other software that divides tokens between devices as these plans do: Ulysses, rings, and both; rings of "
    "diffusers gather all keys at once, unless they are asked to pass them on. Nothing of "
    "the catalogue and of what is assumed was chosen by these rows; attention on H100s is that of FlashAttention 2 "
    "where the call of one device is. Encoders and VAE run on one device. Rows that are launched by Python wait "
    "for the process: others' code launches other kernels than ours. How others' rings merge their parts is not "
    "known to the forecasts, which have one kernel for it. Whether the RTX 4090s with 48 GB reach one another "
    "directly is not published; in the forecasts messages go through the host's memory. xDiT compiles the "
    "transformer in torch.compile's default mode, which has no graphs; DistriFusion captures its steps as graphs."
)
OFF = (
    "Predictions are too short where little work is left to each of several fast devices: eight A100s that make four "
    "steps of FLUX.1 schnell, rings of four H100s, eight ranks of videos, and what Python launches for several "
    "devices. Between exchanges others' code has work of the process that forecasts do not have, such as breaks of a "
    "compiled graph at each attention, or the sends of a ring; which of it takes how long is not published. They are "
    "too long for RTX 4090s with 48 GB."
)


def lines(models: Mapping[str, RecordedModel], rows: Sequence[PublishedRow] = ROWS) -> Iterator[str]:
    """Yield the table. Speed-ups are over the row of one device of the same call, machine and source."""
    yield INTRO
    yield ""
    headings = ("call", "machine", "plan", "published s", "predicted s", "error", "speed-up", "predicted")
    yield f"| {' | '.join((*headings, 'published are', 'source'))} |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    predicted = {row: predicted_seconds(models[row.model], row) for row in rows}
    alone = {_call_of(row): row for row in rows if row.plan == "single"}
    errors: dict[bool, list[float]] = {True: [], False: []}
    ratios: dict[bool, list[float]] = {True: [], False: []}
    for row in rows:
        found, one, speed_ups = predicted[row], alone.get(_call_of(row)), ["", ""]
        errors[BY_PYTHON in row.note].append(found / row.seconds - 1)
        if one is not None and one != row:
            gained = one.seconds / row.seconds, predicted[one] / found
            speed_ups = [f"{each:.2f}x" for each in gained]
            ratios[BY_PYTHON in row.note].append(gained[1] / gained[0] - 1)
        cells = [row.what, row.device, f"`{row.plan}`", seconds_cell(row.seconds), seconds_cell(found)]
        cells += [f"{found / row.seconds - 1:+.0%}", *speed_ups, row.note or "steps alone", row.source]
        yield f"| {' | '.join(cells)} |"
    yield ""
    yield (
        f"Without those that wait for Python {within(errors[False], 0.2)} are within 20 %, half of them within "
        f"{median(map(abs, errors[False])):.0%}; of their speed-ups {within(ratios[False], 0.2)} are. Of those that "
        f"wait, {within(errors[True], 0.2)} are."
    )
    yield ""
    yield OFF


def _call_of(row: PublishedRow) -> tuple[str, str, str]:
    return row.what, row.device, row.source
