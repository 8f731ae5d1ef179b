"""Partial images and edits of a real model, through OpenAI's client."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
import torch
from PIL import Image

from patchpar import ParallelPipeline
from patchpar.pipeline.messages import Previews, preview_steps
from patchpar.serving.generation import ImageGenerator
from patchpar.serving.latent_preview import grid_of
from patchpar.serving.server import ModelServer
from patchpar.serving.service import ImageService
from patchpar.serving.settings import ServedModel, ServerSettings
from tests.serving.test_images import generated, image_of

PROMPT = "a red house on the left, green hills at noon"
SIZE, STEPS = (96, 64), 6


def served_client(service: ImageService) -> Iterator[openai.OpenAI]:
    server = ModelServer(service)
    server.start()
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client
    server.close()


@pytest.fixture(scope="module")
def client(embedded: ImageService) -> Iterator[openai.OpenAI]:
    yield from served_client(embedded)


def distance(first: Any, second: Any) -> float:
    return float(np.abs(np.asarray(first, float) - np.asarray(second, float)).mean())


def likeness(first: torch.Tensor, second: torch.Tensor) -> float:
    """Correlation, 1 for the same but for scale."""
    return float(torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1])


def test_partial_images_become_the_image(client: openai.OpenAI, pipe: ParallelPipeline) -> None:
    """The last one is nearer to the image of its seed than to another one's; the finished one is the pipeline's."""
    stream: Any = client.images.generate(
        prompt=PROMPT,
        size="96x64",  # type: ignore[arg-type]
        stream=True,
        partial_images=3,
        extra_body={"seed": 7, "num_inference_steps": STEPS},
    )
    *partial, last = list(stream)
    assert [each.type for each in partial] == ["image_generation.partial_image"] * 3
    assert last.type == "image_generation.completed"
    final, other = (generated(pipe, seed, num_inference_steps=STEPS) for seed in (7, 8))
    assert np.array_equal(image_of(last.b64_json), final)
    images = [image_of(each.b64_json) for each in partial]
    assert {image.shape for image in images} == {final.shape}
    assert distance(images[-1], final) < 0.9 * distance(images[-1], other)
    assert distance(images[-1], final) < distance(images[0], final)
    assert last.usage.output_tokens == 12 * 8


def test_partial_images_by_the_decoder(client: openai.OpenAI, pipe: ParallelPipeline) -> None:
    """Those that the pipeline decodes, which the linear ones are not; the finished image is the same."""
    found: list[Any] = []
    arguments = {"height": 64, "width": 96, "num_inference_steps": STEPS}
    previews = Previews(count=2, receive=lambda step, steps, image: found.append(np.asarray(image)), decoded=True)
    pipe.submit(PROMPT, generator=torch.Generator().manual_seed(7), previews=previews, **arguments).result(120)
    for way in ("vae", "linear"):
        stream: Any = client.images.generate(
            prompt=PROMPT,
            size="96x64",  # type: ignore[arg-type]
            stream=True,
            partial_images=2,
            extra_body={"seed": 7, "num_inference_steps": STEPS, "previews": way},
        )
        *partial, last = list(stream)
        images = [image_of(each.b64_json) for each in partial]
        assert len(images) == len(found) == 2
        assert all(np.array_equal(*pair) == (way == "vae") for pair in zip(images, found, strict=True))
        assert np.array_equal(image_of(last.b64_json), generated(pipe, 7, num_inference_steps=STEPS))


def test_previews_are_the_latents_of_the_scheduler(pipe: ParallelPipeline) -> None:
    found: list[Any] = []
    previews = Previews(count=2, receive=lambda step, steps, latents: found.append((step, steps, latents)))
    arguments = {"height": 64, "width": 96, "num_inference_steps": STEPS, "output_type": "latent"}
    job = pipe.submit(PROMPT, generator=torch.Generator().manual_seed(7), previews=previews, **arguments)
    latents = job.result(120).images
    assert [(step, steps) for step, steps, _ in found] == [(2, STEPS), (4, STEPS), (STEPS, STEPS)]
    assert torch.equal(found[-1][2], latents.float())
    assert not torch.equal(found[0][2], found[1][2])


def test_a_call_reports_the_estimate_of_clean_latents_of_every_step(pipe: ParallelPipeline) -> None:
    """More like the end than the noisy latents, which a callback gets; guidance makes the first ones too bright."""
    found: list[Any] = []
    noisy: list[Any] = []

    def keep(_: Any, step: int, time: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        noisy.append(tensors["latents"].clone())
        return {}

    arguments = {"height": 64, "width": 96, "num_inference_steps": STEPS, "output_type": "latent"}
    pipe.on_latents = lambda step, steps, latents: found.append(latents)
    try:
        generator = torch.Generator().manual_seed(7)
        latents = pipe(PROMPT, generator=generator, callback_on_step_end=keep, **arguments).images
    finally:
        pipe.on_latents = None
    assert len(found) == len(noisy) == STEPS
    assert torch.equal(found[-1], latents.float())
    for clean, before in zip(found[:-1], noisy[:-1], strict=True):
        assert likeness(clean, latents) > likeness(before, latents) + 0.05


@pytest.mark.parametrize(
    ("count", "steps", "wanted"), [(0, 9, ()), (3, 4, (1, 2, 3, 4)), (3, 2, (1, 2)), (2, 30, (10, 20, 30)), (2, 0, ())]
)
def test_steps_of_previews(count: int, steps: int, wanted: tuple[int, ...]) -> None:
    assert preview_steps(count, steps) == frozenset(wanted)


def test_latents_as_a_grid() -> None:
    """Tokens are in rows, whichever way the image is longer; what is neither is none."""
    tokens = np.arange(24.0).reshape(1, 8, 3)
    wide = grid_of(tokens, (64, 32))
    assert wide.shape == (3, 2, 4)
    assert wide[0].tolist() == [[0, 3, 6, 9], [12, 15, 18, 21]]
    assert grid_of(tokens, (32, 64)).shape == (3, 4, 2)
    assert grid_of(tokens, (64, 64)) is None
    assert grid_of(np.zeros((1, 4, 1, 8, 8)), (64, 64)).shape == (4, 8, 8)
    assert grid_of(np.zeros((1, 1, 4, 8, 8)), (64, 64)).shape == (4, 8, 8)
    assert grid_of(np.zeros((1, 4, 3, 8, 8)), (64, 64)) is None


@pytest.fixture(scope="module")
def begun() -> Iterator[tuple[openai.OpenAI, ParallelPipeline]]:
    """The embedded model's networks as a pipeline that begins with an image."""
    with ParallelPipeline.from_pretrained("embedded", devices="cpu", task="image-to-image") as pipe:
        generator = ImageGenerator(ServedModel(model="embedded", devices=("cpu",)))
        generator.open = lambda: generator.adopt(pipe)  # type: ignore[method-assign]
        service = ImageService(generator, ServerSettings(port=0))
        service.load()
        for client in served_client(service):
            yield client, pipe
        service.close()


def test_an_edit_is_that_of_the_pipeline(begun: tuple[openai.OpenAI, ParallelPipeline]) -> None:
    client, pipe = begun
    image = Image.effect_noise(SIZE, 60).convert("RGB")
    file = io.BytesIO()
    image.save(file, "PNG")
    found: Any = client.images.edit(
        image=("a.png", file.getvalue(), "image/png"),
        prompt=PROMPT,
        extra_body={"seed": 3, "strength": 0.5, "num_inference_steps": 4},
    )
    wanted = {
        strength: np.asarray(
            pipe(
                PROMPT,
                image=image,
                strength=strength,
                num_inference_steps=4,
                generator=torch.Generator().manual_seed(3),
            ).images[0]
        )
        for strength in (0.5, 1.0)
    }
    assert np.array_equal(image_of(found.data[0].b64_json), wanted[0.5])
    assert not np.array_equal(wanted[0.5], wanted[1.0])
    with pytest.raises(openai.BadRequestError, match="begins with an image"):
        client.images.generate(prompt=PROMPT)
