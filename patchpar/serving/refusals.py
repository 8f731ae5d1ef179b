"""Refusals of a server that does not accept requests now, or not those of other models; and by pipelines."""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from patchpar.models.refused_calls import refusal_by_diffusers, refusal_of_steps
from patchpar.serving.pipeline_fields import PipelineFields
from patchpar.serving.request_error import RequestError

log = logging.getLogger(__name__)
RETRY_SECONDS = 5
PARAMS = {
    **{name: name for name in PipelineFields.model_fields},
    "height": "size",
    "width": "size",
    "mask_image": "mask",
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
def refused_calls_named(scheduler: Any, steps: int | None) -> Iterator[None]:
    """Context of a call of so many steps. Raises RequestError, 400, where the pipeline or its scheduler refuses it."""
    try:
        yield
    except Exception as error:
        if refusal := refusal_of_steps(scheduler, steps, error):
            name = "num_inference_steps"
            raise RequestError(f"{name}={steps}: {refusal}: use another number", param=name) from error
        if refusal := refusal_by_diffusers(error):
            log.warning("a request was refused by its pipeline", exc_info=error)
            param = next((PARAMS[word] for word in re.findall(r"\w+", refusal.lower()) if word in PARAMS), None)
            raise RequestError(f"the pipeline of this model refuses the request: {refusal}", param=param) from error
        raise
