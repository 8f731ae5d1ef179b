"""What stale and partial exchange cost in quality, emulated in one process: no ranks, no transport.

    python -m benchmarks.emulation --captions 4 --places 4 --steps 20 --size 256

Prints for each treatment the PSNR in dB against the exact run, mean over the captions: of the latents' first three
channels halved and of the decoded pictures. The first row has everything fresh and tells how exact the emulation is.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from diffusers import DiffusionPipeline
from torch import Tensor

from benchmarks.emulation import Emulation, Treatment
from benchmarks.sensitivity import CAPTIONS

EDGES = Treatment()  # fresh halo and moments
LATE = Treatment(halo="stale", moments="corrected", context="all")
ROWS: dict[str, Treatment] = {
    "all fresh": EDGES,
    "displaced, corrected moments": LATE,
    "displaced, stale moments": replace(LATE, moments="stale"),
    "displaced, separate moments": replace(LATE, moments="separate"),
    "displaced, fresh moments": replace(LATE, moments="fresh"),
    "fresh halo, stale moments": replace(LATE, halo="fresh", moments="stale"),
    "fresh halo, corrected moments": replace(LATE, halo="fresh"),
    "stale halo and moments, fresh keys": replace(LATE, moments="stale", context="fresh"),
    "partially conditioned .3": replace(LATE, context="band"),
    "fresh edges, all keys": replace(EDGES, context="all"),
    "fresh edges, band .3": replace(EDGES, context="band"),
    "fresh edges, band .1 + pooled 4x4": replace(EDGES, context="pooled", pool=4),
    "fresh edges, band .1 + pooled 2x2": replace(EDGES, context="pooled", pool=2),
    "fresh edges, partials 1/4": replace(EDGES, context="partials", refresh=4),
    "fresh edges, partials 1/8": replace(EDGES, context="partials", refresh=8),
    "fresh edges, no keys": replace(EDGES, context="none"),
    "displaced, frozen": replace(LATE, frozen=True),
    "naive": Treatment(halo="none", moments="separate", context="none", warmup_steps=0),
}


def latents(pipe: DiffusionPipeline, arguments: argparse.Namespace) -> Tensor:
    """One latent per caption, the same noise on every call."""
    return pipe(
        list(CAPTIONS[: arguments.captions]),
        height=arguments.size,
        width=arguments.size,
        num_inference_steps=arguments.steps,
        guidance_scale=arguments.guidance,
        generator=[torch.Generator().manual_seed(seed) for seed in range(arguments.captions)],
        output_type="latent",
    ).images


@torch.no_grad()
def pictures(pipe: DiffusionPipeline, latent: Tensor) -> Tensor:
    """Decoded, in 0..1."""
    shift = getattr(pipe.vae.config, "shift_factor", None) or 0.0
    decoded = pipe.vae.decode(latent / pipe.vae.config.scaling_factor + shift).sample
    return (decoded / 2 + 0.5).clamp(0, 1)


def channels(latent: Tensor) -> Tensor:
    """The first three channels halved, from -1..1 to 0..1: this model's latents resemble small pictures."""
    return (latent[:, :3] / 2).clamp(-1, 1) / 2 + 0.5


def psnr(made: Tensor, exact: Tensor) -> float:
    """Mean over the captions of the peak signal to noise ratio in dB, for values in 0..1."""
    error = (made.double() - exact.double()).square().mean((1, 2, 3)).clamp_min(1e-15)
    return (-10 * torch.log10(error)).mean().item()


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path(__file__).parents[2] / "assets" / "scenes-unet")
    parser.add_argument("--captions", type=int, choices=range(1, len(CAPTIONS) + 1), default=4, metavar="1..8")
    parser.add_argument("--places", type=int, default=4)
    parser.add_argument("--size", type=int, default=256, help="side of the picture in pixels")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--guidance", type=float, default=3.0)
    parser.add_argument("--warmup", type=int, default=2, help="first steps that are exact; naive has none")
    parser.add_argument("--row", action="append", choices=ROWS, metavar="NAME", help="only this row; may be repeated")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    pipe = DiffusionPipeline.from_pretrained(arguments.model, variant="fp16", torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    exact = latents(pipe, arguments)
    exact_pictures = pictures(pipe, exact)
    print(
        f"{arguments.captions} captions, {arguments.size} x {arguments.size}, {arguments.places} places, "
        f"{arguments.steps} steps of which {arguments.warmup} are exact, guidance {arguments.guidance:g}\n\n"
        "| treatment | latents, dB | pictures, dB |\n|---|---|---|",
        flush=True,
    )
    for name in arguments.row or ROWS:
        treatment = ROWS[name]
        if treatment.warmup_steps:
            treatment = replace(treatment, warmup_steps=arguments.warmup)
        with Emulation(pipe.unet, arguments.places, treatment):
            made = latents(pipe, arguments)
        found = psnr(channels(made), channels(exact)), psnr(pictures(pipe, made), exact_pictures)
        print(f"| {name} | {found[0]:.1f} | {found[1]:.1f} |", flush=True)


if __name__ == "__main__":
    main()
