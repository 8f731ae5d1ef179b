"""Fields that several tabs have: what to draw, how large, how long."""

from dataclasses import dataclass
from typing import Any

import gradio as gr

from .orders import LARGEST_SEED, LONGEST_PROMPT, MOST_STEPS, Order

CAPTIONS = (
    "a red house on the left and a pine on the right, green hills at sunset",
    "a blue balloon on the right, a calm lake at night",
    "a yellow tower on the left, desert dunes at noon",
    "a white house on the left and a tree on the right, snowy mountains at noon",
)
SHOWN = ("download", "fullscreen")  # what a picture offers
UNIT = 64  # pixels between the places of a slider


@dataclass(frozen=True, slots=True)
class Fields:
    """Components whose values make an Order, in the order of `names`."""

    prompt: gr.Textbox
    components: list[Any]

    @staticmethod
    def order(*values: Any) -> Order:
        """What the components hold. Raises PlanError."""
        names = ("prompt", "negative", "width", "height", "steps", "guidance", "seed")
        return Order.of(**dict(zip(names, values, strict=True)))


def picture_fields(native: int, *, times: int = 1, steps: int = 20) -> Fields:
    """Lay them out, for a model of pictures of `native` pixels a side; they begin with `times` that."""
    least, most, side = native // 2, 4 * native, times * native
    prompt = gr.Textbox(CAPTIONS[0], label="Prompt", lines=2, max_length=LONGEST_PROMPT, submit_btn=False)
    with gr.Row():
        width = gr.Slider(least, most, side, step=UNIT, label="Width", min_width=200)
        height = gr.Slider(least, most, side, step=UNIT, label="Height", min_width=200)
    with gr.Row():
        count = gr.Slider(1, MOST_STEPS, steps, step=1, label="Steps", min_width=200)
        seed = gr.Number(0, label="Seed", precision=0, minimum=0, maximum=LARGEST_SEED, min_width=200)
    with gr.Accordion("Guidance", open=False):
        guidance = gr.Slider(
            0, 20, 4.0, step=0.5, label="Guidance scale", info="1 and below: none, and nothing to split"
        )
        negative = gr.Textbox(label="Negative prompt", max_lines=2, max_length=LONGEST_PROMPT)
    return Fields(prompt, [prompt, negative, width, height, count, guidance, seed])


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
