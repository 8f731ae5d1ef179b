"""Arguments on the device of a rank: a caller that is no rank has its tensors on the CPU, or on its own device."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, device

from patchpar.comm.pytree import leaves, map_leaves

EMBEDDINGS = ("embeds", "attention_mask")
"""Parts of the names of such arguments."""
LOADS = "load"
"""Begin of the names of methods that take weights, and bring them to their device themselves."""


def with_embeddings_on(own: device, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of a call with embeddings, and masks of them, on the device of this rank.

    Some pipelines use them where they are. Images stay: pipelines move them once they are prepared, which they are on
    the CPU.
    """
    return {
        name: _on(own, value) if any(part in name for part in EMBEDDINGS) else value for name, value in kwargs.items()
    }


def of_method_on(
    own: device, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a method, such as "vae.decode", with their tensors on the device of this rank.

    Unlike a pipeline's call, a network uses them where they are. Weights that a method loads stay.
    """
    if name.rpartition(".")[2].startswith(LOADS):
        return list(args), dict(kwargs)
    return [_on(own, value) for value in args], {key: _on(own, value) for key, value in kwargs.items()}


def _on(own: device, value: Any) -> Any:
    """Return a value with its tensors on a device: itself, if they are all there, or it has none."""
    if all(leaf.device == own for leaf in leaves(value) if isinstance(leaf, Tensor)):
        return value
    return map_leaves(lambda leaf: leaf.to(own) if isinstance(leaf, Tensor) else leaf, value)
