"""The LoRAs of a page, above its tabs: a file, a folder or a hub name each, and a weight."""

from typing import Any

import gradio as gr

from . import html
from .loras import MAX_LORAS, MAX_WEIGHT

HINT = (
    "Files, folders or hub names of safetensors for the loaded model. They act in Image, Edit, Compare and High "
    "resolution of this page; streams have none."
)


def lora_fields() -> list[Any]:
    """Add the fields: in turn where a LoRA is, and its weight."""
    found: list[Any] = []
    with gr.Accordion("LoRA", open=False, elem_id="lora"):
        gr.HTML(html.notice(HINT))
        for number in range(1, MAX_LORAS + 1):
            with gr.Row():
                name = f"LoRA {number}"
                found.append(
                    gr.Textbox(
                        label=name,
                        placeholder="ink.safetensors, a folder, or org/name",
                        max_lines=1,
                        scale=3,
                        elem_id=f"lora-{number}",
                    )
                )
                found.append(
                    gr.Slider(-MAX_WEIGHT, MAX_WEIGHT, 1, step=0.05, label=f"Weight of {name}", scale=2, min_width=160)
                )
    return found
