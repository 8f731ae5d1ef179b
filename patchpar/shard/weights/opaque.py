"""Weights that are no plain tensors, which cannot be packed: they stay whole on every rank, and that is said.

Objects of torch's own quantised modules (`torch.ScriptObject`), tensors with a quantiser or without strides, and tensor
subclasses around others that do not say which (`__tensor_flatten__`).
"""

import logging
from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from patchpar.plan.mesh import Axis

log = logging.getLogger(__name__)


def is_plain(x: Tensor) -> bool:
    """Whether a tensor of any shape is elements side by side in memory of its own, which can be copied as bytes."""
    return x.layout == torch.strided and not x.is_quantized and (x.is_meta or x.data_ptr() != 0)


def opaque_weights(modules: Iterable[nn.Module]) -> str:
    """Return the weights of modules, those below them too, that are not plain tensors, for errors; empty without any.

    Weights of a tensor subclass that can be flattened are not among them.
    """
    found: Counter[str] = Counter()
    for module in {each for outer in modules for each in outer.modules()}:
        kind = type(module).__name__
        for x in (*module._parameters.values(), *module._buffers.values()):
            if x is not None and not hasattr(x, "__tensor_flatten__") and x.numel() and not is_plain(x):
                found[f"{type(x).__name__} ({x.dtype}) in {kind}"] += 1
        found[f"ScriptObject in {kind}"] += sum(isinstance(x, torch.ScriptObject) for x in vars(module).values())
    return ", ".join(f"{count} {name}" for name, count in sorted(found.items()) if count)


def say_what_stays_whole(network: nn.Module, modules: Iterable[nn.Module], axis: Axis) -> None:
    """Log, on the first rank of the axis, which weights of these modules of a network are not divided."""
    found = opaque_weights(modules)
    if found and axis.rank == 0:
        log.warning(
            "%s has weights that are no plain tensors (%s), so that they stay whole on every rank",
            type(network).__name__,
            found,
        )
