"""Find where a transformer's tokens are by perturbing inputs, without names, lengths or a list of models.

    1. perturb the latent         the rows of a block's arguments that change are its tokens
    2. perturb each argument      a row that changes a token's query, key, value or output belongs to that token
    3. examine attention          which keys are tokens, and which every rank has anyway
    4. perturb other rows         a second run of tokens in the same attention, as of text, see `text`
    5. perturb the latent's rows  in which grid the tokens lie, see `grid`

Attention is severed meanwhile (see `capture`). A block in which a token affects another one nevertheless is searched
again with sums over tokens and convolutions severed as well (see `shard.transformer.token_mixing`); if that fails too,
its parts are tried one by one (see `replication`).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from patchpar.errors import UnsupportedModel
from patchpar.shard.group_offload import group_here
from patchpar.shard.transformer.probe.block import BlockProbe
from patchpar.shard.transformer.probe.capture import CallArguments, CapturedBlock, CapturedRun, Kind, watch
from patchpar.shard.transformer.probe.grid import GridSources
from patchpar.shard.transformer.probe.latent import WAY_OUT, latent_size, name_of_latent, with_other_latent
from patchpar.shard.transformer.probe.observe_block import Severance, observe_block
from patchpar.shard.transformer.probe.reduced_model import shortened
from patchpar.shard.transformer.probe.replication import replicated_plan
from patchpar.shard.transformer.probe.text import with_text
from patchpar.shard.transformer.probe.watched import with_watched_modules
from patchpar.shard.transformer.token_mixing import TokenMixing
from patchpar.shard.transformer.token_plan import BlockPlan, TokenPlan
from patchpar.shard.unsupported_model import attempted, in_one_line, is_of_the_split


def discover_tokens(
    denoiser: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any, known: TokenPlan | None = None
) -> TokenPlan:
    """Run `forward`, the denoiser's own, and return the plan of its tokens. Raises UnsupportedModel.

    `known`: a plan for other calls, to which only blocks with another signature are added.
    """
    arguments = CallArguments.of(denoiser, args, kwargs)
    latent = name_of_latent(denoiser, arguments)
    watched = partial(watch, denoiser, forward)
    seen, moved = watched(arguments), watched(with_other_latent(arguments, latent))
    size = latent_size(arguments, latent)
    found, whole, others = _block_plans(seen, moved, size, known)
    if not found and known is None:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in whole.items()) or "none of its blocks has tokens"
        raise UnsupportedModel(f"{type(denoiser).__name__} cannot be split by tokens ({reasons}): {WAY_OUT}")
    with shortened(denoiser, (plan.paths for plan in found.values())):
        blocks = GridSources(watched, arguments, latent).of_all(found)
    for plan in blocks:
        if plan.mixing is not None and plan.mixing.reach and plan.origin is None:
            raise UnsupportedModel(
                f"{type(denoiser).__name__} cannot be split by tokens ({plan.name}: it convolves its tokens, but the "
                f"grid they lie in was not found): {WAY_OUT}"
            )
    new = TokenPlan(denoiser=type(denoiser).__name__, latent=latent, blocks=blocks, whole=whole, others=others)
    return new if known is None else known.joined(new)


def _block_plans(
    seen: CapturedRun, moved: CapturedRun, size: int, known: TokenPlan | None
) -> tuple[dict[Kind, BlockPlan], dict[str, str], frozenset[tuple[str, tuple[str, ...]]]]:
    """Return the plans of all kinds of blocks that are not known, the reasons of those not split, and their paths."""
    found, whole, others = dict[Kind, BlockPlan](), dict[str, str](), list[tuple[str, tuple[str, ...]]]()
    for kind, block in seen.items():
        if known is not None and known.knows(block.paths, kind[-1]):
            continue
        plan = None
        try:
            with group_here(block.module):
                plan = _plan_of(block, _the_same(moved.get(kind)), size)
                if plan is not None:
                    plan = with_watched_modules(plan, block.module, block.arguments)
        except Exception as error:
            if not is_of_the_split(error):
                raise
            reason = str(error) if isinstance(error, UnsupportedModel) else f"it fails alone: {in_one_line(error)}"
            whole[f"{block.name}, {len(block.paths)} x {type(block.module).__name__}"] = reason
        if plan is not None:
            found[kind] = plan
        else:
            others += [(path, kind[-1]) for path in block.paths]
    return found, whole, frozenset(others)


def _the_same(moved: CapturedBlock | None) -> CapturedBlock:
    """Return the same kind of block in the other run. Raises UnsupportedModel."""
    if moved is None:
        raise UnsupportedModel("which blocks are called, and with what, depends on the values of the latent")
    return moved


def _plan_of(block: CapturedBlock, moved: CapturedBlock, latent_size: int) -> BlockPlan | None:
    """Return the plan of a block: tokens meet in attention alone, or else in sums, convolutions or whole parts, too.

    None where there is nothing to split. Raises UnsupportedModel.
    """
    try:
        probe = BlockProbe(block, moved, latent_size)
        plan = probe.plan()
        return None if plan is None else with_text(plan, probe)
    except UnsupportedModel:
        for otherwise in (_mixing_plan, replicated_plan):
            with attempted():
                found = otherwise(block, moved, latent_size)
                if found is not None:
                    return found
        raise


def _mixing_plan(block: CapturedBlock, moved: CapturedBlock, latent_size: int) -> BlockPlan | None:
    """Return a plan with sums over tokens or convolutions; None where there are none. Raises UnsupportedModel.

    The result of a sum depends on all tokens, so sums are found one after the other.
    """
    sums: frozenset[int] = frozenset()
    seen = observe_block(block.module, block.arguments, Severance(sums))
    if not any(name.startswith(("product", "sum", "convolution")) for name in seen):
        return None
    while True:
        probe = BlockProbe(block, moved, latent_size, Severance(sums))
        more = probe.sums() - sums
        if not more:
            break
        sums |= more
    plan = probe.plan()
    return plan if plan is not None and plan.mixing != TokenMixing() else None
