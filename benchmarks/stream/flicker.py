"""Flicker of a video that is generated anew: as one stream, and image by image.

    python -m benchmarks.stream.flicker --write docs/figures/stream-flicker.md

The scene stands still before a camera with noise: one image, with other noise in each frame. What differs between
neighbouring frames of the output is flicker. Image by image has the same seed for every frame, which is the best that
it can have: only the camera's noise differs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from benchmarks.page import publish
from patchpar import ImageStreamingPipeline, StreamingPipeline
from patchpar.models.files import embedded_model

Frames = NDArray[np.uint8]
NOISE = 6.0
"""Standard deviation of the camera's noise, of 255 levels."""
SCENE_PROMPT = "a red house on the left and a pine on the right, green hills at sunset"
FACE_PROMPT = "a person with a happy face is talking"


def noisy(image: Frames, count: int) -> list[Frames]:
    """Frames [H, W, 3] of a camera that looks at an image [H, W, 3]."""
    chance = np.random.default_rng(0)
    return [(image + chance.normal(0, NOISE, image.shape)).round().clip(0, 255).astype(np.uint8) for _ in range(count)]


def flicker(frames: Sequence[Frames]) -> float:
    """Mean difference between neighbouring frames, of 255 levels."""
    return float(np.mean([np.abs(a.astype(int) - b.astype(int)).mean() for a, b in pairwise(frames)]))


def streamed(pipe: StreamingPipeline, video: Sequence[Frames], strength: float) -> list[Frames]:
    """The video as one stream."""
    with pipe.stream(FACE_PROMPT, video=video, strength=strength, seed=1) as session:
        return [frame for chunk in session for frame in chunk.frames.numpy()]


def one_by_one(pipe: StreamingPipeline, video: Sequence[Frames], strength: float) -> list[Frames]:
    """The same model, with a stream of its own for each frame."""
    return [streamed(pipe, [frame], strength)[0] for frame in video]


def images(video: Sequence[Frames], strength: float, steps: int) -> list[Frames]:
    """The embedded image model, image by image."""
    options: dict[str, Any] = {"num_inference_steps": steps, "strength": strength}
    with (
        ImageStreamingPipeline.from_pretrained("embedded", devices="cpu", takes_image=True) as pipe,
        pipe.stream(prompt=SCENE_PROMPT, seed=1, **options) as session,
    ):
        requests = [{"image": Image.fromarray(frame)} for frame in video]
        return [np.asarray(result.image.convert("RGB")) for result in session.map(requests)]


def scene(size: int) -> Frames:
    """An image of the embedded image model."""
    from diffusers import DiffusionPipeline

    pipe = DiffusionPipeline.from_pretrained(embedded_model("embedded"), variant="fp16", torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(3)
    result = pipe(SCENE_PROMPT, height=size, width=size, num_inference_steps=20, generator=generator)
    return np.asarray(result.images[0].convert("RGB"))


def lines(count: int, strength: float, size: int) -> list[str]:
    """The rows of the table."""
    rows = []
    with StreamingPipeline.from_pretrained("embedded-face", devices="cpu") as pipe:
        config, folder = pipe.config, embedded_model("embedded-face")
        assert config.reference is not None
        face = Image.open(folder / config.reference).convert("RGB").resize((config.width, config.height))
        video = noisy(np.asarray(face), count)
        whole, alone = streamed(pipe, video, strength), one_by_one(pipe, video, strength)
    best = flicker(whole[len(whole) // 4 :])
    rows.append(("embedded-face, one stream", flicker(video), best))
    rows.append(("embedded-face, a stream for each frame", flicker(video), flicker(alone)))
    video = noisy(scene(size), count)
    rows.append(("embedded, image by image", flicker(video), flicker(images(video, strength, 8))))
    return [
        f"| {name} | {given:.2f} | {found:.2f} | {found / given:.2f} | {found / best:.1f}x |"
        for name, given, found in rows
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=33, help="of the video (33)")
    parser.add_argument("--strength", type=float, default=0.7, help="noise level of the first step (0.7)")
    parser.add_argument("--size", type=int, default=128, help="pixels of both sides of the image model (128)")
    parser.add_argument("--write", type=Path, help="a Markdown file to write")
    options = parser.parse_args(arguments)
    table = [
        "# Flicker of a video that is generated anew",
        "",
        f"A still scene before a camera with noise of {NOISE:g} levels, {options.frames} frames, from noise level "
        f"{options.strength:g}; mean differences between neighbouring frames, of 255 levels. By "
        "benchmarks/stream/flicker.py.",
        "",
        "| | input | output | output / input | against the stream |",
        "|---|---|---|---|---|",
        *lines(options.frames, options.strength, options.size),
    ]
    publish(table, options.write)


if __name__ == "__main__":
    main()
