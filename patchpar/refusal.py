"""What fails in a model that ranks share becomes a refusal in words; what fails without us fails as it does then."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
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


def in_one_line(error: Exception) -> str:
    """The error's type and what it says, cut where it says much."""
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said[:300]}" if said else type(error).__name__
