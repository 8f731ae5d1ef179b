"""Get the feature plan of a transformer: from the cache, or by a search of all its kinds of blocks."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from patchpar.comm.collectives import AllGather, AxisComm
from patchpar.errors import UnsupportedModel
from patchpar.shard.tensor.feature_plan import BlockCut, FeaturePlan
from patchpar.shard.tensor.search import find_cut
from patchpar.shard.transformer.probe.capture import CallArguments, CapturedBlock, watch
from patchpar.shard.unsupported_model import is_of_the_split, reason_of
from patchpar.shard.verification import Call, fingerprint_of, uncounted
from patchpar.shard.verification_cache import VerificationCache

log = logging.getLogger(__name__)
WAY_OUT = "use patch=N (with weights=sharded where memory is short) or cfg=2 instead of tensor"


def find_plan(
    denoiser: nn.Module,
    mesh: AxisComm,
    forward: Callable[..., Any],
    call: Call,
    verifications: VerificationCache | None,
    take: Callable[[nn.Module], None] = lambda block: None,
) -> FeaturePlan:
    """Return the plan of the first rank of the axis, on all its ranks; `forward` is the denoiser's own. Collective.

    `take`: is called with a block before it is searched, whose weights have to be whole. Raises UnsupportedModel where
    no block can be divided.
    """
    facts, kept = plan_facts(denoiser, mesh[1].size, call), None
    if verifications is not None:
        kept = verifications.find(verifications.key(facts), "plan", FeaturePlan.from_json)
    plan = _first_of_all(mesh, kept)
    if plan is None:
        found = discover_features(denoiser, forward, call, mesh[1].size, take)
        if verifications is not None:
            verifications.remember(verifications.key(facts), facts, plan=found.to_json())
        plan = _first_of_all(mesh, found)
        assert plan is not None
        if mesh[1].rank == 0:
            log.info("%s, divided by features between %d ranks:\n%s", plan.denoiser, plan.size, plan)
    if not plan.blocks:
        raise UnsupportedModel(
            f"the blocks of {plan.denoiser} cannot be divided by features between {plan.size} ranks "
            f"({'; '.join(plan.refused) or 'it has no blocks with Linears'}): {WAY_OUT}"
        )
    return plan


def plan_facts(denoiser: nn.Module, size: int, call: Call) -> dict[str, Any]:
    """Return what a plan depends on: the network, the number of ranks, and the arguments by name and dims."""
    arguments = CallArguments.of(denoiser, *call).signature()
    return {**fingerprint_of(denoiser), "features for": arguments, "ranks": size}


def discover_features(
    denoiser: nn.Module,
    forward: Callable[..., Any],
    call: Call,
    size: int,
    take: Callable[[nn.Module], None] = lambda block: None,
) -> FeaturePlan:
    """Run `forward` and return the plan of its blocks for `size` ranks; blocks may be none. `take`: see `find_plan`."""
    blocks, refused, done = list[BlockCut](), list[str](), set[str]()
    for block in watch(denoiser, forward, CallArguments.of(denoiser, *call)).values():
        paths = [path for path in block.paths if path not in done]
        done.update(paths)
        if not paths or not any(isinstance(part, nn.Linear) for part in block.module.modules()):
            continue
        alike = [path for path in paths if shapes_of(denoiser.get_submodule(path)) == shapes_of(block.module)]
        take(block.module)
        what = f"{block.name}, {len(paths)} x {type(block.module).__name__}"
        try:
            found = find_cut(CapturedBlock(block.name, block.module, block.arguments, alike), size)
            _refuse_tied(denoiser, found)
            blocks.append(found)
        except Exception as error:
            if not is_of_the_split(error):
                raise
            refused.append(f"{what}: {reason_of(error)}")
        if len(alike) < len(paths):
            refused.append(f"{what}: {len(paths) - len(alike)} of them have other widths")
    return FeaturePlan(denoiser=type(denoiser).__name__, size=size, blocks=tuple(blocks), refused=tuple(refused))


def shapes_of(block: nn.Module) -> list[tuple[str, tuple[int, ...]]]:
    """Return the names and shapes of a block's parameters: a plan holds for blocks that have the same."""
    return [(name, tuple(parameter.shape)) for name, parameter in block.named_parameters()]


def _refuse_tied(denoiser: nn.Module, cut: BlockCut) -> None:
    """Raise UnsupportedModel where a parameter to be cut is also that of another module."""
    uses = Counter(id(parameter) for _, parameter in denoiser.named_parameters(remove_duplicate=False))
    for path in cut.paths:
        for each in _parts(denoiser.get_submodule(path), cut):
            tied = [name for name, parameter in each.named_parameters(recurse=False) if uses[id(parameter)] > 1]
            if tied:
                raise UnsupportedModel(f"{tied[0]} of a Linear is tied to another module's")


def _parts(block: nn.Module, cut: BlockCut) -> Iterator[nn.Module]:
    for each in (*cut.columns, *cut.rows, *cut.norms):
        yield block.get_submodule(each.path)


def _first_of_all(mesh: AxisComm, plan: FeaturePlan | None) -> FeaturePlan | None:
    """Return the first rank's plan on all ranks; None unless every rank has one."""
    text = b"" if plan is None else plan.to_json().encode()
    with uncounted(mesh[0]):
        found = AllGather(*mesh, "verify", "feature plan").of_bytes(text)
    return FeaturePlan.from_json(found[0].decode()) if all(found) else None
