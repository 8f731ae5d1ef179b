"""Where strategies differ from one process, on the same image: a map of errors for each of them.

    python -m benchmarks.error_maps --write docs/figures/error-maps.md --images assets/figures/error-maps

Real ranks on CPUs against plain diffusers in one process, fp32, same seed, compared before rounding to 8 bits.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.error_maps.colours import error_map, errors_of, scale_svg
from benchmarks.page import publish
from patchpar import ParallelPipeline, Plan
from patchpar.pipeline.image_metrics import as_image, psnr

PROMPT = "a red house on the left and a pine on the right, green hills at sunset"
CALL = {"prompt": PROMPT, "num_inference_steps": 20, "guidance_scale": 3.5, "output_type": "np"}
SEED = 0
UNET = (
    "patch=4,strategy=exact",
    "patch=4,strategy=fresh-edges",
    "patch=4,strategy=fresh-edges:context=pooled",
    "patch=4,strategy=displaced:warmup_steps=1",
    "patch=4,strategy=displaced:preset=paper,warmup_steps=1",
    "patch=4,strategy=pcpp:warmup_steps=1",
)
TRANSFORMER = (
    "patch=4,strategy=exact",
    "patch=4,strategy=fresh-edges",
    "patch=4,strategy=displaced:warmup_steps=1",
    "patch=4,strategy=pcpp:warmup_steps=1",
    "stage=2,strategy=piped",
)
PLANS = {"embedded": UNET, "embedded-dit": TRANSFORMER}
NOTES = {"displaced:preset=paper,warmup_steps=1": " (DistriFusion)"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """An image of a plan, compared with that of one process. `errors`: (H, W), 0..1."""

    plan: str
    errors: Any
    psnr_db: float

    @property
    def file(self) -> str:
        """Name of the map's file."""
        return re.sub(r"[^a-z0-9]+", "-", self.plan.removeprefix("patch=4,strategy=")) + ".png"

    @property
    def strategy(self) -> str:
        """The strategy as it is written, and what it is known as."""
        text = self.plan.partition("strategy=")[2]
        return f"`{text}`{NOTES.get(text, '')}"


def compare(model: str, plans: Sequence[str]) -> tuple[Any, list[Compared]]:
    """The image of one process (H, W, 3) in 0..1, and that of each plan compared with it."""
    with ParallelPipeline.from_pretrained(model, devices="cpu:4", deadline=600) as pipe:
        pipe.set_progress_bar_config(disable=True)

        def image_of(plan: Plan) -> Any:
            job = pipe.submit(**CALL, plan=plan, generator=torch.Generator().manual_seed(SEED))
            return job.result().images[0]

        single = image_of(Plan())
        found = []
        for text in plans:
            image = image_of(Plan.parse(text))
            found.append(Compared(plan=text, errors=errors_of(image, single), psnr_db=psnr(image, single)))
            print(f"{model}, {text}: {found[-1].psnr_db:.1f} dB", flush=True)
        return single, found


def save(folder: Path, single: Any, compared: Sequence[Compared]) -> None:
    """Write the image of one process and the maps."""
    folder.mkdir(parents=True, exist_ok=True)
    as_image(single).quantize(128).save(folder / "one-process.png", optimize=True)
    for each in compared:
        error_map(each.errors).save(folder / each.file, optimize=True)


def section(model: str, compared: Sequence[Compared], images: str) -> Iterator[str]:
    """The table of a model. `images`: its folder of maps as the page reaches it."""
    yield f"## {model}"
    yield ""
    yield f"![The image of one process]({images}/one-process.png)"
    yield ""
    yield "| strategy | ranks | error map | PSNR, dB | largest error | pixels above half a step of 8 bits |"
    yield "|---|---|---|---|---|---|"
    for each in compared:
        ranks = re.match(r"\w+=(\d+)", each.plan)
        visible = 100 * float((each.errors > 0.5 / 255).mean())
        yield (
            f"| {each.strategy} | {ranks[1] if ranks else 1} | ![Errors of {each.strategy.replace('`', '')}]"
            f"({images}/{each.file}) | {min(each.psnr_db, 150):.1f} | {each.errors.max():.1e} | {visible:.1f} % |"
        )
    yield ""


def page(write: Path, images: Path) -> Iterator[str]:
    """Generate, write the maps, yield the lines of the page."""
    images.mkdir(parents=True, exist_ok=True)
    (images / "scale.svg").write_text(scale_svg())
    above = os.path.relpath(images, write.parent)
    yield "# Error maps"
    yield ""
    yield (
        f'One image, "{PROMPT}", 256 x 256 pixels, {CALL["num_inference_steps"]} steps, guidance '
        f"{CALL['guidance_scale']}, seed {SEED}: where an image of several ranks differs from that of one process. "
        "A map shows the largest error of a pixel's channels on one logarithmic scale, from 0.0001 (black) to 1 "
        "(white); half a step of 8 bits is 0.002. Every strategy has one exact warm-up step. One image ranks no "
        "strategies: means over 32 captions are in [quality against bytes](quality.md). Structure guidance is not "
        "here, since it generates another image on purpose. `python -m benchmarks.error_maps`"
    )
    yield ""
    yield f"![The scale, from 0.0001 to 1]({above}/scale.svg)"
    yield ""
    for model, plans in PLANS.items():
        single, compared = compare(model, plans)
        save(images / model, single, compared)
        yield from section(model, compared, f"{above}/{model}")


def main() -> None:
    """Generate, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, default=Path("docs/figures/error-maps.md"), help="the page")
    parser.add_argument("--images", type=Path, default=Path("assets/figures/error-maps"), help="folder of the maps")
    options = parser.parse_args()
    torch.set_num_threads(1)
    publish(page(options.write, options.images), options.write)


if __name__ == "__main__":
    main()
