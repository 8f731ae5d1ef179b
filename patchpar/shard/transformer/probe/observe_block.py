"""A block alone, looked into: what reaches attention in it, and what it returns, while its tokens do not meet."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_flatten_with_path, tree_unflatten

from patchpar.shard.transformer.probe.capture import ASKED, CallArguments, Severed, resized
from patchpar.shard.transformer.probe.reduced_model import forward_of
from patchpar.shard.transformer.probe.row_trace import Observed
from patchpar.shard.transformer.token_mixing import MixingSevered


@dataclass(frozen=True, slots=True)
class StandIn:
    """What answers for the part of a block at `path`: each output is an argument with the same rows.

    `outputs` are as they once were; `sources` says which argument stands for which of them, and how wide it is then.
    """

    path: str
    outputs: tuple[Any, ...]
    structure: TreeSpec
    sources: Mapping[int, tuple[str, int]]

    @classmethod
    def of(cls, path: str, arguments: CallArguments, output: Any) -> "StandIn | None":
        """For a part that was called so and returned that; None where an output has no such argument."""
        left = {name: x for name, x in arguments.tensors().items() if x.is_floating_point()}
        leaves, structure = tree_flatten(output)
        sources = {}
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                alike = [name for name, x in left.items() if x.ndim > 1 and x.shape[:-1] == leaf.shape[:-1]]
                if not alike:
                    return None
                name = next((each for each in alike if left[each].shape == leaf.shape), alike[0])
                sources[number] = (name, leaf.shape[-1])
                if len(alike) > 1:
                    del left[name]
        return cls(path, tuple(leaves), structure, sources) if sources else None

    def answer(self, arguments: CallArguments) -> Any:
        """What it returns for these arguments."""
        given, leaves = arguments.tensors(), list(self.outputs)
        for number, (name, width) in self.sources.items():
            leaves[number] = resized(given[name], width)
        return tree_unflatten(leaves, self.structure)


@dataclass(frozen=True, slots=True)
class Severance:
    """Where, beside attention, tokens do not meet while a block is looked into.

    `sums`: products of matrices, and then convolutions do not mix them either; None where neither is looked for.
    `parts`: what answers for parts of the block. `sequences`: how many sequences of tokens it is called with.
    """

    sums: frozenset[int] | None = None
    parts: tuple[StandIn, ...] = ()
    sequences: int = 1


WHOLE = Severance()


def observe_block(module: nn.Module, arguments: CallArguments, severance: Severance = WHOLE) -> Observed:
    """What reaches attention in a block, and what it returns: by name, such as "attention 0 key" and "output 1".

    What reaches products, convolutions and parts that are severed is told as well.
    """
    mixing = None if severance.sums is None else MixingSevered(severance.sums, severance.sequences)
    mode, arguments = Severed(mixing), arguments.cloned()
    found: dict[str, Tensor] = {}
    with torch.no_grad(), mode, _stood_in(module, severance.parts, found):
        output = module(*arguments.args, **arguments.kwargs)
    for number, call in enumerate(mode.calls):
        found |= {f"attention {number} {what}": x for what, x in zip(ASKED, call, strict=True) if x is not None}
    seen = {} if mixing is None else mixing.seen
    return found | seen | {f"output {number}": x for number, x in output_tensors(output).items()}


def output_tensors(output: Any) -> dict[int, Tensor]:
    """The tensors a block returned, by the number of the leaf."""
    found, _ = tree_flatten_with_path(output)
    return {number: leaf for number, (_, leaf) in enumerate(found) if isinstance(leaf, Tensor)}


def part_argument(path: str, name: str) -> str:
    """What an argument of a severed part is observed as."""
    return f"part {path} argument {name}"


@contextmanager
def _stood_in(module: nn.Module, parts: Sequence[StandIn], found: dict[str, Tensor]) -> Iterator[None]:
    """While open, `parts` answer for those of the module, and what they are called with is noted."""
    with ExitStack() as stack:
        for part in parts:
            inner = module.get_submodule(part.path)
            stack.enter_context(forward_of(inner, partial(_answered, inner, part, found)))
        yield


def _answered(
    module: nn.Module, part: StandIn, found: dict[str, Tensor], forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    arguments = CallArguments.of(module, args, kwargs)
    found |= {part_argument(part.path, name): x for name, x in arguments.tensors().items() if x.ndim}
    return part.answer(arguments)
