"""An image that is painted over: Gradio's editor, whose files are checked before they are decoded."""

from collections.abc import Callable
from functools import wraps
from io import BytesIO
from typing import Any

import gradio as gr
from PIL import Image

from patchpar import PlanError
from patchpar.models.image_file import check_pixels

from .limits import FILE, IMAGE_FORMATS, MAX_BYTES, MAX_IMAGE_PIXELS, check_size


def mask_editor(label: str, **options: Any) -> gr.ImageEditor:
    """Hands over PIL images: background, layers, and all of it. Raises PlanError for images that are too large.

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
    return editor


def _checked(decode: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(decode)
    def decode_checked(file: Any, *args: Any, **kwargs: Any) -> Any:
        if file is not None:
            check(file)
        return decode(file, *args, **kwargs)

    return decode_checked


def check(file: Any) -> None:
    """Raise PlanError for an image of too many bytes or pixels: a path's holder, or the bytes themselves."""
    path = getattr(file, "path", None)
    if path is not None:
        check_size(path)
    elif len(file) > MAX_BYTES:
        raise PlanError(f"{FILE} has {len(file) / 2**20:.1f} MB: at most {MAX_BYTES / 2**20:.0f} MB are taken")
    with Image.open(path or BytesIO(file), formats=IMAGE_FORMATS) as image:
        check_pixels(*image.size, FILE, MAX_IMAGE_PIXELS)
