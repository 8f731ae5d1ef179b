"""Networks keep nothing of a call that fails, wherever it ends: caches, attention processors and dtypes are as before.

Pipelines put processors into the denoiser for a call, such as those of perturbed-attention guidance (arXiv:2403.17377),
and cast a VAE that overflows in float16 to float32 while it decodes. Both are undone at the end of a call only.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from patchpar.models.info import denoisers_of, networks_of
from patchpar.pipeline.step_callbacks import OLDER, ON_STEP_END
from patchpar.shard.module_tree import modules_of

PROCESSOR = "processor"


class KeptNetworks:
    """The processors of a pipeline's denoisers, and the dtypes of what decodes, as they were when this was made."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe
        self._processors, self._dtypes = dict(_processors(pipe)), dict(_dtypes(pipe))

    @contextmanager
    def but_for_changes(self) -> Iterator[None]:
        """Context in which the caller changes them, which stays."""
        processors, dtypes = dict(_processors(self._pipe)), dict(_dtypes(self._pipe))
        yield
        for layer, processor in _processors(self._pipe):
            if processor is not processors.get(layer):
                self._processors.pop(layer, None)
        for network, dtype in _dtypes(self._pipe):
            if dtype != dtypes.get(network):
                self._dtypes.pop(network, None)

    def put_back(self) -> None:
        """Make them as they were."""
        for layer, processor in self._processors.items():
            if getattr(layer, PROCESSOR, None) is not processor:
                layer._modules.pop(PROCESSOR, None)  # torch lets no other object replace a module
                setattr(layer, PROCESSOR, processor)
        for network, dtype in _dtypes(self._pipe):
            if dtype != self._dtypes.get(network, dtype):
                network.to(dtype=self._dtypes[network])


@contextmanager
def undone_after_failure(pipe: Any, arguments: Mapping[str, Any]) -> Iterator[KeptNetworks]:
    """Context of a call with these arguments. A callback among them runs in this process: what it sets stays."""
    kept = KeptNetworks(pipe)
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
        for layer in modules_of(denoiser):
            if PROCESSOR in vars(layer) or PROCESSOR in layer._modules:
                yield layer, getattr(layer, PROCESSOR)


def _dtypes(pipe: Any) -> Iterator[tuple[nn.Module, torch.dtype]]:
    for network in networks_of(pipe).values():
        if hasattr(network, "decode"):
            first = next(network.parameters(), None)
            if first is not None:
                yield network, first.dtype
