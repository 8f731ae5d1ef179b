"""Find the parts of a block that mix tokens in an unknown way, such as flex attention, by trying each.

    1. sever every part          shows where the block's tokens are in the arguments of its parts
    2. run each part alone       with some of the tokens: one with another result needs all of them
    3. sever those that do       and search the rest of the block as usual

A part is a direct submodule that is called once. The parts that need all tokens are computed by every rank.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from patchpar.errors import UnsupportedModel
from patchpar.shard.hooks import HookSet
from patchpar.shard.transformer.probe.block import BlockProbe
from patchpar.shard.transformer.probe.capture import CallArguments, CapturedBlock
from patchpar.shard.transformer.probe.check import is_close, middle_of, rounding_of
from patchpar.shard.transformer.probe.observe_block import Severance, StandIn, observe_block
from patchpar.shard.transformer.token_plan import BlockPlan, Replicated
from patchpar.shard.transformer.token_ranges import TokenRanges
from patchpar.shard.unsupported_model import attempted

MOST = 0.75  # of a block's parameters: where every rank computes more, splitting the rest gains almost nothing


@dataclass(frozen=True, slots=True)
class PartCall:
    """The call of a part of a block, and its replacement."""

    module: nn.Module
    arguments: CallArguments
    stand_in: StandIn


def replicated_plan(block: CapturedBlock, moved: CapturedBlock, latent_size: int) -> BlockPlan | None:
    """Return a plan with replicated parts; None if that is none or nearly all of the block. Raises UnsupportedModel."""
    calls = _calls_in(block)

    def plan_without(paths: Iterable[str]) -> BlockPlan | None:
        severance = Severance(parts=tuple(calls[path].stand_in for path in paths))
        return BlockProbe(block, moved, latent_size, severance).plan()

    every = plan_without(calls)
    if every is None:
        return None
    tokens = round(every.ratio * latent_size)
    ranges = middle_of(tokens)
    parts = [part for part in every.replicated if part.inputs]
    needing = [part.path for part in parts if not _works_alone(calls[part.path], part, ranges)]
    if not needing:
        return None
    plan = plan_without(needing)
    for path in needing:  # an attention layer may get whole positions, so running it alone does not decide
        fewer = [each for each in needing if each != path]
        if fewer and _calls_attention(calls[path]):
            with suppress(UnsupportedModel):
                plan, needing = plan_without(fewer), fewer
    worth = sum(_parameters(calls[path].module) for path in needing) <= MOST * _parameters(block.module)
    return plan if plan is not None and plan.outputs and worth else None


def _calls_in(block: CapturedBlock) -> dict[str, PartCall]:
    """Return the parts of a block that are called once and can be replaced, in the order of their calls."""
    noted: dict[str, list[tuple[CallArguments, Any]]] = {}
    with _calls_noted(block.module, noted):
        observe_block(block.module, block.arguments)
    found = {}
    for path, calls in noted.items():
        stand_in = StandIn.of(path, *calls[0])
        if len(calls) == 1 and stand_in is not None:
            found[path] = PartCall(block.module.get_submodule(path), calls[0][0], stand_in)
    return found


@contextmanager
def _calls_noted(module: nn.Module, noted: dict[str, list[tuple[CallArguments, Any]]]) -> Iterator[None]:
    """Record the arguments and the output of each call of a direct submodule while open."""

    def note(path: str, part: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        noted.setdefault(path, []).append((CallArguments.of(part, args, kwargs).cloned(), output))

    with HookSet() as hooks:
        for path, part in module.named_children():
            hooks.after(part, partial(note, path), with_kwargs=True)
        yield


def _works_alone(call: PartCall, part: Replicated, ranges: TokenRanges) -> bool:
    """Whether the part computes the same for some of its tokens as for all of them, with attention severed."""

    def cut(name: str, leaf: object) -> object:
        rows = part.inputs.get(name)
        return leaf if rows is None or not isinstance(leaf, Tensor) else rows.cut(leaf, ranges)

    with attempted():
        whole, own = (observe_block(call.module, each) for each in (call.arguments, call.arguments.map(cut)))
        wanted = {
            f"output {number}": rows.cut(whole[f"output {number}"], ranges) for number, rows in part.outputs.items()
        }
        rounding = rounding_of(call.arguments)
        return all(own[name].shape == x.shape and is_close(own[name], x, rounding) for name, x in wanted.items())
    return False


def _calls_attention(call: PartCall) -> bool:
    return any(name.startswith("attention") for name in observe_block(call.module, call.arguments))


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
