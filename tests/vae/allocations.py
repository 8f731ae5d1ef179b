"""How much memory tensors take at most while something runs: every storage that is made, until it is given up."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """Counts, in bytes, what is alive of what this thread has made since it was entered.

    What was there before does not count, nor what a kernel takes for itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alive, self.peak = 0, 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        before = {id(leaf.untyped_storage()) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, Tensor) and id(leaf.untyped_storage()) not in before:
                self._note(leaf)
        return found

    def _note(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        if id(storage) in self._known:
            return
        self._known.add(id(storage))
        self.alive += storage.nbytes()
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._given_up, id(storage), storage.nbytes())

    def _given_up(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.alive -= num_bytes
