"""What stale and partial exchange cost in quality, emulated in one process: no ranks, no transport.

    python -m benchmarks.emulation --captions 4 --patches 4 --steps 20 --size 256
    python -m benchmarks.emulation --captions 2 --size 128 --ranks         with real ranks beside it
    python -m benchmarks.emulation --captions 2 --size 128 --ranks --write docs/figures/emulation.md

Prints for each policy the PSNR in dB against the exact run, mean over the captions: of the latents' first three
channels halved and of the decoded images; and how much more than in the first row it is of images, with the standard
error of that. The row `all fresh` tells how exact the emulation is.
`--ranks` generates with real ranks too, where a strategy for the row exists, and prints how far they are from the
emulation; the exit code is 1 where that is more than half a dB, unless both are too near to exact for it to mean
anything. Rows with corrected moments are printed and not judged: where the corrected variance is next to nothing, the
last bit of a moment decides what a whole group becomes, and two runs of the emulation itself can be a dB apart.
`--write` replaces the section of the same setting and rows in a page, and keeps its others.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import Tensor

from benchmarks.emulation import EmulatedPolicy, Emulation
from benchmarks.image_quality import each_psnr_db, psnr_db
from benchmarks.page import write_section
from benchmarks.sensitivity.__main__ import CAPTIONS
from patchpar import ParallelPipeline, Plan
from patchpar.strategies import parse_strategy
from training.scenes import held_out_captions

EDGES = EmulatedPolicy()  # fresh halo and moments
LATE = EmulatedPolicy(halo="stale", moments="corrected", context="all")
ROWS: dict[str, EmulatedPolicy] = {
    "all fresh": EDGES,
    "displaced, corrected moments": LATE,
    "displaced, as published": replace(LATE, published=True),
    "displaced, guarded moments": replace(LATE, moments="guarded"),
    "displaced, stale moments": replace(LATE, moments="stale"),
    "displaced, separate moments": replace(LATE, moments="separate"),
    "displaced, fresh moments": replace(LATE, moments="fresh"),
    "fresh halo, stale moments": replace(LATE, halo="fresh", moments="stale"),
    "fresh halo, corrected moments": replace(LATE, halo="fresh"),
    "stale halo and moments, fresh keys": replace(LATE, moments="stale", context="fresh"),
    "partially conditioned .3": replace(LATE, context="band"),
    "fresh edges, all keys": replace(EDGES, context="all"),
    "fresh edges, all keys, extrapolated": replace(EDGES, context="all", extrapolated=True),
    "fresh edges, all keys, affine": replace(EDGES, context="all", extrapolated=True, correction="affine"),
    "fresh edges, all keys, affine, by owners": replace(
        EDGES, context="all", extrapolated=True, correction="affine", by_owners=True
    ),
    "fresh edges, all keys, linear, by owners": replace(
        EDGES, context="all", extrapolated=True, correction="linear", by_owners=True
    ),
    "fresh edges, all keys, linear": replace(EDGES, context="all", extrapolated=True, correction="linear"),
    "fresh edges, band .3": replace(EDGES, context="band"),
    "fresh edges, band .1 + pooled 4x4": replace(EDGES, context="pooled", pool=4),
    "fresh edges, band .1 + pooled 4x4, extrapolated": replace(EDGES, context="pooled", pool=4, extrapolated=True),
    "fresh edges, band .1 + pooled 4x4, affine": replace(
        EDGES, context="pooled", pool=4, extrapolated=True, correction="affine"
    ),
    "fresh edges, band .1 + pooled 2x2": replace(EDGES, context="pooled", pool=2),
    "fresh edges, partials 1/4": replace(EDGES, context="partials", refresh=4),
    "fresh edges, partials 1/8": replace(EDGES, context="partials", refresh=8),
    "fresh edges, no keys": replace(EDGES, context="none"),
    "displaced, frozen": replace(LATE, frozen=True),
    "naive": EmulatedPolicy(halo="none", moments="separate", context="none", warmup_steps=0),
}

AS_THEY_WERE = "extrapolated=false,correction=none"
STRATEGIES: dict[str, str] = {
    "displaced, corrected moments": "displaced",
    "displaced, as published": "displaced:preset=paper",
    "displaced, guarded moments": "displaced:group_norm=guarded",
    "displaced, stale moments": "displaced:group_norm=stale",
    "displaced, separate moments": "displaced:group_norm=separate",
    "displaced, fresh moments": "displaced:group_norm=sync",
    "partially conditioned .3": "pcpp:fraction=0.3",
    "fresh edges, all keys": f"fresh-edges:{AS_THEY_WERE}",
    "fresh edges, all keys, extrapolated": "fresh-edges:correction=none",
    "fresh edges, all keys, affine": "fresh-edges",
    "fresh edges, all keys, linear": "fresh-edges:correction=linear",
    "fresh edges, band .1 + pooled 4x4": f"fresh-edges:context=pooled,band=0.1,pool=4,{AS_THEY_WERE}",
    "fresh edges, band .1 + pooled 4x4, extrapolated": "fresh-edges:context=pooled,band=0.1,pool=4,correction=none",
    "fresh edges, band .1 + pooled 4x4, affine": "fresh-edges:context=pooled,band=0.1,pool=4",
    "fresh edges, band .1 + pooled 2x2": f"fresh-edges:context=pooled,band=0.1,pool=2,{AS_THEY_WERE}",
    "fresh edges, partials 1/4": "fresh-edges:context=partials,refresh=4",
    "fresh edges, partials 1/8": "fresh-edges:context=partials,refresh=8",
}
NEAR_DB, EXACT_DB = 0.5, 80.0


def captions(count: int) -> list[str]:
    """Captions that the model was not trained on."""
    return [*CAPTIONS, *(text for text, _ in held_out_captions(max(0, count - len(CAPTIONS))))][:count]


def latents(pipe: Any, arguments: argparse.Namespace) -> Tensor:
    """One latent per caption, the same noise on every call."""
    return pipe(
        captions(arguments.captions),
        height=arguments.size,
        width=arguments.size,
        num_inference_steps=arguments.steps,
        guidance_scale=arguments.guidance,
        generator=[torch.Generator().manual_seed(seed) for seed in range(arguments.captions)],
        output_type="latent",
    ).images


@torch.no_grad()
def images(pipe: DiffusionPipeline, latent: Tensor) -> Tensor:
    """Decoded, in 0..1."""
    shift = getattr(pipe.vae.config, "shift_factor", None) or 0.0
    decoded = pipe.vae.decode(latent / pipe.vae.config.scaling_factor + shift).sample
    return (decoded / 2 + 0.5).clamp(0, 1)


def channels(latent: Tensor) -> Tensor:
    """The first three channels halved, from -1..1 to 0..1: this model's latents resemble small images."""
    return (latent[:, :3] / 2).clamp(-1, 1) / 2 + 0.5


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path(__file__).parents[2] / "assets" / "scenes-unet")
    parser.add_argument("--captions", type=int, choices=range(1, 65), default=4, metavar="1..64")
    parser.add_argument("--patches", type=int, default=4)
    parser.add_argument("--size", type=int, default=256, help="side of the image in pixels")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--guidance", type=float, default=3.0)
    parser.add_argument("--warmup", type=int, default=2, help="first steps that are exact; naive has none")
    parser.add_argument("--row", action="append", choices=ROWS, metavar="NAME", help="only this row; may be repeated")
    parser.add_argument("--ranks", action="store_true", help="also with real ranks, one for each patch")
    parser.add_argument("--write", type=Path, help="also write the table to this page, and keep its others")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    return parser.parse_args()


