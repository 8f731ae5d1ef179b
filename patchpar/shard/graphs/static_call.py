"""The arguments of a captured call, and what must not change from one such call to the next."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_unflatten

from patchpar.comm.pytree import map_tensors
from patchpar.shard.argument_changes import written
from patchpar.shard.graphs.torch_state import torch_state

Call = tuple[Any, Any]  # args, kwargs
PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))


class StaticCall:
    """A call with copies of its tensors, to which those of later calls are written.

    `call`: its args and kwargs. A tensor that is passed twice is one tensor here too.
    """

    def __init__(self, call: Call) -> None:
        leaves, form = tree_flatten(call)
        with torch.inference_mode(False):  # whose tensors have no count of what is written to them
            own = {id(x): torch.empty_like(x) for x in leaves if isinstance(x, Tensor)}
        self._own = list(own.values())
        self.call: Call = tree_unflatten([own.get(id(x), x) for x in leaves], form)
        self.take(call)
        self._counts, self._written = written(self._own), list[int]()

    def take(self, call: Call) -> None:
        """Write the tensors of a call of the same signature."""
        for own, x in zip(self._own, _distinct(call), strict=True):
            own.copy_(x)

    def step_has_been_captured(self) -> None:
        """Note which tensors the step writes to, such as a cache of keys."""
        now = zip(self._counts, written(self._own), strict=True)
        self._written = [number for number, (before, after) in enumerate(now) if before != after]

    def give_back(self, call: Call) -> None:
        """Write to the tensors of a call what its step has written to them here."""
        given = list(_distinct(call)) if self._written else []
        for number in self._written:
            given[number].copy_(self._own[number])


def _distinct(call: Call) -> Iterator[Tensor]:
    """Yield each tensor of a call once, of any shape."""
    leaves, _ = tree_flatten(call)
    yield from {id(x): x for x in leaves if isinstance(x, Tensor)}.values()


def signature_of(call: Call) -> Any:
    """Return the form of a call, layouts of its tensors, which of them are the same, and all other values.

    Of an object that no call may have, see `why_not_static`, only the type: its id would differ between ranks. And the
    state of torch, such as autocast and precision of products: a captured call has it as captured.
    """
    leaves, form = tree_flatten(call)
    first_at: dict[int, int] = {}
    types = {x.device.type for x in leaves if isinstance(x, Tensor)}
    of_leaves = tuple(
        (tuple(x.shape), x.stride(), x.dtype, str(x.device), x.requires_grad, first_at.setdefault(id(x), number))
        if isinstance(x, Tensor)
        else (type(x).__name__, repr(x) if isinstance(x, PLAIN) else "")
        for number, x in enumerate(leaves)
    )
    return str(form), torch_state(types), of_leaves


def why_not_static(call: Call, device: torch.device) -> str:
    """Return why a call cannot be captured, on account of its arguments; empty if it can."""
    for path, x in tree_flatten_with_path(call)[0]:
        name = keystr(path)
        if isinstance(x, Tensor):
            if x.device.type != device.type:
                return f"argument {name} is on {x.device}, and a graph reads memory of {device} only"
            if type(x) is not Tensor:
                return f"argument {name} is a {type(x).__name__}, whose values may come later"
            if x.requires_grad and torch.is_grad_enabled():
                return f"argument {name} requires gradients, which a graph does not compute"
        elif not isinstance(x, PLAIN):
            return f"argument {name} is a {type(x).__name__}, which the denoiser may change in each step"
    return ""


def copies_of_output(output: Any) -> Any:
    """Return a tree with copies of its tensors, of any shape: the next replay writes to the originals."""
    return map_tensors(torch.clone, output)
