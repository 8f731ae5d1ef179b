"""Layers that tell branches of guidance apart by their places in the batch, on a rank that has some branches only.

Perturbed-attention guidance (Ahn et al. 2024, arXiv:2403.17377) adds a branch in which some attention layers let each
token see itself alone. diffusers' processors for those layers cut the batch into its branches and take the last for the
perturbed one:

    the layer without us    [u c p]     ->  chunk(3)  ->  attention of u and c, identity for p
    on rank 1 of 3          [c] -> [c c c]  ->  chunk(3)  ->  ... -> [. c .] -> [c]

A processor treats each row of the batch by itself, so that the row at its own place is what it is in the whole batch,
whoever stands at the other places. Nothing is sent; those few layers compute as much as without the split.

Cross-frame attention (Text2Video-Zero, arXiv:2303.13439), whose processors divide the rows by a number of branches to
know how many frames a video has, is the same: a frame attends to the first frame of its own branch.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from patchpar.comm.pytree import map_leaves
from patchpar.shard.batch import sample_of
from patchpar.shard.hooks import HookSet


def layers_by_branch(pipe: Any, network: nn.Module) -> list[nn.Module]:
    """The layers of `network` with processors that a diffusers pipeline has set for perturbed attention.

    And those whose processors are told how many branches there are. Ask while the pipeline runs: it sets them for a
    call, and may take them out again.
    """
    kinds = {type(each) for each in getattr(pipe, "_pag_attn_processors", None) or ()}
    found = ((module, getattr(module, "processor", None)) for module in network.modules())
    return [module for module, processor in found if type(processor) in kinds or _divides_rows(module, processor)]


def _divides_rows(layer: nn.Module, processor: Any) -> bool:
    """Whether a processor has the number of branches; in cross-attention it treats every row by itself."""
    return isinstance(getattr(processor, "batch_size", None), int) and not getattr(layer, "is_cross_attention", False)


@contextmanager
def at_own_index(layers: Sequence[nn.Module], rank: int, parts: int) -> Iterator[None]:
    """While open, the layers get share `rank` of `parts` of a batch as a whole batch, and give back that share."""
    with HookSet() as hooks:
        for layer in layers:
            hooks.before(layer, partial(_repeated, parts), with_kwargs=True)
            hooks.after(layer, partial(_own_rows, rank, parts), prepend=True)
        yield


def _repeated(
    parts: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with as many copies of our rows as there are shares."""
    rows = len(sample_of(args, kwargs))

    def whole(value: Any) -> Any:
        carries = isinstance(value, Tensor) and value.ndim > 0 and len(value) == rows
        return torch.cat([value] * parts) if carries else value

    return tuple(map(whole, args)), {name: whole(value) for name, value in kwargs.items()}


def _own_rows(rank: int, parts: int, layer: nn.Module, args: Any, output: Any) -> Any:
    """The rows at our place, of the output, or of each of several."""
    return map_leaves(lambda x: x.chunk(parts)[rank] if isinstance(x, Tensor) else x, output)