@contextmanager
def real_ranks(arguments: argparse.Namespace) -> Iterator[ParallelPipeline | None]:
    """Workers that generate by strategies, if they were asked for."""
    if not arguments.ranks:
        yield None
        return
    options = {"variant": "fp16", "torch_dtype": torch.float32}
    with ParallelPipeline.from_pretrained(arguments.model, devices=f"cpu:{arguments.patches}", **options) as pipe:
        pipe.set_progress_bar_config(disable=True)
        yield pipe


def by_ranks(pipe: ParallelPipeline, strategy: str, arguments: argparse.Namespace) -> Tensor:
    """The latents of real ranks."""
    options = replace(parse_strategy(strategy), warmup_steps=arguments.warmup)
    pipe.plan = Plan(patch=arguments.patches, strategy=options)
    return latents(pipe, arguments)


def beside(each: Tensor, first: Tensor) -> str:
    """Mean difference and its standard error; nothing for the first row itself, or of one image."""
    if each is first or len(each) < 2:
        return ""
    difference = each - first
    return f"{difference.mean():+.1f} +- {difference.std() / len(each) ** 0.5:.1f}"


def cells(row: str, found: tuple[float, float, str], real: float | None, is_beside: bool) -> str:
    """One line of the table. Raises ValueError where real ranks are not what was emulated."""
    text = f"| {row} | {found[0]:.1f} | {found[1]:.1f} | {found[2]} |"
    if real is None:
        return text + "  |  |" * is_beside
    off = abs(real - found[0])
    if off > NEAR_DB and min(real, found[0]) < EXACT_DB and ROWS[row].moments != "corrected":
        raise ValueError(f"{row}: real ranks are at {real:.2f} dB, their emulation at {found[0]:.2f}")
    return f"{text} {real:.1f} | {off:.3f} |"


