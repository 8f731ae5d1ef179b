"""No handler of the page ends in silence: whatever goes wrong in one is said where its answer would have been."""

import inspect
import logging
from collections.abc import Callable
from functools import wraps
from html import escape
from tempfile import NamedTemporaryFile
from typing import Any, TypeVar

import gradio as gr
from gradio.utils import get_upload_folder
from PIL import UnidentifiedImageError
from PIL.Image import DecompressionBombError

from patchpar import PatchparError

from .limits import FILE, GONE, MOST_PICTURE_PIXELS, PICTURES, bytes_of

H = TypeVar("H", bound=Callable[..., Any])
log = logging.getLogger(__name__)


def answered(failed: Callable[[str], Any] | None = None) -> Callable[[H], H]:
    """A decorator of handlers, functions and asynchronous generators of them, whose exceptions become sentences.

    `failed` makes what the handler fills out of a sentence; a handler that fills nothing goes without, and the page
    shows the sentence in its corner.
    """
    told = failed or _in_the_corner

    def decorate(handler: H) -> H:
        if inspect.isasyncgenfunction(handler):

            @wraps(handler)
            async def run(*args: Any, **kwargs: Any) -> Any:
                try:
                    async for found in handler(*args, **kwargs):
                        yield found
                except Exception as error:  # noqa: BLE001 (the last stop before the page)
                    yield told(sentence_for(error))
        else:

            @wraps(handler)
            def run(*args: Any, **kwargs: Any) -> Any:
                try:
                    return handler(*args, **kwargs)
                except Exception as error:  # noqa: BLE001 (as above)
                    return told(sentence_for(error))

        run.is_answered = True  # type: ignore[attr-defined]
        return run  # type: ignore[return-value]

    return decorate


def sentence_for(error: BaseException) -> str:
    """An error of a handler for the page: the package's own as they are; of any other the terminal has the rest."""
    if isinstance(error, PatchparError):
        return str(error)
    log.error("a handler of the page failed", exc_info=error)
    return f"This did not work here: {type(error).__name__}. The terminal of the server says where."


class AnsweredBlocks(gr.Blocks):  # type: ignore[misc]  # Gradio is not typed
    """A page that also says what goes wrong before a handler is called, where Gradio looks at files of uploads."""

    async def preprocess_data(self, block_fn: Any, inputs: list[Any], *args: Any, **kwargs: Any) -> Any:
        """What handlers are given. Raises gr.Error, which the page shows in its corner."""
        try:
            files = [_as_file(value) for value in inputs]
            return await super().preprocess_data(block_fn, files, *args, **kwargs)
        except Exception as error:
            cause = error if isinstance(error, PatchparError) else error.__cause__ or error
            if isinstance(error, gr.Error) and not isinstance(cause, OSError):
                raise
            raise gr.Error(escape(_sentence_for_upload(cause))) from error


def _as_file(value: Any) -> Any:
    """A picture within a request goes to a file: Gradio would decode it, of any size."""
    url = value.get("url") if isinstance(value, dict) else None
    if not isinstance(url, str) or not url.startswith("data:"):
        return value
    with NamedTemporaryFile(dir=get_upload_folder(), prefix="camera-", delete=False) as file:
        file.write(bytes_of(url))
    return {**value, "url": None, "path": file.name, "orig_name": None}


def _sentence_for_upload(error: BaseException) -> str:
    if isinstance(error, FileNotFoundError):
        return GONE
    if isinstance(error, UnidentifiedImageError):
        return f"{FILE} cannot be read as a picture: use {', '.join(PICTURES)}"
    if isinstance(error, DecompressionBombError):
        return f"{FILE} has too many pixels: at most {MOST_PICTURE_PIXELS / 1e6:.0f} million are taken"
    return sentence_for(error)


def _in_the_corner(sentence: str) -> Any:
    raise gr.Error(escape(sentence))
