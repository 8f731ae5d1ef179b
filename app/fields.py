"""Fields that several tabs have: what to draw, how large, how long."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from math import gcd
from typing import Any

import gradio as gr

from . import words
from .defaults import Defaults
from .orders import LARGEST_SEED, LEAST_SIDE, LONGEST_PROMPT, MOST_STEPS, GenerateRequest

CAPTIONS = (
    "a red house on the left and a pine on the right, green hills at sunset",
    "a yellow balloon on the right, a calm lake at night",
    "a yellow tower on the left, desert dunes at noon",
    "a white house on the left and a tree on the right, snowy mountains at noon",
)
SHOWN = ("download", "fullscreen")  # what a picture offers
UNIT = 64  # pixels between the places of a slider


@dataclass(frozen=True, slots=True)
class Fields:
    """Components whose values make a GenerateRequest, in the order of `names`."""

    prompt: gr.Textbox
    components: list[Any]

    @staticmethod
    def order(*values: Any) -> GenerateRequest:
        """What the components hold. Raises PlanError."""
        names = ("prompt", "negative", "width", "height", "steps", "guidance", "seed")
        return GenerateRequest.of(**dict(zip(names, values, strict=True)))


Begins = Callable[[Defaults], dict[str, Any]]


class Forms:
    """The fields of all tabs that begin with defaults, filled with the model's own once it has been loaded."""

    def __init__(self, before: Defaults) -> None:
        self._before = before
        self._begins: list[Begins] = []
        self.components: list[Any] = []

    def add(self, kind: Callable[..., Any], begins: Begins, **options: Any) -> Any:
        """Lay out a component of this kind. `begins`: arguments of it that the defaults give, "value" among them."""
        component = kind(**begins(self._before), **options)
        self._begins.append(begins)
        self.components.append(component)
        return component

    def filled(self, known: Defaults, values: Sequence[Any]) -> list[Any]:
        """What becomes of the components, which hold `values`: one that a person has changed keeps what it holds."""
        if known == self._before:
            return [gr.skip() for _ in self.components]
        return [
            gr.update(**self._changes(each, known, value)) for each, value in zip(self._begins, values, strict=True)
        ]

    def _changes(self, begins: Begins, known: Defaults, value: Any) -> dict[str, Any]:
        found = begins(known)
        return found if value == begins(self._before)["value"] else {**found, "value": value}


def picture_fields(forms: Forms, *, times: int = 1, most_steps: int = MOST_STEPS) -> Fields:
    """Lay them out. They begin with `times` the model's own size, and with its steps, `most_steps` at most."""
    prompt = gr.Textbox(CAPTIONS[0], label="Prompt", lines=2, max_length=LONGEST_PROMPT, submit_btn=False)
    sliding = partial(forms.add, gr.Slider, min_width=200)
    with gr.Row():
        width = sliding(lambda each: {"value": times * each.width, **_sides(each)}, label="Width")
        height = sliding(lambda each: {"value": times * each.height, **_sides(each)}, label="Height")
    with gr.Row():
        count = sliding(
            lambda each: {"value": min(each.steps, most_steps)}, minimum=1, maximum=MOST_STEPS, step=1, label="Steps"
        )
        seed = gr.Number(0, label="Seed", precision=0, minimum=0, maximum=LARGEST_SEED, min_width=200)
    with gr.Accordion("Guidance", open=False):
        info = "1 and below: none, and nothing to split"
        begins = {"minimum": 0, "maximum": 20, "step": 0.5, "label": "Guidance scale", "info": info}
        guidance = forms.add(gr.Slider, lambda each: {"value": each.guidance}, **begins)
        negative = gr.Textbox(label="Negative prompt", max_lines=2, max_length=LONGEST_PROMPT)
    return Fields(prompt, [prompt, negative, width, height, count, guidance, seed])


def _sides(known: Defaults) -> dict[str, int]:
    """The range of a slider for a side: from half of the model's own size to four times it."""
    sides = (known.height, known.width)
    least = max(LEAST_SIDE, min(sides) // 2 // UNIT * UNIT)
    return {"minimum": least, "maximum": 4 * max(sides), "step": gcd(UNIT, *sides)}


def settles(status: gr.HTML, hint: str, fields: Iterable[Any]) -> None:
    """An error in `status` is taken back, for `hint`, when a person changes one of the fields that it may be about."""
    instead = words.notice(hint) if hint else ""
    js = f"(status) => status.includes('class=\"state failed\"') ? {json.dumps(instead)} : status"
    gr.on([each.input for each in fields], None, status, status, js=js, show_progress="hidden")


def result(label: str, name: str, **options: Any) -> gr.Image:
    """Where a picture that was drawn is shown."""
    shown = {"elem_id": name, "elem_classes": ["drawn"], "format": "png", "buttons": [*SHOWN]}
    return gr.Image(label=label, interactive=False, **shown, **options)


def result_pair(label: str, name: str, **options: Any) -> gr.ImageSlider:
    """Where two of them are, under a slider."""
    return gr.ImageSlider(label=label, elem_id=name, format="png", interactive=False, buttons=[*SHOWN], **options)


def uploaded(label: str, **options: Any) -> gr.Image:
    """A picture from the person, as a file that nobody has decoded yet."""
    return gr.Image(label=label, type="filepath", image_mode=None, **options)


def captions(prompt: gr.Textbox) -> None:
    """Prompts that the embedded model understands."""
    gr.Examples([[text] for text in CAPTIONS], prompt, label="What the embedded model can draw", cache_examples=False)
