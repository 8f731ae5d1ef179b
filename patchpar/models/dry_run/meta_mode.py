"""Operators on tensors that have no values: their shapes, their memory and their FLOPs, and nothing computed.

An operator with an argument on the meta device runs there, whatever the device of its others: a pipeline's own code
goes on with its small tensors on the CPU (timesteps, token ids), and networks on meta. Where the code needs a value
that is not there, it gets one that is made up.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from patchpar.models.dry_run.live_bytes import LiveBytes
from patchpar.shard.sdpa import AttentionCall

FLOPS_OF_ATTENTION: Any = sdpa_flop_count  # not typed by torch
META = torch.device("meta")


class MetaMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's base is not typed
    """Counts what runs inside: `memory` of all new tensors, and `flops` of matrix products and convolutions."""

    def __init__(self, memory: LiveBytes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory, self.flops = memory, 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        before = {id(x.untyped_storage()) for x in tensors}
        found = self._run_empty(func, args, kwargs) if any(map(_is_empty, tensors)) else func(*args, **kwargs)
        for x in tree_leaves(found):
            if isinstance(x, Tensor) and id(x.untyped_storage()) not in before:
                self.memory.see(x)
        return found

    def attend(self, call: AttentionCall) -> Tensor:
        """Return an output [B, N, q, E] without values: one kernel, which holds no matrix of weights."""
        if not _is_empty(call.query):
            return call.run()
        shapes = [_with_heads(x) for x in (call.query, call.key, call.value)]
        self.flops += FLOPS_OF_ATTENTION(*shapes)
        return call.query.new_empty((*call.query.shape[:-1], call.value.shape[-1]))

    def _run_empty(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        name = func.overloadpacket.__name__
        if name in MADE_UP:
            return MADE_UP[name](args[0])
        target = kwargs.get("device")
        if name == "_to_copy" and target is not None and not _is_meta(target):
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        if func._schema.is_mutable and isinstance(args[0], Tensor) and not _is_empty(args[0]):
            return args[0]  # a tensor with values that is written to: they are left as they are
        if name == "index":
            args = (args[0], [each for index in args[1] for each in _without_mask(index)])
        args, kwargs = tree_map(_emptied, (args, kwargs))
        found = func(*args, **({**kwargs, "device": META} if target is not None else kwargs))
        count = flop_registry.get(func.overloadpacket)
        self.flops += 0 if count is None else int(count(*args, **kwargs, out_val=found))
        return found


def _scalar(x: Tensor) -> bool | float | int:
    return True if x.dtype == torch.bool else 1.0 if x.dtype.is_floating_point else 1


def _nonzero(x: Tensor) -> Tensor:
    """Return the indices [n, dims] of as many values as there may be at most in the first dim."""
    return torch.zeros((x.shape[0] if x.ndim else 1, x.ndim), dtype=torch.int64)


def _without_mask(index: Tensor | None) -> list[Tensor | None]:
    """Return what selects the same as an index of any shape, without a mask whose values are not there.

    A mask that has values is replaced by its indices, any other by as many as it can have.
    """
    if index is None or index.dtype not in (torch.bool, torch.uint8):
        return [index]
    if not _is_empty(index):
        return list(index.nonzero(as_tuple=True))
    return [index.new_empty(index.numel(), dtype=torch.int64) for _ in range(index.ndim)]


MADE_UP: dict[str, Callable[[Tensor], Any]] = {
    "_local_scalar_dense": _scalar,
    "equal": lambda x: True,
    "is_nonzero": lambda x: True,
    "nonzero": _nonzero,
    "masked_select": lambda x: x.new_empty(x.numel()),
}
"""What is returned instead of values that are not there, by the name of the operator."""


def _is_meta(device: Any) -> bool:
    return torch.device(device).type == META.type


def _is_empty(x: Tensor) -> bool:
    return _is_meta(x.device)


def _emptied(leaf: Any) -> Any:
    return leaf.to(META) if isinstance(leaf, Tensor) and not _is_empty(leaf) else leaf


def _with_heads(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape) if x.ndim == 4 else (x.shape[0], 1, *x.shape[1:])
