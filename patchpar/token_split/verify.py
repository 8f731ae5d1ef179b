"""Hold a token plan to its promise: the whole forward, split, against the plain one, on all ranks."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from patchpar.errors import VerificationError
from patchpar.exchange import Gather
from patchpar.shard import TOLERANCE, relative_error
from patchpar.token_split.shard import TokenShard
from patchpar.token_split.watch import Arguments

Call = tuple[tuple[Any, ...], dict[str, Any]]


def verify_tokens(shard: TokenShard, forward: Callable[..., Any], calls: Sequence[Call]) -> float:
    """Largest relative error of the split forward over all ranks and calls; they should differ in their tokens.

    Raises VerificationError with the figures when it exceeds what the dtype's rounding explains.
    """
    errors, limit = [], 0.0
    for args, kwargs in calls:
        arguments = Arguments.of(shard.denoiser, args, kwargs)
        with torch.no_grad():
            want = _tensors(_called(forward, arguments))
            got = _tensors(_called(lambda *args, **kwargs: shard.denoise(forward, *args, **kwargs), arguments))
        errors.append(max(relative_error(x, y) for x, y in zip(got, want, strict=True)))
        limit = max(TOLERANCE[x.dtype] for x in want)
    door, axis = shard.split.door, shard.split.axis
    own = torch.tensor(errors, dtype=torch.float32, device=door.transport.device)
    worst = torch.stack(Gather(door, axis, "verify", "verification").same(own)).amax(0).tolist()
    if not all(error <= limit for error in worst):
        figures = ", ".join(f"{error:.1e}" for error in worst)
        raise VerificationError(
            f"{shard.plan.denoiser} with its tokens split between {axis.size} ranks differs from the plain one by "
            f"{figures}, more than the {limit:.0e} that rounding explains: use plan cfg=2 or data=N, which do not "
            f"split the tokens. What was found:\n{shard.plan}"
        )
    return float(max(worst))


def _called(forward: Callable[..., Any], arguments: Arguments) -> Any:
    """The arguments stay as they are: a model may change its own in place."""
    own = arguments.cloned()
    return forward(*own.args, **own.kwargs)


def _tensors(output: Any) -> list[Tensor]:
    """The predictions of a call, of floating point, whether it returned a tuple or an output class."""
    leaves = tree_flatten(output.to_tuple() if hasattr(output, "to_tuple") else output)[0]
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]
