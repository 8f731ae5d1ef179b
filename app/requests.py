"""Requests of a page, checked before they are queued, so that errors are reported at once."""

import re
from dataclasses import dataclass
from typing import Any

from patchpar import PlanError
from patchpar.plan.scalars import is_whole
from patchpar.serving.lora_registry import RegisteredLora

MAX_PROMPT = 1000  # characters
MAX_STEPS = 150
MAX_PIXELS = 4096 * 4096
MIN_SIDE = 64
MAX_SEED = 2**53 - 1  # numbers in JavaScript are exact up to here
HALF = re.compile("[\ud800-\udfff]")  # of an emoji that was cut in two
WHOLE = ("height", "width", "steps", "seed")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """A request for one image. Sizes in pixels. `loras`: those that act, and no others. Raises PlanError."""

    prompt: str
    negative: str = ""
    height: int = 256
    width: int = 256
    steps: int = 20
    guidance: float = 4.0
    seed: int = 0
    loras: tuple[RegisteredLora, ...] = ()

    def __post_init__(self) -> None:
        check_text("prompt", self.prompt)
        check_text("negative prompt", self.negative)
        if not self.prompt.strip():
            raise PlanError("there is no prompt: describe the image")
        check_whole("steps", self.steps, 1, MAX_STEPS)
        check_whole("seed", self.seed, 0, MAX_SEED)
        for name in ("height", "width"):
            check_whole(name, getattr(self, name), MIN_SIDE, MAX_PIXELS // MIN_SIDE)
        if self.height * self.width > MAX_PIXELS:
            raise PlanError(f"{self.height} x {self.width} pixels: at most {MAX_PIXELS} in all, as 4096 x 4096")
        if not 0 <= self.guidance <= 50:
            raise PlanError(f"guidance scale {self.guidance:g}: it is a number from 0 to 50")

    @classmethod
    def of(cls, **fields: Any) -> "GenerateRequest":
        """From the fields of a page; an empty field is None. Raises PlanError."""
        fields = {**fields, "negative": fields.get("negative") or ""}  # an empty text may come as None
        missing = [name for name, value in fields.items() if value is None]
        if missing:
            raise PlanError(f"{missing[0]} is empty: fill it in")
        whole = {name: as_whole(fields[name]) for name in WHOLE if name in fields}
        return cls(**{**fields, **whole})

    def check_strength(self, strength: float) -> None:
        """Raise PlanError for a strength, as of diffusers' image-to-image pipelines, that leaves no step."""
        if int(self.steps * strength) < 1:
            raise PlanError(f"{self.steps} steps, of which strength {strength:g} leaves none: use more of either")

    def arguments(self, known: Any) -> dict[str, Any]:
        """Arguments of the pipeline's call. `known`: names of the arguments that it takes.

        Raises PlanError for a negative prompt that it does not take: without it the image would be another one.
        """
        from torch import Generator

        if self.negative and "negative_prompt" not in known:
            raise PlanError("this model takes no negative prompt: leave that field empty")

        arguments = {
            "prompt": self.prompt,
            "negative_prompt": self.negative or None,
            "height": self.height,
            "width": self.width,
            "guidance_scale": self.guidance,
        }
        usable = {name: value for name, value in arguments.items() if value is not None and name in known}
        generator = Generator("cpu").manual_seed(self.seed)
        return {**usable, "num_inference_steps": self.steps, "generator": generator}


def check_text(what: str, text: Any) -> None:
    """Raise PlanError unless it is a text of MAX_PROMPT characters at most that can be written to a file."""
    if not isinstance(text, str):
        raise PlanError(f"the {what} is a {type(text).__name__}: give a text")
    if len(text) > MAX_PROMPT:
        raise PlanError(f"the {what} has {len(text)} characters: at most {MAX_PROMPT}")
    if half := HALF.search(text):
        raise PlanError(f"the {what} has half a character at place {half.start() + 1}: delete it, or write it again")


def as_whole(value: Any) -> Any:
    """20 for 20.0, which number fields send."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def check_whole(name: str, value: Any, least: int, limit: int) -> None:
    """Raise PlanError unless the value is a whole number in these limits."""
    if not is_whole(value, least, limit):
        raise PlanError(f"{name} {value!r}: it is a whole number from {least} to {limit}")
