"""Flicker of a video that is generated anew: as one stream, and image by image.

    python -m benchmarks.stream.flicker --write docs/figures/stream-flicker.md

The scene stands still before a camera with noise: one image, with other noise in each frame. What differs between
neighbouring frames of the output is flicker, and movement that the model adds: the face talks. A stream has new
initial noise in each block. Image by image is measured with new noise for each image, as a stream has it, and with the
same noise for all, where only the camera's differs.
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
IMAGE_STEPS = 8
SCENE_PROMPT = "a red house on the left and a pine on the right, green hills at sunset"
FACE_PROMPT = "a person with a happy face is talking"


def noisy(image: Frames, count: int) -> list[Frames]:
    """Frames [H, W, 3] of a camera that looks at an image [H, W, 3]."""
    chance = np.random.default_rng(0)
    return [(image + chance.normal(0, NOISE, image.shape)).round().clip(0, 255).astype(np.uint8) for _ in range(count)]


def flicker(frames: Sequence[Frames]) -> float:
    """Mean difference between neighbouring frames, of 255 levels."""
    return float(np.mean([np.abs(a.astype(int) - b.astype(int)).mean() for a, b in pairwise(frames)]))


def streamed(pipe: StreamingPipeline, video: Sequence[Frames], strength: float, seed: int = 1) -> list[Frames]:
    """The video as one stream."""
    with pipe.stream(FACE_PROMPT, video=video, strength=strength, seed=seed) as session:
        return [frame for chunk in session for frame in chunk.frames.numpy()]


def one_by_one(pipe: StreamingPipeline, video: Sequence[Frames], strength: float, seeds: Sequence[int]) -> list[Frames]:
    """The same model, with a stream of its own for each frame."""
    return [streamed(pipe, [frame], strength, seed)[0] for frame, seed in zip(video, seeds, strict=True)]


def images(
    pipe: ImageStreamingPipeline, video: Sequence[Frames], strength: float, seeds: Sequence[int]
) -> list[Frames]:
    """The embedded image model, image by image."""
    options: dict[str, Any] = {"num_inference_steps": IMAGE_STEPS, "strength": strength}
    found = []
    for frame, seed in zip(video, seeds, strict=True):
        with pipe.stream(prompt=SCENE_PROMPT, seed=seed, **options) as session:
            found += [
                np.asarray(each.image.convert("RGB")) for each in session.map([{"image": Image.fromarray(frame)}])
            ]
    return found


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
    rows, new, same = list[tuple[str, float, float]](), range(count), [1] * count
    with StreamingPipeline.from_pretrained("embedded-face", devices="cpu") as pipe:
        config, folder = pipe.config, embedded_model("embedded-face")
        assert config.reference is not None
        face = Image.open(folder / config.reference).convert("RGB").resize((config.width, config.height))
        video = noisy(np.asarray(face), count)
        given, best = flicker(video), flicker(streamed(pipe, video, strength)[:count])
        rows.append(("embedded-face, one stream", given, best))
        for name, seeds in (("new noise", new), ("the same noise", same)):
            alone = one_by_one(pipe, video, strength, seeds)
            rows.append((f"embedded-face, a stream for each frame, {name}", given, flicker(alone)))
    video = noisy(scene(size), count)
    with ImageStreamingPipeline.from_pretrained("embedded", devices="cpu", takes_image=True) as images_of:
        for name, seeds in (("new noise", new), ("the same noise", same)):
            found = images(images_of, video, strength, seeds)
            rows.append((f"embedded, image by image, {name}", flicker(video), flicker(found)))
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
        f"{options.strength:g}; mean differences between neighbouring frames, of 255 levels. A stream has new initial "
        "noise in each block, and the face moves by itself. With the same noise for all images only the camera's "
        "differs, which denoising takes away. By benchmarks/stream/flicker.py.",
        "",
        "| | input | output | output / input | against the stream |",
        "|---|---|---|---|---|",
        *lines(options.frames, options.strength, options.size),
    ]
    publish(table, options.write)


if __name__ == "__main__":
    main()
