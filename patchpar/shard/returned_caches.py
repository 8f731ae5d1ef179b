"""Tensors of a call that a network gives back, such as caches of keys, where ranks share its batch.

given back    each rank has them already: they are not sent, and the whole call's stand in the joined result
written to    as well: every rank needs what such a call leaves behind, so that all of them make the whole call
"""

from typing import Any

from patchpar.comm.pytree import leaves, map_leaves, tensors_in


def gives_back(output: Any, call: Any) -> bool:
    """Whether `output` has tensors of `call` in it."""
    given = {id(x) for x in tensors_in(call)}
    return any(id(leaf) in given for leaf in leaves(output))


def without_given(output: Any, call: Any) -> Any:
    """`output` with None in the place of tensors of `call`."""
    given = {id(x) for x in tensors_in(call)}
    return map_leaves(lambda leaf: None if id(leaf) in given else leaf, output)


def with_given(joined: Any, output: Any, own: Any, whole: Any) -> Any:
    """`joined` with the tensors of the call `whole` where `output` has those of its share `own`."""
    given = {id(x): y for x, y in zip(tensors_in(own), tensors_in(whole), strict=True)}
    found = iter([given.get(id(leaf), other) for leaf, other in zip(leaves(output), leaves(joined), strict=True)])
    return map_leaves(lambda _: next(found), joined)


def written(call: Any) -> list[int]:
    """How many times each tensor of a call has been written to; tensors of inference mode do not count that."""
    return [0 if x.is_inference() else x._version for x in tensors_in(call)]
