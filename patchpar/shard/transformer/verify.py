"""Verify a token plan: compare the whole split forward with the plain one on all ranks."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from patchpar.comm.collectives import AxisComm
from patchpar.comm.pytree import floats_in
from patchpar.errors import PlanError
from patchpar.shard.precision import full_precision
from patchpar.shard.transformer.install import TransformerSharder
from patchpar.shard.transformer.probe.capture import CallArguments
from patchpar.shard.transformer.probe.latent import is_latent
from patchpar.shard.transformer.probe.smaller_call import smaller_calls
from patchpar.shard.transformer.token_plan import TokenPlan
from patchpar.shard.unsupported_model import is_of_the_split, is_out_of_memory
from patchpar.shard.verification import (
    ROUNDINGS,
    SHAKEN,
    Call,
    Comparison,
    every_rank_has,
    relative_error,
    rounding_limit,
    with_noise_for_zeros,
)


def compared_call(
    shard: TransformerSharder, forward: Callable[..., Any], call: Call, together: AxisComm, split: Callable[..., Any]
) -> Iterator[list[Comparison]]:
    """Compare a call, and if any rank has zeros among its arguments the same with noise in them, see `compared`.

    Ranks of another guidance branch may have none, and make as many calls.
    """
    noisy = with_noise_for_zeros(call)
    has_none = every_rank_has(together, "values in all arguments", noisy is None)
    return compared(shard, forward, [call] if has_none else [call, noisy or call], together, split)


def compared(
    shard: TransformerSharder,
    forward: Callable[..., Any],
    calls: Sequence[Call],
    together: AxisComm,
    split: Callable[..., Any] | None = None,
) -> Iterator[list[Comparison]]:
    """Compare the split forward with the plain one on this rank, call by call; the calls should have different tokens.

    `together`: all ranks that a plain forward takes, and those of the split one, which make as many forwards. `split`:
    the split forward; None: `shard.denoise`. The limit is the rounding of the dtype, or its effect on this model, which
    may quantise activations, so that another order of summation gives another integer. Where a plain forward does not
    fit in a rank's memory, all compare calls with fewer tokens. Raises PlanError where none fits.
    """
    found = []
    for args, kwargs in calls:
        with torch.no_grad(), full_precision():
            whole = CallArguments.of(shard.denoiser, args, kwargs)
            arguments, want = _plain_within_memory(shard, forward, whole, together)
            got = floats_in(arguments.passed_to(split or partial(shard.denoise, forward)))
            error, limit = _largest(got, want), rounding_limit(want)
            for seed in range(ROUNDINGS):
                if every_rank_has(together, "error within its limit", error <= limit):  # each forward may take all
                    break
                shaken = floats_in(shaken_call(arguments, shard.plan.latent, seed).passed_to(forward))
                limit = max(limit, SHAKEN * _largest(shaken, want))
        found.append(Comparison(error, limit))
    yield found


def _plain_within_memory(
    shard: TransformerSharder, forward: Callable[..., Any], arguments: CallArguments, together: AxisComm
) -> tuple[CallArguments, list[Tensor]]:
    """Return the call, or the largest with fewer tokens that every rank can run plainly, and its predictions."""
    for number, call in enumerate((arguments, *smaller_calls(arguments, shard.plan.latent))):
        want: list[Tensor] | None = None
        try:
            want = floats_in(call.passed_to(forward))
        except Exception as error:
            unlike = number > 0 and is_of_the_split(error)  # other arguments hold the number of tokens
            if not (unlike or is_out_of_memory(error)):
                raise
        if every_rank_has(together, "memory", want is not None) and want is not None:
            return call, want
    raise PlanError(
        f"a plain forward of {shard.plan.denoiser}, with which the split one is compared, does not fit in the memory "
        "of every rank, nor is there one with fewer tokens: verify=False leaves the comparison out"
    )


def refusal(shard: TransformerSharder) -> tuple[str, str]:
    """Return what differs from the plain model and the way out, for the error of `verify_once`."""
    return (
        f"{shard.plan.denoiser} with its tokens split between {shard.split.axis.size} ranks",
        f": use plan cfg=2 or data=N, which do not split the tokens. What was found:\n{shard.plan}",
    )


def why_no_old_values(plan: TokenPlan) -> str:
    """Return why stale keys cannot be used with a plan whose tokens meet outside attention, where all are fresh."""
    mixing = any(block.mixing is not None for block in plan.blocks)
    parts = sorted({part.path for block in plan.blocks for part in block.replicated})
    if not mixing and (not parts or any(call.keys for block in plan.blocks for call in block.attentions)):
        return ""
    where = "sums or convolutions" if mixing else f"parts that are not split ({', '.join(parts)})"
    return f"the tokens of {plan.denoiser} meet in {where}, and stale values of these are not kept: use strategy=exact"


def shaken_call(arguments: CallArguments, latent: str, seed: int) -> CallArguments:
    """Return the same call with the latent changed by as much as rounding changes it, in one of many ways."""

    def shake(name: str, leaf: Any) -> Any:
        if not (is_latent(name, latent) and isinstance(leaf, Tensor) and leaf.is_floating_point()):
            return leaf
        noise = torch.randn(leaf.shape, generator=torch.Generator().manual_seed(seed)).to(leaf)
        return leaf * (1 + 4 * torch.finfo(leaf.dtype).eps * noise)

    return arguments.map(shake)


def _largest(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    return max(relative_error(x, y) for x, y in zip(got, want, strict=True))
