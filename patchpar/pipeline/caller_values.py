"""Values between a caller and a rank: arguments on the device of the rank, and results, anything but networks.

A caller that is no rank has its tensors on the CPU, or on its own device.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from diffusers import DiffusionPipeline
from torch import Tensor, device, nn

from patchpar.comm.pytree import leaves, map_tensors
from patchpar.errors import UnsupportedModel

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
    return map_tensors(lambda x: x.to(own), value)


def refuse_networks(what: str, value: Any) -> None:
    """Raise UnsupportedModel if a value is a network or an iterator, or holds one. `what`: its name in the message."""
    if any(isinstance(leaf, Iterator) or holds_network(leaf) for leaf in leaves(value)):
        raise UnsupportedModel(
            f"{what} is a {type(value).__name__} that exists in the workers only. Call methods of the pipeline and "
            "of its networks, such as pipe.set_adapters or pipe.vae.enable_tiling; make any other change, and other "
            "pipelines of the same networks (from_pipe), before ParallelPipeline(pipe)"
        )


def holds_network(value: Any) -> bool:
    """Return whether a value is a network, a pipeline, or a method of one."""
    owner = getattr(value, "__self__", value)
    return isinstance(owner, (nn.Module, DiffusionPipeline))
