"""Errors of event handlers become messages on the page, shown where the handler's output would have been."""

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

from patchpar import PatchparError, PlanError

from .limits import FILE, GONE, IMAGE_FORMATS, MAX_IMAGE_PIXELS, bytes_of

H = TypeVar("H", bound=Callable[..., Any])
log = logging.getLogger(__name__)


def reports_errors(failed: Callable[[str], Any] | None = None) -> Callable[[H], H]:
    """Decorator of event handlers (functions or asynchronous generators): exceptions become messages on the page.

    `failed` makes what the handler fills out of a sentence; a handler that fills nothing goes without, and the page
    shows the sentence in its corner.
    """
    report = failed or _as_toast

    def decorate(handler: H) -> H:
        if inspect.isasyncgenfunction(handler):

            @wraps(handler)
            async def run(*args: Any, **kwargs: Any) -> Any:
                try:
                    async for found in handler(*args, **kwargs):
                        yield found
                except Exception as error:  # noqa: BLE001 (nothing above but Gradio)
                    yield report(error_message(error))
        else:

            @wraps(handler)
            def run(*args: Any, **kwargs: Any) -> Any:
                try:
                    return handler(*args, **kwargs)
                except Exception as error:  # noqa: BLE001 (as above)
                    return report(error_message(error))

        run.reports_errors = True  # type: ignore[attr-defined]
        return run  # type: ignore[return-value]

    return decorate


def error_message(error: BaseException) -> str:
    """Message for the page: the package's own errors as they are; of others only the kind (the log has the rest)."""
    if isinstance(error, PatchparError):
        return str(error)
    log.error("a handler of the page failed", exc_info=error)
    return f"Internal error: {type(error).__name__}. The traceback is in the server's terminal."


class ErrorReportingBlocks(gr.Blocks):  # type: ignore[misc]  # Gradio is not typed
    """Blocks that also report errors raised before a handler is called, where Gradio preprocesses uploads."""

    async def preprocess_data(self, block_fn: Any, inputs: list[Any], *args: Any, **kwargs: Any) -> Any:
        """Inputs of a handler. Raises gr.Error, which the page shows as a toast."""
        try:
            _check_here(inputs)
            files = [_as_file(value) for value in inputs]
            return await super().preprocess_data(block_fn, files, *args, **kwargs)
        except Exception as error:
            cause = error if isinstance(error, PatchparError) else error.__cause__ or error
            if isinstance(error, gr.Error) and not isinstance(cause, OSError):
                raise
            raise gr.Error(escape(_upload_error_message(cause))) from error


def _check_here(value: Any) -> None:
    """Raise PlanError for a file that is an address: Gradio would fetch it, from any server and of any size."""
    if isinstance(value, dict):
        if "://" in str(value.get("path")):
            raise PlanError(f"{FILE} is an address: no other server is asked for files. Choose one of this machine")
        value = [*value.values()]
    for each in value if isinstance(value, list) else ():
        _check_here(each)


def _as_file(value: Any) -> Any:
    """Write an image sent as a `data:` URL to a file: Gradio would decode it, whatever its size."""
    url = value.get("url") if isinstance(value, dict) else None
    if not isinstance(url, str) or not url.startswith("data:"):
        return value
    with NamedTemporaryFile(dir=get_upload_folder(), prefix="camera-", delete=False) as file:
        file.write(bytes_of(url))
    return {**value, "url": None, "path": file.name, "orig_name": None}


def _upload_error_message(error: BaseException) -> str:
    if isinstance(error, FileNotFoundError):
        return GONE
    if isinstance(error, UnidentifiedImageError):
        return f"{FILE} cannot be read as an image: use {', '.join(IMAGE_FORMATS)}"
    if isinstance(error, DecompressionBombError):
        return f"{FILE} has too many pixels: at most {MAX_IMAGE_PIXELS / 1e6:.0f} million are taken"
    return error_message(error)


def _as_toast(message: str) -> Any:
    raise gr.Error(escape(message))
