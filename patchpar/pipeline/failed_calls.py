"""Networks keep nothing of a call that fails, wherever it ends: step caches are reset, attention processors put back.

A pipeline that puts processors into its denoiser for a call, such as those of perturbed-attention guidance
(arXiv:2403.17377), takes them away at the end of the call only. The next one would be computed with them.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from patchpar.models.info import denoisers_of
from patchpar.pipeline.step_callbacks import OLDER, ON_STEP_END

PROCESSOR = "processor"


class KeptProcessors:
    """The attention processors of a pipeline's denoisers as they were when this was made."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe
        self._kept = dict(_processors(pipe))

    @contextmanager
    def but_for_changes(self) -> Iterator[None]:
        """Context in which the caller sets processors, which stay."""
        before = dict(_processors(self._pipe))
        yield
        for layer, processor in _processors(self._pipe):
            if processor is not before.get(layer):
                self._kept.pop(layer, None)

    def put_back(self) -> None:
        """Give each layer the one that it had."""
        for layer, processor in self._kept.items():
            if getattr(layer, PROCESSOR, None) is not processor:
                layer._modules.pop(PROCESSOR, None)  # torch lets no other object replace a module
                setattr(layer, PROCESSOR, processor)


@contextmanager
def undone_after_failure(pipe: Any, arguments: Mapping[str, Any]) -> Iterator[KeptProcessors]:
    """Context of a call with these arguments. A callback among them runs in this process: what it sets stays."""
    kept = KeptProcessors(pipe)
    try:
        yield kept
    except BaseException:
        for network in pipe.components.values():
            if hasattr(network, "_reset_stateful_cache"):  # of diffusers' step caches, as a call does at its end
                network._reset_stateful_cache()
        if all(arguments.get(name) is None for name in (ON_STEP_END, OLDER)):
            kept.put_back()
        raise


def _processors(pipe: Any) -> Iterator[tuple[nn.Module, Any]]:
    for denoiser in denoisers_of(pipe).values():
        for layer in denoiser.modules():
            if PROCESSOR in vars(layer) or PROCESSOR in layer._modules:
                yield layer, getattr(layer, PROCESSOR)
