"""What a rank may send to the caller of a method or attribute of the pipeline: anything but networks."""

from typing import Any

from diffusers import DiffusionPipeline
from torch import nn

from patchpar.comm.pytree import leaves
from patchpar.errors import UnsupportedModel


def refuse_networks(what: str, value: Any) -> None:
    """Raise UnsupportedModel if a value is a network, or holds one. `what`: its name, for the message."""
    if any(_holds_network(leaf) for leaf in leaves(value)):
        raise UnsupportedModel(
            f"{what} is a {type(value).__name__} that exists in the workers only. Call methods of the pipeline and "
            "of its networks, such as pipe.set_adapters or pipe.vae.enable_tiling; make any other change, and other "
            "pipelines of the same networks (from_pipe), before ParallelPipeline(pipe)"
        )


def _holds_network(value: Any) -> bool:
    """Return whether a value is a network, a pipeline, or a method of one."""
    owner = getattr(value, "__self__", value)
    return isinstance(owner, (nn.Module, DiffusionPipeline))
