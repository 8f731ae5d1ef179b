"""Trees of arguments and results: lists, tuples, dicts and outputs of diffusers. All else is a leaf."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor


def entries(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a dict; of an output of diffusers all fields, also those that are None."""
    return {each.name: getattr(tree, each.name) for each in fields(tree)} if is_dataclass(tree) else tree


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return `tree` with `function` applied to its leaves (diffusers' outputs are dicts)."""
    if isinstance(tree, dict):
        mapped = {key: map_leaves(function, value) for key, value in entries(tree).items()}
        return mapped if type(tree) is dict else type(tree)(**mapped)
    if isinstance(tree, (list, tuple)):
        items = [map_leaves(function, item) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    return function(tree)


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Return `tree` with `function` applied to its tensors, of any shape."""
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, tree)


def with_own_lists(tree: Any) -> Any:
    """Return a copy of `tree` with its own lists, tuples and dicts: some models empty those of their arguments.

    HunyuanDiT takes a ControlNet's residuals out of their list one by one.
    """
    if type(tree) is dict:
        return {key: with_own_lists(value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(with_own_lists(item) for item in tree)
    return tree


def on_own_lists(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward each of whose calls gets lists and dicts of its own, so that it can be called again."""
    return lambda *args, **kwargs: forward(*with_own_lists(args), **with_own_lists(kwargs))


def leaves(tree: Any) -> Iterator[Any]:
    """Yield the leaves of `tree` in the order of `map_leaves`."""
    if isinstance(tree, dict):
        tree = entries(tree).values()
    elif not isinstance(tree, (list, tuple)):
        yield tree
        return
    for item in tree:
        yield from leaves(item)


def paths_of(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, leaf) for each leaf."""
    if isinstance(tree, dict):
        for key, value in entries(tree).items():
            yield from paths_of(value, f"{path}.{key}")
    elif isinstance(tree, (list, tuple)):
        for number, item in enumerate(tree):
            yield from paths_of(item, f"{path}[{number}]")
    else:
        yield path, tree


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors among the leaves, of any shape."""
    return [leaf for leaf in leaves(tree) if isinstance(leaf, Tensor)]


def floats_in(tree: Any) -> list[Tensor]:
    """Return the floating-point tensors among the leaves, of any shape: of a denoiser's output, its predictions."""
    return [x for x in tensors_in(tree) if x.is_floating_point()]


def with_tensors(tree: Any, tensors: Sequence[Tensor]) -> Any:
    """Return `tree` with its tensors replaced by `tensors`, of any shape, in the order of `tensors_in`."""
    replacements = iter(tensors)
    return map_tensors(lambda _: next(replacements), tree)
