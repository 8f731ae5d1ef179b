"""Failures of a split model as UnsupportedModel with a reason; what fails without the split raises its own error."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from patchpar.errors import PatchparError, UnsupportedModel, VerificationError
from patchpar.shard.compiled import refuse_recompilations
from patchpar.shard.module_tree import named_modules_of

NO_HOST_MEMORY = "DefaultCPUAllocator: can't allocate memory"
"""What torch says in a RuntimeError on the CPU."""


def is_out_of_memory(error: Exception) -> bool:
    """Whether a device, or the host, has too little memory."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or NO_HOST_MEMORY in str(error)


def is_of_the_split(error: Exception) -> bool:
    """Whether an error may come from the split of a model, so that another split may work; others are raised as is."""
    if isinstance(error, PatchparError):
        return isinstance(error, (UnsupportedModel, VerificationError))
    return not is_out_of_memory(error)


@contextmanager
def attempted(failures: list[Exception] | None = None) -> Iterator[None]:
    """Context that swallows errors of the model's own code, which may fail in an attempt; others are raised.

    Those swallowed are appended to `failures`, without their frames, which keep tensors.
    """
    try:
        yield
    except Exception as error:
        if not is_of_the_split(error):
            raise
        if failures is not None:
            failures.append(error.with_traceback(None))


@contextmanager
def refused_in_words(network: object, plan: str, way_out: str, plain: Callable[[], Any]) -> Iterator[None]:
    """Context that raises UnsupportedModel for any failure of the model's own code that does not occur in `plain`.

    `plain` is the same call without the split; its own error is raised. Errors of patchpar pass unchanged.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, PatchparError) or not is_of_the_split(error):
            raise
        refuse_recompilations(network, error)
        plain()
        raise UnsupportedModel(
            f"{type(network).__name__} cannot be run with plan {plan}: with its work split it fails, on one rank it "
            f"does not ({in_one_line(error)}). {way_out}"
        ) from error


def refuse_gradients(network: object, plan: str, call: Any) -> None:
    """Raise UnsupportedModel where an argument of a network requires gradients: ranks exchange values only.

    All ranks raise before any computes: what a pipeline does next depends on those gradients.
    """
    if torch.is_grad_enabled() and any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(call)):
        raise UnsupportedModel(
            f"gradients are taken through {type(network).__name__}, whose work plan {plan} splits between ranks: they "
            "exchange values, but no gradients, and a loss may cover several prompts. Use one device for this call"
        )


def refuse_smoothed(network: nn.Module, plan: str) -> None:
    """Raise UnsupportedModel for smoothed energy guidance (arXiv:2408.00760), which blurs queries over the image."""
    for path, layer in named_modules_of(network):
        registry = getattr(layer, "_diffusers_hook", None)
        hooks = () if registry is None else registry.hooks.values()
        if any(type(hook).__name__ == "SmoothedEnergyGuidanceHook" for hook in hooks):
            raise UnsupportedModel(
                f"smoothed energy guidance blurs the queries of {path} in {type(network).__name__} over the whole "
                f"image, of which each rank has a part under plan {plan}: use plan cfg=2 or data=N"
            )


def kept_by_processors(network: nn.Module) -> dict[tuple[str, str], list[Tensor]]:
    """Return the tensors, of any shape, in attributes of attention processors, by path of the layer and attribute."""
    found: dict[tuple[str, str], list[Tensor]] = {}
    for path, layer in named_modules_of(network):
        processor = getattr(layer, "processor", None)
        if processor is None or isinstance(processor, nn.Module):
            continue
        for name, value in getattr(processor, "__dict__", {}).items():
            if kept := [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]:
                found[path, name] = kept
    return found


def refuse_what_processors_keep(
    network: nn.Module, plan: str, before: Mapping[tuple[str, str], Sequence[Tensor]]
) -> None:
    """Raise UnsupportedModel where a processor holds other tensors than `before` the call.

    Self-attention guidance (arXiv:2210.00939) and attention stores read the weights of a whole call there, but would
    get those of this rank's part.
    """
    for (path, name), kept in kept_by_processors(network).items():
        if [id(x) for x in before.get((path, name), ())] != [id(x) for x in kept]:
            raise UnsupportedModel(
                f"the attention processor of {path} in {type(network).__name__} keeps {name} of each call for other "
                f"code to read, and under plan {plan} it covers this rank's part only. Use one device, or data=N, for "
                "this call"
            )


def reason_of(error: Exception) -> str:
    """Return why a model is not supported, or how it fails where it does not say."""
    return str(error) if isinstance(error, UnsupportedModel) else in_one_line(error)


def in_one_line(error: Exception) -> str:
    """Return the error's type and message on one line, the message cut to 300 characters."""
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message[:300]}" if message else type(error).__name__
