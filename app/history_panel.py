"""The page's last images, below the result, and what sets the fields: one of them, or a PNG file."""

from pathlib import Path
from typing import Any

import gradio as gr

from patchpar import PlanError

from . import html
from .fields import Fields
from .handler_errors import reports_errors
from .image_history import ImageHistory
from .image_parameters import loras_in, read_parameters
from .requests import GenerateRequest
from .state import AppState

COLUMNS = 6
FIELDS = 7  # of `Fields`
HISTORY_OUTPUTS = 3  # of `updates`: panel, thumbnails, chosen image
UNCHANGED = (gr.skip(),) * HISTORY_OUTPUTS


class HistoryPanel:
    """Event handlers."""

    def __init__(self, state: AppState) -> None:
        self._state = state

    def updates(self, owner: str) -> tuple[Any, Any, str]:
        """Panel, thumbnails, chosen image: the newest."""
        files = [str(path) for path in self._history.thumbnails(owner)]
        return gr.update(visible=bool(files)), files, ""

    @reports_errors()
    def refresh(self, owner: str) -> tuple[Any, Any, str]:
        """A job of the tab has ended, or the tab was opened: other tabs may have added images."""
        return self.updates(owner)

    @reports_errors(lambda message: (gr.skip(), html.failure(message), gr.skip(), gr.skip()))
    def choose(self, owner: str, event: gr.SelectData) -> tuple[Any, ...]:
        """A thumbnail was chosen: (image, status, parameters, name of the image)."""
        name = Path(event.value["image"]["orig_name"]).stem
        path, request = self._history.path(owner, name), self._history.request(owner, name)
        return str(path), html.notice("From the history."), html.pairs(_facts(request)), name

    @reports_errors(lambda message: (html.failure(message), *[gr.skip()] * FIELDS))
    def reuse(self, owner: str, name: str) -> list[Any]:
        """Status and fields: those of the chosen image, or the newest."""
        path = self._path(owner, name)
        return _filled(read_parameters(path), loras_in(path))

    @reports_errors(lambda message: (html.failure(message), gr.skip()))
    def reuse_seed(self, owner: str, name: str) -> list[Any]:
        """Status and seed."""
        seed = read_parameters(self._path(owner, name)).seed
        return [html.notice(f"Seed {seed}."), seed]

    @reports_errors(lambda message: (html.failure(message), *[gr.skip()] * FIELDS))
    def read(self, path: str | None) -> list[Any]:
        """Status and fields: those that a PNG file was generated with."""
        request = read_parameters(path)
        return _filled(request, loras_in(str(path)))

    def _path(self, owner: str, name: str) -> Path:
        names = self._history.names(owner)
        if not names:
            raise PlanError("there is no image yet: generate one first")
        return self._history.path(owner, name or names[0])

    @property
    def _history(self) -> ImageHistory:
        return self._state.history

    def build_reader(self) -> gr.File:
        """Add the file whose parameters set the fields."""
        with gr.Accordion("Parameters from an image", open=False):
            return gr.File(
                label="PNG generated here, by AUTOMATIC1111's web UI or by ComfyUI",
                file_types=[".png"],
                height=120,
                elem_id="image-parameters",
            )

    def build(self, owner: gr.State, fields: Fields, outputs: tuple[Any, Any, Any]) -> list[Any]:
        """Add the panel. `outputs`: image, status, facts. Returns the outputs of `updates`."""
        image, status, facts = outputs
        chosen = gr.State("")
        with gr.Column(visible=False) as panel:
            with gr.Row():
                everything = gr.Button("Reuse parameters", size="sm", elem_id="image-reuse")
                seed = gr.Button("Reuse seed", size="sm", elem_id="image-reuse-seed")
            gallery = gr.Gallery(
                label="History",
                columns=COLUMNS,
                object_fit="cover",
                allow_preview=False,
                interactive=False,
                buttons=[],
                elem_id="image-history",
            )
        gallery.select(self.choose, owner, [image, status, facts, chosen], show_progress="hidden")
        everything.click(self.reuse, [owner, chosen], [status, *fields.components], show_progress="hidden")
        seed.click(self.reuse_seed, [owner, chosen], [status, fields.components[-1]], show_progress="hidden")
        return [panel, gallery, chosen]


def _filled(request: GenerateRequest, loras: str) -> list[Any]:
    """`loras`: those of the image, whose files only a person can name."""
    more = f" It was generated with LoRA {loras}: choose that under LoRA." if loras else ""
    return [html.notice(f"The fields have the parameters of that image.{more}"), *Fields.values(request)]


def _facts(request: GenerateRequest) -> list[tuple[str, str]]:
    return [
        ("Prompt", request.prompt),
        *([("Negative prompt", request.negative)] if request.negative else []),
        ("Size", f"{request.width} x {request.height}"),
        ("Steps", f"{request.steps}, guidance scale {request.guidance:g}, seed {request.seed}"),
    ]
