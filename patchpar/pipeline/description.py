"""The description of a pipeline that a rank holds."""

from dataclasses import replace
from typing import Any

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


def has_its_networks(pipe: Any, known: PipelineInfo) -> bool:
    """Return whether the networks of a pipeline are of the classes that its description has."""
    kinds = {name: type(each).__name__ for name, each in networks_of(pipe).items()}
    return kinds == {name: network.kind for name, network in known.networks.items()}
