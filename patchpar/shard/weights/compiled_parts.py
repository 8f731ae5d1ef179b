"""Blocks beside compiled modules: one that is compiled itself is called from outside its graph, and can be gathered."""

import logging
from collections.abc import Mapping

from torch import nn

from patchpar.errors import UnsupportedModel
from patchpar.plan.mesh import Axis
from patchpar.shard.compiled import compiled_in, is_compiled

log = logging.getLogger(__name__)


def blocks_outside_graphs(network: nn.Module, blocks: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return those of the blocks that run outside the graphs of compiled modules around them.

    Raises UnsupportedModel where there is none, and for a block that torch.compile has wrapped.
    """
    around = _graphs_around(network, blocks)
    outside = {path: block for path, block in blocks.items() if not any(_is_inside(path, graph) for graph in around)}
    wrapped = [path for path in compiled_in(network) if path in blocks and not is_compiled(blocks[path])]
    if wrapped or (around and not outside):
        kind = type(network).__name__
        raise UnsupportedModel(
            f"{kind} has compiled modules ({(wrapped or around)[0] or kind}), whose graphs would contain the gathers "
            "of sharded weights: compile its blocks instead, by compile_repeated_blocks(), or use weights=whole"
        )
    return outside


def say_what_is_in_graphs(network: nn.Module, blocks: Mapping[str, nn.Module], axis: Axis) -> None:
    """Log, on the first rank of the axis, which compiled modules have blocks in their graphs, which stay whole."""
    around = _graphs_around(network, blocks)
    if around and axis.rank == 0:
        log.warning(
            "%s: the blocks in %s stay whole on every rank, since it is compiled, and its graph would contain gathers",
            type(network).__name__,
            ", ".join(around),
        )


def _graphs_around(network: nn.Module, blocks: Mapping[str, nn.Module]) -> list[str]:
    """Return paths of compiled modules that have blocks below them."""
    return [graph for graph in compiled_in(network) if any(_is_inside(path, graph) for path in blocks)]


def _is_inside(path: str, graph: str) -> bool:
    return path.startswith(f"{graph}.".lstrip("."))
