"""Refusals of a server that does not accept requests now, or not those of other models."""

from patchpar.serving.request_error import RequestError

RETRY_SECONDS = 5


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
