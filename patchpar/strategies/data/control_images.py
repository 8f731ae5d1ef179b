"""Images that guide several ControlNets, or one in several modes, on the ranks of axis `data`.

diffusers reads the list as one entry for each ControlNet or mode, and within it one image for all prompts or one each;
two pipelines read a list of lists the other way round.

    two ControlNets, prompts a b     [edges, depth]                           rank 0: [edges, depth]
                                     [[edges a, edges b], [depth a, depth b]] rank 0: [[edges a], [depth a]]
    of a pipeline in BY_PROMPT       [[edges a, depth a], [edges b, depth b]] rank 0: [[edges a, depth a]]
"""

from collections.abc import Callable, Mapping
from typing import Any

from patchpar.errors import PlanError

BY_PROMPT = ("StableDiffusionControlNetPipeline", "StableDiffusionControlNetPAGPipeline")
"""Pipelines whose list of lists has an entry for each prompt, with an image for each ControlNet in it."""


def listed_by_condition(pipe: Any, kwargs: Mapping[str, Any]) -> str:
    """Return the argument of a call whose list has an entry for each ControlNet or mode; empty where none has."""
    controlnet = getattr(pipe, "controlnet", None)
    controlnet = getattr(controlnet, "_orig_mod", controlnet)
    if not (hasattr(controlnet, "nets") or "Union" in type(controlnet).__name__):
        return ""
    name = "control_image" if "control_image" in kwargs else "image"
    return name if isinstance(kwargs.get(name), list) else ""


def divided_conditions(
    pipe: Any, name: str, value: list[Any], total: int, own: Callable[[list[Any]], list[Any]]
) -> list[Any]:
    """Return the images for some of `total` prompts. `own`: their part of what has an entry for each prompt.

    Raises PlanError where the prompt of an image is unknown.
    """
    nested = [each for each in value if isinstance(each, list)]
    if "Union" in type(pipe.controlnet).__name__ and nested:
        raise PlanError(
            f"{name} holds lists of images for the modes of each ControlNet: whether these are of one prompt is "
            "unknown, so they cannot be divided between data ranks. Use data=1 for this call"
        )
    if nested and type(pipe).__name__ in BY_PROMPT:
        return own(_one_each(name, value, total)) if len(value) > 1 else value
    return [own(_one_each(f"an entry of {name}", each, total)) if _is_several(each) else each for each in value]


def _is_several(entry: Any) -> bool:
    """Whether it has several images: a list, or an array [B, ...]."""
    several = isinstance(entry, list) or len(getattr(entry, "shape", ())) > 3
    return several and len(entry) > 1


def _one_each(what: str, images: Any, total: int) -> Any:
    if len(images) != total:
        raise PlanError(
            f"{what} has {len(images)} images for {total} prompts: give one for all, or one for each prompt"
        )
    return images
