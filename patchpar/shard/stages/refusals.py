"""What cannot run in stages: refused by name, with the way out."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from patchpar.errors import UnsupportedModel
from patchpar.shard.argument_changes import are_as_before, gives_back, held_by, written
from patchpar.shard.compiled import compiled_in
from patchpar.shard.group_offload import is_offloaded
from patchpar.shard.stages.block_outputs import OutputStructure
from patchpar.shard.step_caches import cache_of
from patchpar.shard.verification import Call
from patchpar.shard.weights.packed import blocks_of


def refuse_for_stages(denoiser: nn.Module) -> None:
    """Raise UnsupportedModel for a network without blocks, compiled, offloaded, or with a step cache."""
    kind, compiled, cache = type(denoiser).__name__, compiled_in(denoiser), cache_of(denoiser)
    if not blocks_of(denoiser):
        raise UnsupportedModel(f"{kind} has no list of blocks (nn.ModuleList) to divide into stages: use stage=1")
    if compiled:
        raise UnsupportedModel(
            f"{kind} has compiled modules ({compiled[0] or kind}), whose graphs would contain what other stages run: "
            "use stage=1, or do not compile it"
        )
    if any(map(is_offloaded, denoiser.modules())):
        raise UnsupportedModel(
            f"{kind} has group offloading, which moves weights that stages release: stages take its place; load the "
            "model without it, or use stage=1"
        )
    if cache is not None:
        raise UnsupportedModel(
            f"{cache} skips blocks, or parts of them, by what it has kept of any of them, of which each stage runs "
            "some: call disable_cache() of the network, or use stage=1"
        )


def refuse_kept_state(
    denoiser: nn.Module, output: Any, before: tuple[Sequence[tuple[Tensor, int]], Sequence[int]], call: Call
) -> None:
    """Raise UnsupportedModel for an output with more than tensors, or state in arguments.

    `before`: what `held_by` found in the arguments before the call, tensors of any shape, and what `written` did.
    """
    held, counts = before
    fills = gives_back(output, call) and written(call) != counts
    if OutputStructure.of(output) is None or fills or not are_as_before(held, held_by(call)):
        raise UnsupportedModel(
            f"{type(denoiser).__name__} writes to a cache among its arguments, or returns more than tensors and "
            "numbers, which stages would have only a part of: use stage=1"
        )
