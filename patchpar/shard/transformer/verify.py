"""Hold a token plan to its promise: the whole forward, split, against the plain one, on all ranks."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from patchpar.comm.collectives import AllGather
from patchpar.errors import VerificationError
from patchpar.shard.transformer.install import TransformerSharder
from patchpar.shard.transformer.probe.capture import CallArguments
from patchpar.shard.transformer.probe.latent import is_latent
from patchpar.shard.verification import TOLERANCE, relative_error

SHAKEN = 4.0
"""How many times as far as a latent that is changed by rounding moves it a split model may be from the plain one."""
Call = tuple[tuple[Any, ...], dict[str, Any]]


def verify_tokens(shard: TransformerSharder, forward: Callable[..., Any], calls: Sequence[Call]) -> float:
    """Largest relative error of the split forward over all ranks and calls; they should differ in their tokens.

    Raises VerificationError with the figures when it exceeds what rounding explains: of the dtype, or of this model,
    which may quantise what it computes, so that another order of sums is another integer.
    """
    errors, limits = [], []
    for args, kwargs in calls:
        arguments = CallArguments.of(shard.denoiser, args, kwargs)
        with torch.no_grad():
            want = _tensors(_called(forward, arguments))
            got = _tensors(_called(lambda *args, **kwargs: shard.denoise(forward, *args, **kwargs), arguments))
            errors.append(_largest(got, want))
            limits.append(max(TOLERANCE[x.dtype] for x in want))
            if errors[-1] > limits[-1]:
                shaken = _tensors(_called(forward, _shaken(arguments, shard.plan.latent)))
                limits[-1] = max(limits[-1], SHAKEN * _largest(shaken, want))
    door, axis = shard.split.door, shard.split.axis
    own = torch.tensor([errors, limits], dtype=torch.float32, device=door.transport.device)
    everyone = torch.stack(AllGather(door, axis, "verify", "verification").same(own))
    worst = everyone[:, 0].amax(0).tolist()
    if not bool((everyone[:, 0] <= everyone[:, 1]).all()):
        figures = ", ".join(f"{error:.1e}" for error in worst)
        raise VerificationError(
            f"{shard.plan.denoiser} with its tokens split between {axis.size} ranks differs from the plain one by "
            f"{figures}, more than the {max(limits):.0e} that rounding explains: use plan cfg=2 or data=N, which do "
            f"not split the tokens. What was found:\n{shard.plan}"
        )
    return float(max(worst))


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
