"""How long a large picture takes on so many ranks, from what an evaluation, a decode and a PNG take on one core.

    steps above the switch   the longest rank's evaluations of patches
    steps below it           the longest rank's evaluations of windows and of what leads them
    then                     the decode, shared by rows, and the PNG, by bands

Predicted, not run: exchange is left out (its bytes are in docs/structure-guidance.md), and a core a rank is assumed.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, fields
from statistics import median
from typing import Any

import diffusers
import torch
from PIL import Image

from patchpar import StructureGuidance
from patchpar.cli.png import write_png
from patchpar.highres.geometry import units_of
from patchpar.highres.work import evaluations_of, share_out
from patchpar.models.folder import embedded_model

STEPS, NATIVE, CELL, TURNS = 50, 256, 4, 3
RANKS = (1, 2, 4, 8)
DECODED = 1.99 / 2  # of the ideal, measured with two ranks: docs/figures/vae.md


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """Of one evaluation of both guidance branches and of one, of a decode, and of a PNG."""

    both: float
    one: float
    decode: float
    png: float


def measured(scale: int) -> Seconds:
    """On this machine, one thread, with the embedded model: medians."""
    pipe = diffusers.DiffusionPipeline.from_pretrained(embedded_model(), variant="fp16").to(torch.float32)
    cells = NATIVE // CELL
    latent = torch.randn(1, 4, scale * cells, scale * cells)
    picture = Image.fromarray(torch.randint(0, 8, (scale * NATIVE, scale * NATIVE, 3), dtype=torch.uint8).numpy())
    with torch.no_grad():
        return Seconds(
            both=_median(lambda: _evaluate(pipe, 2, cells)),
            one=_median(lambda: _evaluate(pipe, 1, cells)),
            decode=_median(lambda: pipe.vae.decode(latent)),
            png=_median(lambda: write_png(picture, io.BytesIO(), cores=1)),
        )


def _evaluate(pipe: Any, branches: int, side: int) -> None:
    config = pipe.unet.config
    pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
    added = {"text_embeds": torch.zeros(branches, pooled), "time_ids": torch.zeros(branches, 6)}
    text = torch.zeros(branches, 77, config.cross_attention_dim)
    pipe.unet(torch.zeros(branches, 4, side, side), 500, encoder_hidden_states=text, added_cond_kwargs=added)


def _median(call: Callable[[], object]) -> float:
    """Of the processor, which is what one thread takes on a core of its own; the first turn warms up."""
    taken = []
    for _ in range(TURNS + 1):
        start = time.process_time()
        call()
        taken.append(time.process_time() - start)
    return median(taken[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Seconds of a picture of 50 steps, both branches of guidance, by what takes them."""

    above: float
    below: float
    decode: float
    png: float

    @property
    def all(self) -> float:
        """Together."""
        return sum(astuple(self))


def predicted(strategy: StructureGuidance, seconds: Seconds, scale: int, ranks: int) -> Spent:
    """A picture at `scale` times the native side on so many ranks."""
    method = strategy.method
    tiling = {"overlap": strategy.overlap, "margin": strategy.margin}
    patches, windows = units_of((scale * NATIVE,) * 2, (NATIVE,) * 2, CELL, **tiling)
    follows = method.guidance.strength(0) == 1 and method.guidance.decay == "none" and not method.guidance.masked
    before = round(STEPS * (1 - method.switch))
    larger = (1 + (strategy.margin or 0)) ** 2  # evaluations grow with the area of a window
    return Spent(
        above=before * _step(1 if follows else patches, seconds, ranks),
        below=(STEPS - before) * larger * _step(windows + (method.kept > 0), seconds, ranks),
        decode=seconds.decode / (1 if ranks == 1 else ranks * DECODED),
        png=seconds.png / ranks,
    )


def _step(patches: int, seconds: Seconds, ranks: int) -> float:
    costs = {1: seconds.one, 2: seconds.both}
    return max(
        sum(costs[len(call.branches)] for call in evaluations_of(units, 2)) for units in share_out(patches, 2, ranks)
    )


def table(strategies: dict[str, StructureGuidance], scale: int) -> Iterator[str]:
    """Seconds on one rank, how many times as fast on more, and where most ranks gain less than there are of them."""
    seconds = measured(scale)
    evaluations = f"An evaluation of both branches takes {seconds.both:.3f} s, of one {seconds.one:.3f} s"
    yield f"{evaluations}, the decode {seconds.decode:.1f} s, the PNG {seconds.png:.2f} s."
    yield ""
    parts = ", ".join(field.name for field in fields(Spent))
    several = " | ".join(f"{ranks} ranks" for ranks in RANKS[1:])
    yield f"| {scale} x {scale} | 1 rank | {several} | {RANKS[-1]} ranks: {parts} |"
    yield "|---|---|" + "---|" * len(RANKS)
    for name, strategy in strategies.items():
        taken = [predicted(strategy, seconds, scale, ranks) for ranks in RANKS]
        faster = " | ".join(f"{taken[0].all / each.all:.2f}x" for each in taken[1:])
        gains = ", ".join(f"{a / b:.1f}x" for a, b in zip(astuple(taken[0]), astuple(taken[-1]), strict=True))
        yield f"| {name} | {taken[0].all:.0f} s | {faster} | {gains} |"
