"""Fields that several tabs have: what to generate, how large, how long."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from math import gcd
from typing import Any

import gradio as gr

from . import html
from .defaults import Defaults
from .handler_errors import reports_errors
from .loras import loras_of
from .requests import MAX_STEPS, MIN_SIDE, GenerateRequest
from .sizes import RATIOS, size_of_ratio, unit_of

CAPTIONS = (
    "a red house on the left and a pine on the right, green hills at sunset",
    "a yellow balloon on the right, a calm lake at night",
    "a yellow tower on the left, desert dunes at noon",
    "a white house on the left and a tree on the right, snowy mountains at noon",
)
GUIDANCE = "Guidance scale"  # 1: none, and then no branches to split
IMAGE_BUTTONS = ["download", "fullscreen"]  # under each image
NAMES = ("prompt", "negative", "width", "height", "steps", "guidance", "seed")  # fields of an image, in their order
ANY_SEED_JS = "() => crypto.getRandomValues(new Uint32Array(1))[0]"
UNIT = 64  # pixels; step of the size sliders


@dataclass(frozen=True, slots=True)
class Fields:
    """Components whose values make a GenerateRequest, in the order of `names`."""

    prompt: gr.Textbox
    components: list[Any]

    @staticmethod
    def request(*values: Any) -> GenerateRequest:
        """The request that the components describe, and the page's LoRAs after them. Raises PlanError."""
        own, loras = values[: len(NAMES)], values[len(NAMES) :]
        return GenerateRequest.of(**dict(zip(NAMES, own, strict=True)), loras=loras_of(loras))

    @staticmethod
    def values(request: GenerateRequest) -> list[Any]:
        """Values of the components that describe a request."""
        return [getattr(request, name) for name in NAMES]


InitialValues = Callable[[Defaults], dict[str, Any]]


class Forms:
    """The fields of all tabs that have defaults; updated with the model's own defaults once it is loaded."""

    def __init__(self, before: Defaults, known: Callable[[], Defaults] | None = None) -> None:
        self._before = before
        self.known = known or (lambda: before)
        """The defaults of the model that is loaded now."""
        self._initial: list[InitialValues] = []
        self.components: list[Any] = []
        self.loras: list[Any] = []
        """The fields of the page's LoRAs, which belong to each request; empty on a page that has none."""

    def add(self, kind: Callable[..., Any], initial: InitialValues, **options: Any) -> Any:
        """Add a component of this kind. `initial`: its arguments that depend on the defaults, "value" among them."""
        component = kind(**initial(self._before), **options)
        self._initial.append(initial)
        self.components.append(component)
        return component

    def has_defaults_of(self, known: Defaults) -> bool:
        """Whether the components were made with these defaults."""
        return known == self._before

    def filled(self, known: Defaults, values: Sequence[Any]) -> list[Any]:
        """Updates of the components, whose current values are `values`; a value that a user has changed stays."""
        if self.has_defaults_of(known):
            return [gr.skip() for _ in self.components]
        return [
            gr.update(**self._changes(each, known, value)) for each, value in zip(self._initial, values, strict=True)
        ]

    def replaced(self, known: Defaults) -> list[Any]:
        """Updates of all components to the defaults of another model, whatever their values."""
        return [gr.update(**initial(known)) for initial in self._initial]

    def _changes(self, initial: InitialValues, known: Defaults, value: Any) -> dict[str, Any]:
        found = initial(known)
        return found if value == initial(self._before)["value"] else {**found, "value": value}


def image_fields(forms: Forms, *, times: int = 1, max_steps: int = MAX_STEPS) -> Fields:
    """Add the fields. Initial size: `times` the model's own; initial steps: the model's, at most `max_steps`."""
    prompt = gr.Textbox(CAPTIONS[0], label="Prompt", lines=2, submit_btn=False)
    negative = gr.Textbox(label="Negative prompt", max_lines=2)
    sliding = partial(forms.add, gr.Slider, min_width=200)
    with gr.Row():
        width = sliding(lambda each: {"value": times * each.width, **_sides(each)}, label="Width")
        height = sliding(lambda each: {"value": times * each.height, **_sides(each)}, label="Height")
    _ratios(forms, times, [width, height])
    with gr.Row():
        count = sliding(
            lambda each: {"value": min(each.steps, max_steps)}, minimum=1, maximum=MAX_STEPS, step=1, label="Steps"
        )
        scale = {"minimum": 0, "maximum": 20, "step": 0.5, "label": GUIDANCE}
        guidance = sliding(lambda each: {"value": each.guidance}, **scale)
    seed = seed_field()
    return Fields(prompt, [prompt, negative, width, height, count, guidance, seed])


def _ratios(forms: Forms, times: int, sides: list[Any]) -> None:
    """Add a button for each ratio, which sets width and height."""
    with gr.Row(elem_classes=["ratios"]):
        for name in RATIOS:
            button = gr.Button(name, size="sm", min_width=44)
            button.click(_size_of(name, forms, times), None, sides, show_progress="hidden")


def _size_of(name: str, forms: Forms, times: int) -> Callable[[], tuple[int, int]]:
    def size() -> tuple[int, int]:
        return size_of_ratio(name, forms.known(), times)

    size.__name__ = f"size_{name.replace(':', '_')}"
    return reports_errors()(size)


def seed_field() -> gr.Number:
    """A seed, and a button that chooses one by chance."""
    with gr.Row(equal_height=False):
        seed = gr.Number(0, label="Seed", precision=0, min_width=200, scale=3)
        dice = gr.Button("Random seed", size="sm", min_width=110, scale=1, elem_classes=["dice"])
    dice.click(None, None, seed, js=ANY_SEED_JS, show_progress="hidden")
    return seed


def _sides(known: Defaults) -> dict[str, int]:
    """Range of a size slider: from half of the model's own size to four times it."""
    sides = (known.height, known.width)
    least = max(MIN_SIDE, min(sides) // 2 // UNIT * UNIT)
    return {"minimum": least, "maximum": 4 * max(sides), "step": gcd(UNIT, unit_of(known), *sides)}


def clears_error(status: gr.HTML, hint: str, fields: Iterable[Any]) -> None:
    """Replace an error in `status` by `hint` when the user changes one of the fields."""
    instead = html.notice(hint) if hint else ""
    js = f"(status) => status.includes('class=\"state failed\"') ? {json.dumps(instead)} : status"
    gr.on([each.input for each in fields], None, status, status, js=js, show_progress="hidden")


def result(label: str, name: str, **options: Any) -> gr.Image:
    """An output image."""
    update = {"elem_id": name, "elem_classes": ["generated"], "format": "png", "buttons": IMAGE_BUTTONS}
    return gr.Image(label=label, interactive=False, **update, **options)


def result_pair(label: str, name: str, **options: Any) -> gr.ImageSlider:
    """Two output images under a slider."""
    return gr.ImageSlider(label=label, elem_id=name, format="png", interactive=False, buttons=IMAGE_BUTTONS, **options)


def uploaded(label: str, **options: Any) -> gr.Image:
    """An image upload, handed over as a path: the file is not decoded here."""
    return gr.Image(label=label, type="filepath", image_mode=None, **options)


def captions(prompt: gr.Textbox) -> None:
    """Example prompts for the embedded model."""
    gr.Examples([[text] for text in CAPTIONS], prompt, label="Prompts of the embedded model", cache_examples=False)
