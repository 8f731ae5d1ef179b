"""Arguments of the short calls that a server makes before it is ready."""

from collections.abc import Callable, Mapping
from typing import Any

from patchpar.errors import PlanError, WorkerError
from patchpar.models.info import PipelineInfo
from patchpar.models.task import ANY_PROMPT
from patchpar.plan.plan import Plan

STEPS = 2
FRAMES = 5
"""Of a video: the least that every video autoencoder takes apart from a single frame."""
SIDE = 512
"""Height and width in pixels of the image for a pipeline that has no size of its own."""
WARM_UP: Mapping[str, Any] = {"prompt": ANY_PROMPT, "num_inference_steps": STEPS, "num_frames": FRAMES}


def warm_up_arguments(model: PipelineInfo, plan: Plan | str) -> tuple[dict[str, Any], tuple[int, int]]:
    """Return the arguments of a call of two steps with `plan`, and its width and height in pixels."""
    from PIL import Image

    known = model.parameters
    arguments = {name: value for name, value in WARM_UP.items() if name in known}
    if isinstance(plan, Plan) and plan.cfg > 1 and "negative_prompt" in known:
        arguments["negative_prompt"] = ""  # without one some pipelines have no second branch
    height, width = model.size(arguments) or (SIDE, SIDE)
    if "image" in known:
        arguments["image"] = Image.new("RGB", (width, height), "grey")
    if "mask_image" in known:
        arguments["mask_image"] = Image.new("L", (width, height), 255)
    if "strength" in known:
        arguments["strength"] = 1.0  # all steps
    return arguments, (width, height)


def refusal_of(call: Callable[[], object]) -> str:
    """Return why a call is refused, or fails on a worker; "" if it ends well."""
    try:
        call()
    except (PlanError, WorkerError) as error:
        return str(error).partition("\n")[0]
    return ""
