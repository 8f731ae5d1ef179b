"""Run a block alone with attention severed, and record what reaches attention and what it returns."""

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
    """A replacement of the part of a block at `path`: each output is an argument with the same rows.

    `outputs`: those of the real part; `sources`: the argument that replaces each tensor, and its width.
    """

    path: str
    outputs: tuple[Any, ...]
    structure: TreeSpec
    sources: Mapping[int, tuple[str, int]]

    @classmethod
    def of(cls, path: str, arguments: CallArguments, output: Any) -> "StandIn | None":
        """Return the replacement for a part after one call; None if an output has no argument with the same rows."""
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
        """Return the replaced outputs for these arguments."""
        given, leaves = arguments.tensors(), list(self.outputs)
        for number, (name, width) in self.sources.items():
            leaves[number] = resized(given[name], width)
        return tree_unflatten(leaves, self.structure)


@dataclass(frozen=True, slots=True)
class Severance:
    """What is severed besides attention while a block is observed.

    `sums`: numbers of the sums, all convolutions with them; None records and severs neither. `parts`: replacements of
    parts of the block. `sequences`: how many sequences of tokens the block is called with.
    """

    sums: frozenset[int] | None = None
    parts: tuple[StandIn, ...] = ()
    sequences: int = 1


WHOLE = Severance()


def observe_block(module: nn.Module, arguments: CallArguments, severance: Severance = WHOLE) -> Observed:
    """Return the inputs of attention in a block and its outputs by name, such as "attention 0 key" and "output 1".

    The inputs of sums, convolutions and severed parts are included. Tensors may have any shape.
    """
    mixing = None if severance.sums is None else MixingSevered(severance.sums, severance.sequences)
    mode, arguments = Severed(mixing), arguments.cloned()
    found: dict[str, Tensor] = {}
    with torch.no_grad(), mode, _stood_in(module, severance.parts, found):
        output = module(*arguments.args, **arguments.kwargs)
    for number, call in enumerate(mode.seen.calls):
        found |= {f"attention {number} {what}": x for what, x in zip(ASKED, call, strict=True) if x is not None}
    seen = {} if mixing is None else mixing.seen
    return found | seen | {f"output {number}": x for number, x in output_tensors(output).items()}


def output_tensors(output: Any) -> dict[int, Tensor]:
    """Return the tensors of a block's output, of any shape, by the number of the leaf."""
    found, _ = tree_flatten_with_path(output)
    return {number: leaf for number, (_, leaf) in enumerate(found) if isinstance(leaf, Tensor)}


def part_argument(path: str, name: str) -> str:
    """Return the name under which an argument of a severed part is observed."""
    return f"part {path} argument {name}"


@contextmanager
def _stood_in(module: nn.Module, parts: Sequence[StandIn], found: dict[str, Tensor]) -> Iterator[None]:
    """Replace `parts` of the module while open, and record their arguments in `found`."""
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
