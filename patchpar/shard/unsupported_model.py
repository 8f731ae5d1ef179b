"""What fails in a model that ranks share becomes a refusal in words; what fails without us fails as it does then."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from patchpar.errors import PatchparError, UnsupportedModel, VerificationError


def is_of_the_split(error: Exception) -> bool:
    """Whether an error may come from how a model was split, so that another way may do; others are told as they are."""
    if isinstance(error, PatchparError):
        return isinstance(error, (UnsupportedModel, VerificationError))
    return not isinstance(error, torch.OutOfMemoryError)


@contextmanager
def refused_in_words(network: object, plan: str, way_out: str, plain: Callable[[], Any]) -> Iterator[None]:
    """Raises UnsupportedModel for whatever fails meanwhile in the model's own code, but does not fail in `plain`.

    `plain` is the same call without us; what that raises is raised. Errors of ours pass.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, PatchparError) or not is_of_the_split(error):
            raise
        plain()
        raise UnsupportedModel(
            f"{type(network).__name__} cannot be run with plan {plan}: with its work split it fails, and whole it does "
            f"not ({in_one_line(error)}). {way_out}"
        ) from error


def refuse_gradients(network: object, plan: str, call: Any) -> None:
    """Raise UnsupportedModel where what a network is called with asks for gradients: ranks exchange values only.

    On all ranks alike, before any of them works: what a pipeline does next depends on those gradients.
    """
    if torch.is_grad_enabled() and any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(call)):
        raise UnsupportedModel(
            f"gradients are taken through {type(network).__name__}, whose work plan {plan} shares between ranks: they "
            "exchange values, but no gradients, and a loss may be of several prompts. Use one device for this call"
        )


def kept_by_processors(network: nn.Module) -> dict[tuple[str, str], Any]:
    """What attention processors hold that has tensors in it, by the path of the layer and the processor's attribute."""
    found: dict[tuple[str, str], Any] = {}
    for path, layer in network.named_modules():
        processor = getattr(layer, "processor", None)
        if processor is None or isinstance(processor, nn.Module):
            continue
        for name, value in getattr(processor, "__dict__", {}).items():
            if any(isinstance(leaf, Tensor) for leaf in tree_leaves(value)):
                found[path, name] = value
    return found


def refuse_what_processors_keep(network: nn.Module, plan: str, before: Mapping[tuple[str, str], Any]) -> None:
    """Raise UnsupportedModel where a processor holds other tensors than `before` the call.

    Self-attention guidance (arXiv:2210.00939) and attention stores read the weights of a whole call there, and would
    take those of a rank's share for them.
    """
    for (path, name), value in kept_by_processors(network).items():
        if before.get((path, name)) is not value:
            raise UnsupportedModel(
                f"the attention processor of {path} in {type(network).__name__} keeps {name} of each call, for others "
                f"to read, and under plan {plan} that is of this rank's share only. Use one device, or data=N, for "
                "this call"
            )


def in_one_line(error: Exception) -> str:
    """The error's type and what it says, cut where it says much."""
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message[:300]}" if message else type(error).__name__
