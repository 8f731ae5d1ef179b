"""How well the packaged pipeline follows held-out captions, judged by classifiers of attributes and repetitions.

    python -m training.evaluate                                  # 64 captions at 256x256
    python -m training.evaluate --size 384x256 --count 16
    python -m training.evaluate --sheet assets/figures/samples.png
    python -m training.evaluate --model assets/scenes-dit        # any packaged pipeline

Figures go to a file in assets/figures, one per model with one entry per size, and from there into
docs/embedded-model.md.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from diffusers import DiffusionPipeline
from PIL import Image
from torch import Tensor

from patchpar import ParallelPipeline, Plan, StructureGuidance
from patchpar.models.files import inspect_folder
from training.classifier import Classifier, Judgement, accuracy, judge, load_classifier
from training.package import FOLDER
from training.repeats import RepeatCounter, load_counter, repeats
from training.repeats import accuracy as count_accuracy
from training.report import report_files, update_document, update_figures
from training.scenes import COLORLESS, SIDES, Look, Scene, held_out_captions, look_of

ROOT = Path(__file__).parent.parent
CLASSIFIER_BAR = 0.97
SHEET = (
    ("a red house on the left and a pine on the right, green hills at sunset", 256, 256),
    ("a white tower on the right and a tree on the left, a calm lake at noon", 256, 256),
    ("an orange balloon on the left and a blue house on the right, snowy mountains at noon", 256, 256),
    ("a yellow house on the left and a pine on the right, desert dunes at night", 256, 256),
    ("a purple balloon on the right, a calm lake at sunset", 256, 256),
    ("a red tower on the left and a yellow balloon on the right, green hills at noon", 256, 256),
    ("a red tower on the right and a white house on the left, snowy mountains at sunset", 256, 384),
    ("a blue balloon on the left and a tree on the right, desert dunes at noon", 256, 384),
    ("a purple house on the right and a tree on the left, green hills at sunset", 256, 256),
    ("a yellow tower on the left and a pine on the right, desert dunes at sunset", 256, 256),
    ("a white house on the left and a red balloon on the right, a calm lake at noon", 512, 512),
)
"""Captions of the sample sheet with height and width in pixels."""
SQUARE, WIDE, LARGE = (256, 256), (256, 384), (512, 512)
FACES = Path(__file__).parent.parent / "assets/figures/samples-face.png"
FACE = 96  # pixels of a frame there; each row is a face, the reference first


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How images are made: height and width in pixels, denoising steps, guidance scale, seed of the first one."""

    height: int
    width: int
    steps: int
    guidance: float
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Shares in 0..1. scene: both sides right in kind and colour, and nothing where nothing was asked for.

    night: of the scenes at night alone. single: objects that were asked for and are not there twice.
    """

    captions: int
    scene: float
    night: float
    single: float
    kind: float
    color: float
    empty: float
    terrain: float
    time: float


def generate(pipe: DiffusionPipeline, captions: Sequence[str], settings: Settings, *, batch: int = 8) -> Tensor:
    """One image (3, H, W) in -1..1 per caption; image i has its own generator with seed settings.seed + i."""
    made = []
    for start in range(0, len(captions), batch):
        words = list(captions[start : start + batch])
        seeds = range(settings.seed + start, settings.seed + start + len(words))
        images = pipe(
            words,
            height=settings.height,
            width=settings.width,
            num_inference_steps=settings.steps,
            guidance_scale=settings.guidance,
            generator=[torch.Generator().manual_seed(seed) for seed in seeds],
            output_type="pt",
        ).images
        made.append(images.float().cpu() * 2 - 1)
    return torch.cat(made)


def score(verifications: Sequence[Judgement], repeated: Sequence[Collection[str]], scenes: Sequence[Scene]) -> Scores:
    """Compare what is seen with what was asked for; `repeated` are the sides of each image with an object twice."""
    judged = list(zip(verifications, scenes, strict=True))
    sides = [[(judgement.on(side), look_of(scene.on(side))) for side in SIDES] for judgement, scene in judged]
    pairs = [pair for both in sides for pair in both]
    objects = [(seen, asked) for seen, asked in pairs if asked is not None]
    colored = [(seen, asked) for seen, asked in objects if asked[0] not in COLORLESS]
    empty = [seen for seen, asked in pairs if asked is None]
    is_right = [all(seen == asked for seen, asked in both) for both in sides]
    return Scores(
        captions=len(scenes),
        scene=_fraction(is_right),
        night=_fraction([right for right, scene in zip(is_right, scenes, strict=True) if scene.time == "at night"]),
        single=_fraction(
            [item.side not in twice for twice, scene in zip(repeated, scenes, strict=True) for item in scene.items]
        ),
        kind=_fraction([_kind(seen) == asked[0] for seen, asked in objects]),
        color=_fraction([seen is not None and seen[1] == asked[1] for seen, asked in colored]),
        empty=_fraction([seen is None for seen in empty]),
        terrain=_fraction([judgement.terrain == scene.terrain for judgement, scene in judged]),
        time=_fraction([judgement.time == scene.time for judgement, scene in judged]),
    )


def to_image(image_CHW: Tensor) -> Image.Image:
    """An image (3, H, W) in -1..1 as an image."""
    pixels = ((image_CHW.clamp(-1, 1) + 1) * 127.5).round().byte().permute(1, 2, 0).numpy()
    return Image.fromarray(pixels)


def sample_sheet(pipe: DiffusionPipeline, settings: Settings) -> Image.Image:
    """The images of SHEET, and a talking face.

    First the one of twice the size, generated directly and with structure guidance, then those of the size that the
    model has learnt.
    """
    sheet = Image.new("RGB", (1536, 768), "white")
    beside, below = [(x, y) for y in (0, 256) for x in (1024, 1280)], [(x, 512) for x in (0, 256, 512)]
    positions = {
        SQUARE: beside + below,
        WIDE: [(768, 512), (1152, 512)],
        LARGE: [(0, 0)],
    }
    for index, (caption, height, width) in enumerate(SHEET):
        one = replace(settings, height=height, width=width, seed=settings.seed + index)
        if positions[height, width]:
            sheet.paste(to_image(generate(pipe, [caption], one)[0]), positions[height, width].pop(0))
        if (height, width) == LARGE:
            sheet.paste(structure_guided(pipe, caption, one), (512, 0))
    return _above(sheet, Image.open(FACES).convert("RGB").crop((0, 3 * FACE, 13 * FACE, 4 * FACE)))


def structure_guided(pipe: DiffusionPipeline, caption: str, settings: Settings) -> Image.Image:
    """The image of the same seed with structure guidance."""
    with ParallelPipeline(pipe, devices="cpu", plan=Plan(strategy=StructureGuidance())) as guided:
        image: Image.Image = guided(
            caption,
            height=settings.height,
            width=settings.width,
            num_inference_steps=settings.steps,
            guidance_scale=settings.guidance,
            generator=torch.Generator().manual_seed(settings.seed),
        ).images[0]
    return image


def _above(upper: Image.Image, lower: Image.Image) -> Image.Image:
    """Two images, one above the other; the lower one gets the width of the upper one."""
    lower = lower.resize((upper.width, round(lower.height * upper.width / lower.width)), Image.Resampling.LANCZOS)
    both = Image.new("RGB", (upper.width, upper.height + lower.height))
    both.paste(upper, (0, 0))
    both.paste(lower, (0, upper.height))
    return both


def _fraction(hits: Sequence[bool]) -> float:
    return sum(hits) / len(hits) if hits else 1.0


def _kind(look: Look | None) -> str | None:
    return None if look is None else look[0]


def check_judges(classifier: Classifier, counter: RepeatCounter, settings: Settings) -> dict[str, float]:
    """The accuracy of both judges on held-out renders of this size. Raises RuntimeError below the bar."""
    size = {"height": settings.height, "width": settings.width}
    own = {
        "classifier": min(accuracy(classifier, 200, **size).values()),
        "counter": count_accuracy(counter, 200, **size),
    }
    for name, fraction in own.items():
        if fraction < CLASSIFIER_BAR:
            raise RuntimeError(
                f"the {name} is right on {fraction} of renders, the bar is {CLASSIFIER_BAR}: train it longer"
            )
    return own


def square_sheet(pipe: DiffusionPipeline, settings: Settings) -> Image.Image:
    """The squares of 256 pixels among the images of SHEET, in two rows."""
    captions = [caption for caption, height, width in SHEET if height == width == 256]
    return contact_sheet(generate(pipe, captions, replace(settings, height=256, width=256)), len(captions) // 2)


def load_pipeline(folder: Path, dtype: torch.dtype) -> DiffusionPipeline:
    """A packaged pipeline, whatever its class. What its index says is absent has to be passed as None."""
    absent = dict.fromkeys(inspect_folder(folder, "fp16").absent)
    pipe = DiffusionPipeline.from_pretrained(folder, variant="fp16", torch_dtype=dtype, **absent)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=FOLDER, help="pipeline folder")
    parser.add_argument("--count", type=int, default=64, help="held-out captions")
    parser.add_argument("--size", default="256x256", help="height x width in pixels")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--guidance", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--sheet", type=Path, help="draw the sample sheet there instead of measuring")
    parser.add_argument("--squares", action="store_true", help="only the squares of 256 pixels on the sheet")
    parser.add_argument("--images", type=Path, help="also write the judged images, side by side, to this file")
    parser.add_argument("--dry", action="store_true", help="print only, leave figures and document as they are")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    return parser.parse_args()


def contact_sheet(images_BCHW: Tensor, columns: int = 8) -> Image.Image:
    """All images in rows."""
    height, width = images_BCHW.shape[-2:]
    sheet = Image.new("RGB", (columns * width, -(-len(images_BCHW) // columns) * height))
    for index, one in enumerate(images_BCHW):
        sheet.paste(to_image(one), (index % columns * width, index // columns * height))
    return sheet


def main() -> None:
    """Measure, or draw the sample sheet."""
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    height, width = (int(side) for side in arguments.size.split("x"))
    settings = Settings(
        height=height, width=width, steps=arguments.steps, guidance=arguments.guidance, seed=arguments.seed
    )
    pipe = load_pipeline(arguments.model, getattr(torch, arguments.dtype))
    if arguments.sheet:
        render = square_sheet if arguments.squares else sample_sheet
        render(pipe, settings).save(arguments.sheet)
        return
    classifier, counter = load_classifier(), load_counter()
    own = check_judges(classifier, counter, settings)
    captions, scenes = zip(*held_out_captions(arguments.count), strict=True)
    images = generate(pipe, captions, settings)
    if arguments.images:
        contact_sheet(images).save(arguments.images)
    parts = asdict(score(judge(classifier, images), repeats(counter, images), scenes))
    figures = {**asdict(settings), "dtype": arguments.dtype, **parts, **own}
    print(json.dumps(figures), flush=True)
    if not arguments.dry:
        position = report_files(arguments.model)
        update_figures(arguments.size, figures, position.figures)
        update_document(position)


if __name__ == "__main__":
    main()
