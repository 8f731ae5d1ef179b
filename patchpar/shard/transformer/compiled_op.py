"""Split attention as one operator of torch: a compiled block stays one graph, and nothing of the exchange is traced."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchpar.shard.sdpa import AttentionCall

_ANSWER: ContextVar[Callable[[AttentionCall], Tensor]] = ContextVar("patchpar_answer")  # of the block under way
_TORCHS = torch.ops.aten.scaled_dot_product_attention.default._schema
SIGNATURE = str(_TORCHS).removeprefix(_TORCHS.name)


@contextmanager
def answered_by(answer: Callable[[AttentionCall], Tensor]) -> Iterator[None]:
    """While open, `attend` gives what `answer` gives, in this thread."""
    token = _ANSWER.set(answer)
    try:
        yield
    finally:
        _ANSWER.reset(token)


@torch.library.custom_op("patchpar::attend", mutates_args=(), schema=SIGNATURE)
def attend(*args: Any, **kwargs: Any) -> Tensor:
    """scaled_dot_product_attention of own queries [..., q, D] to everybody's keys; which they are, the block knows."""
    return _ANSWER.get()(AttentionCall(*args, **kwargs)).contiguous()


@attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> Tensor:
    return query.new_empty(*query.shape[:-1], value.shape[-1])


def traceable(func: Callable[..., Any]) -> Callable[..., Any]:
    """What stands for a function of torch in a compiled block."""
    if func is F.scaled_dot_product_attention:
        return attend
    if func is Tensor.unflatten:  # torch.compile cannot look through its call of super()
        return torch.unflatten
    return func


def compiled_forward(
    module: nn.Module, compiled: Callable[..., Any], forward: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """The compiled block as it was before it was hooked."""
    hooked, module.forward = module.forward, forward
    try:
        return compiled(*args, **kwargs)
    finally:
        module.forward = hooked
