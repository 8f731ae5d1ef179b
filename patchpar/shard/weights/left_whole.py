"""Weights that stay whole on every rank, since they are not packed, and that this is said.

no plain tensors     objects of torch's own quantised modules (`torch.ScriptObject`), tensors with a quantiser or
                     without strides, and subclasses around others that do not say which (`__tensor_flatten__`)
of adapters          methods put them there and take them away
in a graph           of a compiled module; a block that is compiled itself is called from outside its graph
"""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from patchpar.errors import UnsupportedModel
from patchpar.plan.mesh import Axis
from patchpar.shard.compiled import compiled_in, is_compiled
from patchpar.shard.module_tree import modules_of

LAYERS = "adapter_layer_names"
"""Attribute of PEFT's layers: the names of those attributes that hold weights of adapters."""
NO_SUBCLASSES = (nn.Parameter, Tensor)  # whose missing attributes take longest to look for
log = logging.getLogger(__name__)


def is_plain(x: Tensor) -> bool:
    """Whether a tensor of any shape is elements side by side in memory of its own, which can be copied as bytes."""
    return x.layout == torch.strided and not x.is_quantized and (x.is_meta or x.data_ptr() != 0)


def holds_others(x: Tensor) -> bool:
    """Whether a tensor of any shape is a subclass around others, and says around which."""
    return type(x) not in NO_SUBCLASSES and hasattr(x, "__tensor_flatten__")


def opaque_weights(modules: Iterable[nn.Module]) -> str:
    """Return the weights of modules, those below them too, that are not plain tensors, for errors; empty without any.

    Weights of a tensor subclass that can be flattened are not among them.
    """
    found: Counter[str] = Counter()
    for module in {each for outer in modules for each in modules_of(outer)}:
        kind = type(module).__name__
        for x in (*module._parameters.values(), *module._buffers.values()):
            if x is not None and not holds_others(x) and x.numel() and not is_plain(x):
                found[f"{type(x).__name__} ({x.dtype}) in {kind}"] += 1
        if count := [*map(type, vars(module).values())].count(torch.ScriptObject):
            found[f"ScriptObject in {kind}"] += count
    return ", ".join(f"{count} {name}" for name, count in sorted(found.items()))


def say_what_stays_whole(network: nn.Module, modules: Iterable[nn.Module], axis: Axis) -> None:
    """Log, on the first rank of the axis, which weights of these modules of a network are not divided."""
    found = opaque_weights(modules)
    if found and axis.rank == 0:
        log.warning(
            "%s has weights that are no plain tensors (%s), so that they stay whole on every rank",
            type(network).__name__,
            found,
        )


def adapter_modules(network: nn.Module) -> set[nn.Module]:
    """Return the modules with weights of PEFT's adapters, those below them too. PEFT is not imported."""
    found = set[nn.Module]()
    for module in modules_of(network):
        for name in vars(module).get(LAYERS, getattr(type(module), LAYERS, ())):
            part = getattr(module, name, None)
            if isinstance(part, nn.Module):
                found.update(modules_of(part))
    return found


def blocks_outside_graphs(network: nn.Module, blocks: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return those of the blocks that run outside the graphs of compiled modules around them.

    Raises UnsupportedModel where there is none, and for a block that torch.compile has wrapped.
    """
    compiled = compiled_in(network)
    around = _graphs_around(compiled, blocks)
    outside = {path: block for path, block in blocks.items() if not any(_is_inside(path, graph) for graph in around)}
    wrapped = [path for path in compiled if path in blocks and not is_compiled(blocks[path])]
    if wrapped or (around and not outside):
        kind = type(network).__name__
        raise UnsupportedModel(
            f"{kind} has compiled modules ({(wrapped or around)[0] or kind}), whose graphs would contain the gathers "
            "of sharded weights: compile its blocks instead, by compile_repeated_blocks(), or use weights=whole"
        )
    return outside


def say_what_is_in_graphs(network: nn.Module, blocks: Mapping[str, nn.Module], axis: Axis) -> None:
    """Log, on the first rank of the axis, which compiled modules have blocks in their graphs, which stay whole."""
    around = _graphs_around(compiled_in(network), blocks)
    if around and axis.rank == 0:
        log.warning(
            "%s: the blocks in %s stay whole on every rank, since it is compiled, and its graph would contain gathers",
            type(network).__name__,
            ", ".join(around),
        )


def _graphs_around(compiled: list[str], blocks: Mapping[str, nn.Module]) -> list[str]:
    """Return those of the paths of compiled modules that have blocks below them."""
    return [graph for graph in compiled if any(_is_inside(path, graph) for path in blocks)]


def _is_inside(path: str, graph: str) -> bool:
    return path.startswith(f"{graph}.".lstrip("."))
