"""Refusals of a server that does not accept requests now, or not those of other models; and by pipelines."""

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from patchpar.errors import PatchparError
from patchpar.launch.remote_errors import has_broken_device
from patchpar.models.refused_calls import refusal_by_diffusers, refusal_of_steps
from patchpar.serving.image_call import STEPS
from patchpar.serving.job import Cancelled, Suspended
from patchpar.serving.out_of_memory import is_out_of_memory
from patchpar.serving.pipeline_fields import PipelineFields
from patchpar.serving.request_error import RequestError

log = logging.getLogger(__name__)
RETRY_SECONDS = 5
PARAMS = {
    **{name: name for name in PipelineFields.model_fields},
    "height": "size",
    "width": "size",
    "mask_image": "mask",
    "image": "image",
}
"""Fields of requests by the names that errors of pipelines have for them."""


def loading() -> RequestError:
    """Return the refusal while the model is loaded."""
    return RequestError("the model is being loaded", status=503, code="loading", retry_after=RETRY_SECONDS)


def draining() -> RequestError:
    """Return the refusal while the server ends."""
    return RequestError(
        "the server is ending and accepts no more requests", status=503, code="draining", retry_after=RETRY_SECONDS
    )


def check_name(name: str, served: str) -> None:
    """Raise RequestError, 404, for a model that is not `served`."""
    if name != served:
        raise RequestError(
            f"model {name[:80]!r} is not served here: there is {served!r}",
            status=404,
            param="model",
            code="model_not_found",
        )


@contextmanager
def refused_calls_named(scheduler: Any, arguments: Mapping[str, Any]) -> Iterator[None]:
    """Context of a call with `arguments`. Raises RequestError, 400, where the pipeline or its scheduler refuses it.

    Also where a call with several images fails: what takes several of them is said by no signature.
    """
    steps, sent = arguments.get(STEPS), arguments.get("image")
    try:
        yield
    except Exception as error:
        if refusal := refusal_of_steps(scheduler, steps, error):
            raise RequestError(f"{STEPS}={steps}: {refusal}: use another number", param=STEPS) from error
        if refusal := refusal_by_diffusers(error):
            log.warning("a request was refused by its pipeline", exc_info=error)
            param = next((PARAMS[word] for word in re.findall(r"\w+", refusal.lower()) if word in PARAMS), None)
            raise RequestError(f"the pipeline of this model refuses the request: {refusal}", param=param) from error
        if isinstance(sent, list) and _is_of_the_model(error):
            log.warning("a request with %d images failed", len(sent), exc_info=error)
            reason = f"the call of this model failed with {type(error).__name__}: if it takes one image, send one"
            raise _too_many(len(sent), reason) from error
        raise


def check_one_result(arguments: Mapping[str, Any], results: int) -> None:
    """Raise RequestError where the call of a request has made a result of each of its images."""
    sent = arguments.get("image")
    if isinstance(sent, list) and results > 1:
        raise _too_many(len(sent), f"this model makes an image of each of the {len(sent)}: send them one by one")


def _too_many(images: int, reason: str) -> RequestError:
    return RequestError(f"{images} images: {reason}", param="image", code="unsupported_parameter")


def _is_of_the_model(error: Exception) -> bool:
    """Return whether an error is one of the code of a pipeline or its networks, and not of workers or devices."""
    others = isinstance(error, (PatchparError, RequestError, Cancelled, Suspended))
    return not (others or is_out_of_memory(error) or has_broken_device(error))
