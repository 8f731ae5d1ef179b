"""What an entry of the zoo of pipelines is: a pipeline class of diffusers in small, and a short call of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import diffusers
import torch
from diffusers.utils.import_utils import DummyObject

from tests.tiny import sample_images
from tests.tiny.image_pipelines import SIZE
from tests.tiny.weights import enliven, seeded

Guidance = Literal["one call", "three in one call", "a call each", "none"]
"""Whether the branches of guidance (two, if not three) are one call of the denoiser or one each; "none" without."""
THREE: Guidance = "three in one call"
Built = tuple[Any, dict[str, Any]]
"""A pipeline with random weights (CPU, fp32) and keyword arguments of a call with guidance on, if it has any."""

STEPS = 2
IMAGE: dict[str, Any] = {"image": sample_images.scene(), "strength": 0.99}
"""Arguments of an image-to-image pipeline."""
MASKED: dict[str, Any] = IMAGE | {"mask_image": sample_images.mask(), **SIZE}
"""Arguments of an inpainting pipeline."""
CONTROL: dict[str, Any] = {"control_image": sample_images.scene()}
"""Arguments of a pipeline with a ControlNet or control channels."""
SECOND_PROMPT = "two tall pines by a lake"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One class of pipeline.

    `build` gives the pipeline and keyword arguments of a call. `output_type` is "latent" unless the pipeline cannot
    return latents. `prompts`: the argument that becomes a list for axis `data`, empty where there is no batch, and
    `second` the other prompt of it.
    """

    name: str
    build: Callable[[], Built]
    guidance: Guidance = "one call"
    output_type: str = "latent"
    prompts: str = "prompt"
    second: Any = SECOND_PROMPT

    @property
    def plans(self) -> tuple[str, ...]:
        """What is tried; `data` where there are prompts for it."""
        branches = "cfg=3" if self.guidance == THREE else "cfg=2"
        return ("patch=2", branches, "patch=3", *(["data=2"] if self.prompts else []))

    def make(self) -> Built:
        """The same weights every time, and the arguments of a call. The caller's random state is left as it was."""
        with seeded(), torch.no_grad():  # without a graph, so that modules with weight_norm can be copied
            pipe, call = self.build()
            for component in pipe.components.values():
                if isinstance(component, torch.nn.Module):
                    enliven(component.float().eval().requires_grad_(False))
        assert type(pipe).__name__ == self.name, f"the entry of {self.name} builds a {type(pipe).__name__}"
        pipe.set_progress_bar_config(disable=True)
        return pipe, _short(pipe, call, self.output_type)


def _short(pipe: Any, call: dict[str, Any], output_type: str) -> dict[str, Any]:
    """The call with few steps, and with latents as its result, where the pipeline has such arguments."""
    parameters = inspect.signature(type(pipe).__call__).parameters
    usual = {"num_inference_steps": STEPS, "output_type": output_type}
    return {name: value for name, value in usual.items() if name in parameters} | call


def in_one_call(name: str) -> Guidance:
    """The guidance of a class whose branches are one call: with perturbed attention, or an image, there are three."""
    return THREE if "PAG" in name or "InstructPix2Pix" in name else "one call"


@cache
def pipeline_classes() -> Mapping[str, type]:
    """Every pipeline class of the installed diffusers, by name, without the base class.

    With those for which diffusers has only a placeholder here, since a package that they need is not installed.
    """
    found = {name: getattr(diffusers, name) for name in dir(diffusers) if name.endswith("Pipeline")}
    base = diffusers.DiffusionPipeline
    return {
        name: kind
        for name, kind in found.items()
        if inspect.isclass(kind) and kind is not base and (issubclass(kind, base) or isinstance(kind, DummyObject))
    }


def derived(source: Callable[[], Built], name: str, call: Mapping[str, Any], **components: Any) -> Built:
    """A pipeline of class `name` made of the components of another one, and `call` on top of its arguments.

    `components` are those that the source has not, or has in another form. An argument that is None is left out.
    """
    kind = getattr(diffusers, name)
    pipe, usual = source()
    parameters = inspect.signature(kind.__init__).parameters
    taken = {part: value for part, value in {**pipe.components, **_settings(pipe)}.items() if part in parameters}
    accepted = inspect.signature(kind.__call__).parameters
    arguments = {key: value for key, value in (usual | dict(call)).items() if key in accepted and value is not None}
    return kind(**taken | components), arguments


def builder(
    source: Callable[[], Built], name: str, call: Mapping[str, Any], **parts: Callable[[], Any]
) -> Callable[[], Built]:
    """What makes the pipeline of `derived`; `parts` make its other components, each time it is built."""
    return lambda: derived(source, name, call, **{part: make() for part, make in parts.items()})


def _settings(pipe: Any) -> dict[str, Any]:
    """What the pipeline was made with beside its components, such as requires_safety_checker."""
    return {key: value for key, value in configuration(pipe).items() if not isinstance(value, tuple)}


def configuration(model: Any) -> dict[str, Any]:
    """The options a model was made with, without what diffusers notes beside them."""
    return {name: value for name, value in model.config.items() if not name.startswith("_")}


def changed(model: Any, **changes: Any) -> Any:
    """A model of the same class and configuration but for `changes`."""
    return type(model)(**configuration(model) | changes)
