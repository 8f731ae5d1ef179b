"""Layers that tell branches of guidance apart by their index in the batch, on a rank that has only some branches.

Perturbed-attention guidance (Ahn et al. 2024, arXiv:2403.17377) adds a branch in which, in some attention layers, each
token attends to itself alone. diffusers' processors for those layers cut the batch into its branches and take the last
for the perturbed one:

    plain layer             [u c p]     ->  chunk(3)  ->  attention of u and c, identity for p
    on rank 1 of 3          [c] -> [c c c]  ->  chunk(3)  ->  ... -> [. c .] -> [c]

A processor treats each row of the batch independently, so the row at its own index is the same as in the whole batch,
whatever the other rows are. Nothing is sent; those few layers compute as much as without the split.

Cross-frame attention (Text2Video-Zero, arXiv:2303.13439) is handled alike: its processors divide the rows by the number
of branches to get the number of frames, and a frame attends to the first frame of its own branch.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from patchpar.comm.pytree import map_tensors
from patchpar.shard.batch import sample_of
from patchpar.shard.hooks import HookSet
from patchpar.shard.module_tree import modules_of


def layers_by_branch(pipe: Any, network: nn.Module) -> list[nn.Module]:
    """Return the layers of `network` with processors that a diffusers pipeline has set for perturbed attention.

    And those whose processors have the number of branches. Valid while the pipeline runs: it sets processors for a
    call, and may remove them afterwards.
    """
    kinds = {type(each) for each in getattr(pipe, "_pag_attn_processors", None) or ()}
    found = ((module, getattr(module, "processor", None)) for module in modules_of(network))
    return [module for module, processor in found if type(processor) in kinds or _divides_rows(module, processor)]


def _divides_rows(layer: nn.Module, processor: Any) -> bool:
    """Whether a processor has the number of branches; in cross-attention it treats every row independently."""
    return isinstance(getattr(processor, "batch_size", None), int) and not getattr(layer, "is_cross_attention", False)


@contextmanager
def at_own_index(layers: Sequence[nn.Module], rank: int, parts: int) -> Iterator[None]:
    """Context in which the layers get part `rank` of `parts` of a batch as a whole batch, and return that part."""
    with HookSet() as hooks:
        for layer in layers:
            hooks.before(layer, partial(_repeated, parts), with_kwargs=True)
            hooks.after(layer, partial(_own_rows, rank, parts), prepend=True)
        yield


def _repeated(
    parts: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with this rank's rows repeated `parts` times."""
    rows = len(sample_of(args, kwargs))

    def whole(value: Any) -> Any:
        carries = isinstance(value, Tensor) and value.ndim > 0 and len(value) == rows
        return torch.cat([value] * parts) if carries else value

    return tuple(map(whole, args)), {name: whole(value) for name, value in kwargs.items()}


def _own_rows(rank: int, parts: int, layer: nn.Module, args: Any, output: Any) -> Any:
    """Return this rank's rows of the output, or of each of several."""
    return map_tensors(lambda x: x.chunk(parts)[rank], output)
