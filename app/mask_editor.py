"""An image that is painted over: Gradio's editor, whose files are checked before they are decoded."""

from collections.abc import Callable
from functools import wraps
from io import BytesIO
from typing import Any

import gradio as gr
from fastapi import HTTPException
from PIL import Image

from patchpar import PlanError
from patchpar.media.image_file import check_pixels

from .limits import FILE, IMAGE_FORMATS, MAX_IMAGE_PIXELS, check_bytes, check_size

MAX_LAYERS = 3  # of paint, of which the page's editor has one; each may be decoded to 160 MB
MAX_WAITING = 8  # images that have been sent for runs which have not begun; the oldest makes room


def mask_editor(label: str, **options: Any) -> gr.ImageEditor:
    """Hands over PIL images: background, layers, and all of it.

    Raises PlanError for images that are too large, and for more layers than MAX_LAYERS.

    No class of our own: for a subclass of a component Gradio writes a file beside its source.
    """
    editor = gr.ImageEditor(
        label=label,
        type="pil",
        sources=["upload", "clipboard"],
        transforms=None,
        layers=False,
        brush=gr.Brush(colors=["#ffffff"], color_mode="fixed"),
        format="png",
        **options,
    )
    editor.convert_and_format_image = _checked(editor.convert_and_format_image)
    editor.preprocess = _of_few_layers(editor.preprocess)
    editor.accept_blobs = _bounded(editor.accept_blobs, editor.blob_storage)
    return editor


def _checked(decode: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(decode)
    def decode_checked(file: Any, *args: Any, **kwargs: Any) -> Any:
        if file is not None:
            check(file)
        return decode(file, *args, **kwargs)

    return decode_checked


def _of_few_layers(decode: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """All layers may be one file, which is then decoded once for each."""

    @wraps(decode)
    def decode_few(painted: Any) -> Any:
        if painted is not None and len(painted.layers) > MAX_LAYERS:
            raise PlanError(f"the image has {len(painted.layers)} layers of paint: at most {MAX_LAYERS} are taken")
        return decode(painted)

    return decode_few


def _bounded(accept: Callable[[Any], None], waiting: dict[str, Any]) -> Callable[[Any], None]:
    """Images that the browser sends before the run that they are for: Gradio keeps any number, until that begins."""

    @wraps(accept)
    def accept_few(sent: Any) -> None:
        if str(sent.data.get("index") or "null") not in ("null", *map(str, range(MAX_LAYERS))):
            raise HTTPException(413, f"an image has at most {MAX_LAYERS} layers of paint")
        accept(sent)
        for oldest in list(waiting)[:-MAX_WAITING]:
            waiting.pop(oldest, None)

    return accept_few


def check(file: Any) -> None:
    """Raise PlanError for an image of too many bytes or pixels: a path's holder, or the bytes themselves."""
    path = getattr(file, "path", None)
    if path is not None:
        check_size(path)
    else:
        check_bytes(len(file))
    with Image.open(path or BytesIO(file), formats=IMAGE_FORMATS) as image:
        check_pixels(*image.size, FILE, MAX_IMAGE_PIXELS)