OPENING = """# Emulated policies

A UNet is computed as several ranks would, in one process and by the definitions: the embedded model in fp32 on a CPU,
DDIM, held-out captions. PSNR against the exact run of the first three channels of latents, and of decoded images.
`difference`: between real ranks and their emulation. By `python -m benchmarks.emulation`.
"""


def setting(arguments: argparse.Namespace) -> str:
    """What a table is measured with."""
    chosen = f", {len(arguments.row)} policies" if arguments.row else ""
    return (
        f"{arguments.captions} captions, {arguments.size} x {arguments.size}, {arguments.patches} patches, "
        f"{arguments.steps} steps of which {arguments.warmup} are exact, guidance {arguments.guidance:g}{chosen}"
    )


def table(arguments: argparse.Namespace) -> Iterator[str]:
    """Measure, and yield the lines of the table. Raises ValueError where real ranks are not what was emulated."""
    torch.set_num_threads(arguments.threads)
    pipe = DiffusionPipeline.from_pretrained(arguments.model, variant="fp16", torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    exact = latents(pipe, arguments)
    exact_images = images(pipe, exact)
    names = ["policy", "latents, dB", "images, dB", "to the first row"]
    names += ["real ranks, dB", "difference, dB"] * arguments.ranks
    yield f"| {' | '.join(names)} |"
    yield "|---" * len(names) + "|"
    first: Tensor | None = None
    with real_ranks(arguments) as ranks:
        for name in arguments.row or (STRATEGIES if ranks else ROWS):
            policy = ROWS[name]
            if policy.warmup_steps:
                policy = replace(policy, warmup_steps=arguments.warmup)
            with Emulation(pipe.unet, arguments.patches, policy):
                made = latents(pipe, arguments)
            each = each_psnr_db(images(pipe, made), exact_images)
            first = each if first is None else first
            found = psnr_db(channels(made), channels(exact)), each.mean().item(), beside(each, first)
            real = None
            if ranks and name in STRATEGIES:
                real = psnr_db(channels(by_ranks(ranks, STRATEGIES[name], arguments)), channels(exact))
            yield cells(name, found, real, arguments.ranks)


def main() -> None:
    """Measure and print."""
    arguments = parse()
    lines: list[str] = []
    print(f"{setting(arguments)}\n")
    try:
        for line in table(arguments):
            lines.append(line)
            print(line, flush=True)
    except ValueError as error:
        sys.exit(f"error: {error}")
    if arguments.write:
        write_section(OPENING, setting(arguments), "\n".join(lines), arguments.write)


if __name__ == "__main__":
    main()
