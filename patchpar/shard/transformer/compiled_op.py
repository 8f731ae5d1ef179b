"""Split attention as one custom operator: a compiled block stays one graph, and the exchange is not traced."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchpar.shard.sdpa import AttentionCall

_ANSWER: ContextVar[Callable[[AttentionCall], Tensor]] = ContextVar("patchpar_answer")  # of the running block
_TORCHS = torch.ops.aten.scaled_dot_product_attention.default._schema
SIGNATURE = str(_TORCHS).removeprefix(_TORCHS.name)


@contextmanager
def answered_by(answer: Callable[[AttentionCall], Tensor]) -> Iterator[None]:
    """Make `attend` call `answer` in this thread while open; it returns the output [B, N, q, E]."""
    token = _ANSWER.set(answer)
    try:
        yield
    finally:
        _ANSWER.reset(token)


@torch.library.custom_op("patchpar::attend", mutates_args=(), schema=SIGNATURE)
def attend(*args: Any, **kwargs: Any) -> Tensor:
    """Return the attention output [..., q, E] of own queries [..., q, D] with the keys of all ranks."""
    return _ANSWER.get()(AttentionCall(*args, **kwargs)).contiguous()


@attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> Tensor:
    return query.new_empty(*query.shape[:-1], value.shape[-1])


def traceable(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return the replacement of a torch function in a compiled block."""
    if func is F.scaled_dot_product_attention:
        return attend
    if func is Tensor.unflatten:  # torch.compile cannot look through its call of super()
        return torch.unflatten
    return func


def compiled_forward(
    module: nn.Module, compiled: Callable[..., Any], forward: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Call the compiled block with its `forward` of before the hook."""
    hooked, module.forward = module.forward, forward
    try:
        return compiled(*args, **kwargs)
    finally:
        module.forward = hooked
