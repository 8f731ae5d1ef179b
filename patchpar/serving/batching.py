"""Several requests of one small image each as one call with a batch, a generator for each image.

An image of a batch equals the one made alone to rounding, which a server checks with its own model before it joins any.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from patchpar.serving.generated import FinishedCall, GeneratedImages
from patchpar.serving.image_call import ImageCall
from patchpar.serving.partial_images import CompletedImage

MOST_PIXELS = 512 * 512
"""Of an image in a batch: larger ones fill a device alone."""
BOUND = 1e-5
"""Most relative error of an image of a batch."""
PER_IMAGE = ("prompt", "negative_prompt")
SMALLEST = 1e-12
SCALARS = (bool, int, float, str, type(None))


def batch_key(call: ImageCall, *, is_exact: bool) -> Hashable | None:
    """Return what requests of one batch have in common; None for one that is made alone.

    `is_exact`: it asks for the image that it would be alone, bit for bit.
    """
    shared = {name: value for name, value in call.arguments.items() if name not in PER_IMAGE}
    is_plain = all(isinstance(value, SCALARS) for value in shared.values())
    width, height = call.size
    if is_exact or call.count > 1 or call.partial_images or not is_plain or width * height > MOST_PIXELS:
        return None
    given = tuple(name in call.arguments for name in PER_IMAGE)
    return given, tuple(sorted(shared.items())), str(call.plan), call.degree, tuple(sorted(call.loras.items()))


def seeded(call: ImageCall, seed: int) -> dict[str, Any]:
    """Return the arguments of a call with a generator of its own."""
    from torch import Generator

    return {**call.arguments, "generator": Generator("cpu").manual_seed(seed)}


def batch_arguments(calls: Sequence[ImageCall]) -> dict[str, Any]:
    """Return the arguments of one call of the pipeline that makes the image of each of several."""
    from torch import Generator

    shared = dict(calls[0].arguments)
    lists = {name: [call.arguments[name] for call in calls] for name in PER_IMAGE if name in shared}
    return {**shared, **lists, "generator": [Generator("cpu").manual_seed(call.seed) for call in calls]}


def batch_results(made: FinishedCall, images: Sequence[Any], tokens: Sequence[int]) -> list[GeneratedImages]:
    """Return what each request gets of a call. `tokens`: of each prompt. The first one has the call's statistics."""
    found = []
    for number, (image, count) in enumerate(zip(images, tokens, strict=True)):
        done = CompletedImage(image_index=0, image=image, figures=made.figures, reason=made.reason, prompt_tokens=count)
        found.append(GeneratedImages((done,), () if number else (made.run,)))
    return found


def error_of_batch(
    made: Callable[[Mapping[str, Any]], Any], arguments: Mapping[str, Any], size: tuple[int, int]
) -> float:
    """Return the largest relative error of two images of one call, to those made alone.

    `made`: returns the images [H, W, 3] of a call with these arguments. `size`: width and height in pixels.
    """
    import numpy as np

    calls = [ImageCall(arguments={**arguments, "output_type": "np"}, seed=seed, count=1, size=size) for seed in (0, 1)]
    alone = [made(seeded(call, call.seed))[0] for call in calls]
    together = made(batch_arguments(calls))
    norms = [
        (float(np.linalg.norm(found - wanted)), float(np.linalg.norm(wanted)))
        for found, wanted in zip(together, alone, strict=True)
    ]
    return max(error / max(whole, SMALLEST) for error, whole in norms)
