"""Hold a token plan to its promise: the whole forward, split, against the plain one, on all ranks."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from patchpar.shard.transformer.install import TransformerSharder
from patchpar.shard.transformer.probe.capture import CallArguments
from patchpar.shard.transformer.probe.latent import is_latent
from patchpar.shard.verification import TOLERANCE, Call, Comparison, relative_error

SHAKEN = 4.0
"""How many times as far as a latent that is changed by rounding moves it a split model may be from the plain one."""


def compared(
    shard: TransformerSharder, forward: Callable[..., Any], calls: Sequence[Call]
) -> Iterator[list[Comparison]]:
    """The split forward against the plain one on this rank, call by call; they should differ in their tokens.

    Rounding explains what the dtype does, or what this model makes of it, which may quantise what it computes, so that
    another order of sums is another integer.
    """
    found = []
    for args, kwargs in calls:
        arguments = CallArguments.of(shard.denoiser, args, kwargs)
        with torch.no_grad():
            want = _tensors(_called(forward, arguments))
            got = _tensors(_called(partial(shard.denoise, forward), arguments))
            error, limit = _largest(got, want), max(TOLERANCE[x.dtype] for x in want)
            if error > limit:
                shaken = _tensors(_called(forward, _shaken(arguments, shard.plan.latent)))
                limit = max(limit, SHAKEN * _largest(shaken, want))
        found.append(Comparison(error, limit))
    yield found


def refusal(shard: TransformerSharder) -> tuple[str, str]:
    """What `largest_error` says is not the same as the plain model, and what to do."""
    return (
        f"{shard.plan.denoiser} with its tokens split between {shard.split.axis.size} ranks",
        f": use plan cfg=2 or data=N, which do not split the tokens. What was found:\n{shard.plan}",
    )


def _shaken(arguments: CallArguments, latent: str) -> CallArguments:
    """The same call with the latent changed by as much as rounding changes it."""

    def shake(name: str, leaf: Any) -> Any:
        if not (is_latent(name, latent) and isinstance(leaf, Tensor) and leaf.is_floating_point()):
            return leaf
        noise = torch.randn(leaf.shape, generator=torch.Generator().manual_seed(0)).to(leaf)
        return leaf * (1 + 4 * torch.finfo(leaf.dtype).eps * noise)

    return arguments.map(shake)


def _largest(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    return max(relative_error(x, y) for x, y in zip(got, want, strict=True))


def _called(forward: Callable[..., Any], arguments: CallArguments) -> Any:
    """The arguments stay as they are: a model may change its own in place."""
    own = arguments.cloned()
    return forward(*own.args, **own.kwargs)


def _tensors(output: Any) -> list[Tensor]:
    """The predictions of a call, of floating point, whether it returned a tuple or an output class."""
    leaves = tree_flatten(output.to_tuple() if hasattr(output, "to_tuple") else output)[0]
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]
