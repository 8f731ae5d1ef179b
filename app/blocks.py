"""The page's blocks: outputs that a handler leaves as they are cost nothing, and previews next to nothing."""

from base64 import b64encode
from copy import copy
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import gradio as gr

from .handler_errors import ErrorReportingBlocks
from .job_queue import JobView

UNKNOWN = object()
QUALITY = 90  # of JPEG: a preview has a pixel for each of the latents, and is blurred between them


@dataclass(frozen=True, slots=True)
class Preview:
    """A PIL image for an image output, sent within the message: no file is written, and none has to be fetched."""

    image: Any

    @property
    def value(self) -> dict[str, Any]:
        """What the browser shows. Without a path, which Gradio would complete to an address of its own."""
        file = BytesIO()
        self.image.save(file, "JPEG", quality=QUALITY)
        return {"path": None, "url": f"data:image/jpeg;base64,{b64encode(file.getvalue()).decode()}"}


def preview_of(view: JobView | None) -> Any:
    """Output for the preview of a job that has not ended, as long as there is one."""
    return gr.skip() if view is None or view.preview is None else Preview(view.preview)


class PageBlocks(ErrorReportingBlocks):
    """Blocks that only postprocess what a handler has changed.

    Gradio builds a component and its description anew for each `gr.skip()`, and writes each image to a file: 15 to 30
    ms for each message of a job, on a core that may be one of a rank.
    """

    async def postprocess_data(self, block_fn: Any, predictions: Any, state: Any) -> list[Any]:
        """Outputs for the browser, one for each of `block_fn.outputs`."""
        outputs = block_fn.outputs
        if len(outputs) < 2 or isinstance(predictions, dict) or len(predictions) != len(outputs):
            found: list[Any] = await super().postprocess_data(block_fn, predictions, state)
            return found
        ready = [_ready_output(*pair) for pair in zip(outputs, predictions, strict=True)]
        others = [number for number, value in enumerate(ready) if value is UNKNOWN]
        if others:
            part, values = copy(block_fn), [predictions[number] for number in others]
            part.outputs = [outputs[number] for number in others]
            given = values if len(values) > 1 else values[0]
            for number, value in zip(others, await super().postprocess_data(part, given, state), strict=True):
                ready[number] = value
        return ready


def _ready_output(component: Any, value: Any) -> Any:
    """What the browser gets for a value that Gradio need not process; UNKNOWN for others."""
    if isinstance(value, Preview):
        return value.value
    if isinstance(value, dict) and value == gr.skip():
        return None if component.stateful else value
    return UNKNOWN
