"""The description of a pipeline that a rank holds."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from patchpar.errors import PlanError
from patchpar.models.guiders import guider_branches
from patchpar.models.info import PipelineInfo, describe, networks_of
from patchpar.strategies.data.split import why_one_batch
from patchpar.strategies.structure.native_size import why_native_only


def described(pipe: Any) -> PipelineInfo:
    """Return the description of a pipeline."""
    return replace(describe(pipe), **set_by_attributes(pipe))


def set_by_attributes(pipe: Any) -> dict[str, Any]:
    """Return the fields of a description that depend on what can be set, such as the scheduler and a guider."""
    return {
        "native_only_reason": why_native_only(pipe),
        "one_batch_reason": why_one_batch(pipe),
        "guider_branches": guider_branches(pipe),
    }


@contextmanager
def set_if_described(owner: Any, attribute: str, value: Any, path: str) -> Iterator[None]:
    """Set an attribute of a pipeline or a network; set it back if the pipeline cannot be described with it then.

    Raises PlanError with its `path` and the reason, and what setting it raises itself.
    """
    had = attribute in vars(owner)
    before = getattr(owner, attribute) if had else None
    setattr(owner, attribute, value)
    try:
        yield
    except Exception as error:
        if had:
            setattr(owner, attribute, before)
        else:
            delattr(owner, attribute)
        raise PlanError(
            f"pipe.{path} cannot be {value!r:.80} ({type(error).__name__}: {error}), and is what it was"
        ) from error


def has_its_networks(pipe: Any, known: PipelineInfo) -> bool:
    """Return whether the networks of a pipeline are of the classes that its description has."""
    kinds = {name: type(each).__name__ for name, each in networks_of(pipe).items()}
    return kinds == {name: network.kind for name, network in known.networks.items()}
