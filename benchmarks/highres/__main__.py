"""Large images by structure guidance, beside plain generation, windows alone and the paper's equations.

    python -m benchmarks.highres                                             4 captions at twice the native size
    python -m benchmarks.highres --generate 2x16x20 --generate 4x4x20 --write docs/figures/highres.md
    python -m benchmarks.highres --only speed --write docs/figures/highres.md  one section, in its place
    python -m benchmarks.highres --only images --kept FOLDER                   images in a folder are kept

--generate SCALExCAPTIONSxSTEPS: sides as multiples of the native one, number of captions, number of steps; optionally
the methods: "4x1x8:direct+flow".

Objects are counted on images of the embedded model, whose captions say how many there are; the classifier of
`training` names what it sees and does not count.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch
from PIL import Image
from torch import Tensor

from benchmarks.highres.analytic import calibrate
from benchmarks.highres.counting import accuracy, subjects
from benchmarks.highres.generation import METHODS, NATIVE, ImageCache, Look, evaluated, pipeline, sheet
from benchmarks.highres.speed import table
from benchmarks.highres.stand_in import embedded, of_sdxl
from benchmarks.highres.traffic import rounds_of
from benchmarks.highres.traffic import table as sent
from benchmarks.highres.two_ranks import rows as on_two_ranks
from benchmarks.page import publish_section
from patchpar import StructureGuidance
from patchpar.strategies.structure.sizing import starts_of

CALIBRATED = {
    "calibrated": StructureGuidance(),
    "calibrated, lag=1": StructureGuidance(lag=1),
    "calibrated, weight=0.8": StructureGuidance(weight=0.8),
    "calibrated, switch=0.5": StructureGuidance(switch=0.5),
    "nobody leads": StructureGuidance(weight=0.0),
    "paper": StructureGuidance(preset="paper"),
    "paper, lag=1": StructureGuidance(preset="paper", lag=1),
    "paper, noise of their own": StructureGuidance(preset="paper", shared_noise=0.0),
}
RANKS, SCALES, TRAINED = (1, 4, 8), (2, 3, 4), 128
PREDICTED = {
    "paper": StructureGuidance(preset="paper"),
    "calibrated": StructureGuidance(),
    "paper, bands": StructureGuidance(preset="paper", bands=4),
    "calibrated, bands": StructureGuidance(bands=4),
    "paper, margin=0.125": StructureGuidance(preset="paper", margin=0.125),
    "calibrated, margin=0.125, bands": StructureGuidance(margin=0.125, bands=4),
}
TEAMS = 2  # the size up to which there are few enough units for teams to matter


def calibration() -> Iterator[str]:
    """Noise at the switch on a denoiser in closed form."""
    yield "| | noise power / theory | patches agree with the anchor |"
    yield "|---|---|---|"
    for name, strategy in CALIBRATED.items():
        found = calibrate(strategy.method)
        yield f"| {name} | {found.noise_power:.3f} | {found.agreement:.2f} |"


def work() -> Iterator[str]:
    """Rounds of 50 steps with equal steps of time, in evaluations of both branches of a patch."""
    ranks = " | ".join(f"{count} rank{'s' * (count > 1)}" for count in RANKS)
    yield f"| | windows | {ranks} |"
    yield "|---|---|" + "---|" * len(RANKS)
    for scale in SCALES:
        windows = len(starts_of(scale * TRAINED, TRAINED, 0.5, 1)) ** 2
        for name, patches, before, more in (("paper", scale**2, 25, 0), ("calibrated", 1, 32, 1)):
            rounds = [
                before * rounds_of(patches, 2, count) + (50 - before) * rounds_of(windows + more, 2, count)
                for count in RANKS
            ]
            cells = " | ".join(f"{each:g}" for each in rounds)
            yield f"| {scale} x {scale}, {name} | {windows} | {cells} |"


def images(methods: Sequence[str], captions: int, kept: ImageCache, into: Path | None) -> Iterator[str]:
    """Every method on every caption."""
    chosen = subjects(captions)
    rows: dict[str, list[Tensor]] = {name: [] for name in methods}
    with pipeline() as pipe:
        for seed, subject in enumerate(chosen):
            for name in methods:
                rows[name].append(kept.generated(pipe, name, subject, seed=seed))
                print(f"{name}: {subject.caption}", file=sys.stderr, flush=True)
            if into is not None:
                generation = sheet(list(zip(*rows.values(), strict=True))).permute(1, 2, 0)
                Image.fromarray((generation * 255).round().byte().numpy()).save(into)
    yield f"| {kept.scale} x {kept.scale} | objects miscounted | repetition | seam, z | agrees with native, dB |"
    yield "|---|---|---|---|---|"
    for name, found in rows.items():
        beside = zip(found, rows["native"], chosen, strict=True)
        looks = [evaluated(name, one, native, each) for one, native, each in beside]
        yield f"| {name} | {fmean(look.miscounted for look in looks):.2f} | {_cells(looks)} |"


def _cells(looks: Sequence[Look]) -> str:
    if looks[0].repetition is None:
        return " | | "
    repetition = fmean(look.repetition or 0.0 for look in looks)
    point, agrees = (fmean(getattr(look, name) for look in looks) for name in ("seam_z", "agreement_db"))
    return f"{repetition:.2f} | {point:.1f} | {agrees:.1f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSet:
    """Images that are asked for: see --generate. Native ones are always generated."""

    scale: int = 2
    captions: int = 4
    steps: int = 16
    methods: tuple[str, ...] = tuple(METHODS)


def asked(text: str) -> ImageSet:
    """Of "2x4x16" or "4x1x8:direct+flow". Raises ArgumentTypeError."""
    form, _, names = text.partition(":")
    try:
        scale, captions, steps = map(int, form.split("x"))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{form!r} is no SCALExCAPTIONSxSTEPS, such as 2x4x16") from error
    chosen = names.split("+") if names else list(METHODS)
    unknown = [name for name in chosen if name not in METHODS]
    if unknown:
        raise argparse.ArgumentTypeError(f"no method {unknown[0]!r}: there are {' + '.join(METHODS)}")
    methods = tuple(name for name in METHODS if name == "native" or name in chosen)
    return ImageSet(scale=scale, captions=captions, steps=steps, methods=methods)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generate", action="append", type=asked, help="see above; by default 2x4x16")
    parser.add_argument("--kept", type=Path, help="a folder of images: what is there is not generated again")
    parser.add_argument("--only", choices=SECTIONS, help="one section of the page")
    parser.add_argument("--write", type=Path, help="also write this page, section by section")
    parser.add_argument("--sheet", type=Path, help="images side by side, a row for each caption")
    return parser.parse_args()


OPENING = "# Large images\n\nWritten by `python -m benchmarks.highres`.\n"
SHEET = "The images, all shrunk to native size, a row for each caption, from the left:"
FIELD = "A Gaussian field of 128 x 128, patches of 64 x 64, 50 steps, DDIM."
ROUNDS = "Of 50 steps with equal steps of time, in evaluations of both guidance branches of one patch."
TRAFFIC = (
    "Bytes that a rank sends in a step, in units of the latent of one image, from the geometry: the mean of the "
    "ranks above and below the switch, what the rank sends below it that has most to send, the mean of the ranks in "
    "the last step, which also makes the latents whole, and the mean over 50 steps, the first of which sends both "
    "branches of guidance and the last of which is that one. At the end the longest that a step with windows waits for "
    "1 Gbit/s with a millisecond of latency, nothing hidden, where native is 1024 x 1024 in half precision "
    "(`benchmarks/highres/traffic.py`)."
)
SPEED = (
    "Of 50 steps with guidance, from what parts take on one core, the decode in bands and the PNG by bands, in "
    "processor time: predicted, not run, and without what exchange takes (`benchmarks/highres/speed.py`). `bands`: "
    "teams of half of the ranks, at most four."
)
EMBEDDED = (
    "The embedded model. What its evaluation takes is half bookkeeping, of which every rank of a team has as much."
)
OF_SDXL = "A model of SDXL's form and size of image, a quarter as wide, random weights: evaluations as large ones are."
MEASURED = (
    "The embedded model, from the prompt to the PNG, two workers of one thread, in turns, medians of three images "
    "each (`benchmarks/highres/two_ranks.py`)."
)
DISPLAYED = (
    "{size} x {size} pixels by a model trained for {native}, {steps} steps, {captions}. Native images are "
    "what the anchor alone becomes. The counter is right on {right:.0%} of renders. It looks for regions of 60 "
    "of 128 x 128 pixels and more: smaller objects, of which direct images and the paper's have dozens at 4 x 4, are "
    "not counted."
)


def _calibration(_: argparse.Namespace) -> Iterator[str]:
    yield from (FIELD, "", *calibration())


def _work(_: argparse.Namespace) -> Iterator[str]:
    yield from (ROUNDS, "", *work())


def _traffic(_: argparse.Namespace) -> Iterator[str]:
    strategies = {name: PREDICTED[name] for name in ("calibrated", "paper")}
    yield from (TRAFFIC, "", *sent(strategies, SCALES))


def _speed(_: argparse.Namespace) -> Iterator[str]:
    yield from (SPEED, "", OF_SDXL, "", *table(PREDICTED, of_sdxl(), TEAMS), "")
    yield from (EMBEDDED, "")
    model = embedded()
    for scale in SCALES:
        yield from (*table(PREDICTED, model, scale), "")


def _ranks(_: argparse.Namespace) -> Iterator[str]:
    presets = {name: PREDICTED[name] for name in ("calibrated", "paper")}
    yield from (MEASURED, "")
    yield from on_two_ranks(presets, scale=2, steps=12)


def _images(options: argparse.Namespace) -> Iterator[str]:
    right = accuracy(100)
    for each in options.generate or [ImageSet()]:
        facts = {"size": each.scale * NATIVE, "native": NATIVE, "right": right, "steps": each.steps}
        yield from (DISPLAYED.format(**facts, captions=_first(each.captions)), "")
        kept = ImageCache(scale=each.scale, steps=each.steps, folder=options.kept)
        yield from (*images(each.methods, each.captions, kept, options.sheet), "")
        if options.sheet is not None:
            yield f"{SHEET} {', '.join(each.methods)}."


def _first(captions: int) -> str:
    return "the first caption" if captions == 1 else f"the first {captions} captions"


SECTIONS = {
    "calibration": ("Noise at the switch", _calibration),
    "work": ("Work", _work),
    "traffic": ("Traffic", _traffic),
    "speed": ("Predicted speed", _speed),
    "ranks": ("Two ranks, measured", _ranks),
    "images": ("Images", _images),
}


def main() -> None:
    """Print the page, and write each section as soon as it is measured."""
    torch.set_num_threads(1)
    options = parse()
    for name, (heading, lines) in SECTIONS.items():
        if options.only in (None, name):
            publish_section(OPENING, heading, lines(options), options.write)


if __name__ == "__main__":
    main()
