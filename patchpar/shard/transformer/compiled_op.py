"""Split attention as one operator of torch: a compiled block stays one graph, and nothing of the exchange is traced."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_ANSWER: ContextVar[Callable[..., Tensor]] = ContextVar("patchpar_answer")  # of the block that this rank is in


@contextmanager
def answered_by(answer: Callable[..., Tensor]) -> Iterator[None]:
    """While open, `attend` gives what `answer` gives, in this thread."""
    token = _ANSWER.set(answer)
    try:
        yield
    finally:
        _ANSWER.reset(token)


@torch.library.custom_op("patchpar::attend", mutates_args=())
def attend(  # noqa: PLR0913 - the signature is torch's
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """scaled_dot_product_attention of own queries [..., q, D] to everybody's keys; which they are, the block knows."""
    options = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
    return _ANSWER.get()(query, key, value, **options, enable_gqa=enable_gqa).contiguous()


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
