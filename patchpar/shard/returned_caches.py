"""Argument tensors that a network returns, such as caches of keys, where ranks split its batch.

returned      each rank has them already: they are not sent, and the joined result has those of the whole call
written to    too: every rank needs the new contents, so all of them make the whole call
"""

from typing import Any

from patchpar.comm.pytree import leaves, map_leaves, tensors_in


def gives_back(output: Any, call: Any) -> bool:
    """Whether `output` contains argument tensors of `call`."""
    given = {id(x) for x in tensors_in(call)}
    return any(id(leaf) in given for leaf in leaves(output))


def without_given(output: Any, call: Any) -> Any:
    """Return `output` with None for argument tensors of `call`."""
    given = {id(x) for x in tensors_in(call)}
    return map_leaves(lambda leaf: None if id(leaf) in given else leaf, output)


def with_given(joined: Any, output: Any, own: Any, whole: Any) -> Any:
    """Return `joined` with the tensors of the call `whole` where `output` has those of its part `own`."""
    given = {id(x): y for x, y in zip(tensors_in(own), tensors_in(whole), strict=True)}
    found = iter([given.get(id(leaf), other) for leaf, other in zip(leaves(output), leaves(joined), strict=True)])
    return map_leaves(lambda _: next(found), joined)


def written(call: Any) -> list[int]:
    """Return how many times each tensor of a call has been written to; inference tensors have no such count."""
    return [0 if x.is_inference() else x._version for x in tensors_in(call)]
