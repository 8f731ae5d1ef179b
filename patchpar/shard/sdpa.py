"""torch's scaled_dot_product_attention: the arguments of a call, and a mode that replaces it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """The arguments of scaled_dot_product_attention in torch's order, and what computes it.

    `query` [B, N, q, D], `key` [B, M, k, D], `value` [B, M, k, E], or each without a head dim; `attn_mask` broadcasts
    to [B, N, q, k]. `kernel`: the user's own, for calls with heads; None is torch's function.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    kernel: Callable[..., Tensor] | None = None

    def run(self) -> Tensor:
        """Return the output [B, N, q, E], or [B, q, E] of a call without heads."""
        attend: Any = F.scaled_dot_product_attention if self.kernel is None or self.query.ndim != 4 else self.kernel
        found: Tensor = attend(
            self.query,
            self.key,
            self.value,
            attn_mask=self.attn_mask,
            dropout_p=self.dropout_p,
            is_causal=self.is_causal,
            scale=self.scale,
            enable_gqa=self.enable_gqa,
        )
        return found

    def with_heads(self) -> "AttentionCall":
        """Return the call of tensors [B, L, D] with a dim for one head. It remains a call of torch's function."""
        mask = self.attn_mask
        query, key, value = (x.unsqueeze(1) for x in (self.query, self.key, self.value))
        mask = mask.unsqueeze(1) if mask is not None and mask.ndim == 3 else mask
        return replace(self, query=query, key=key, value=value, attn_mask=mask, kernel=None)


class SdpaMode(TorchFunctionMode):
    """Mode in which `attend` replaces calls of attention in this thread.

    `others(func, args, kwargs)` replaces every other torch function; without it they run unchanged.
    """

    def __init__(
        self,
        attend: Callable[[AttentionCall], Tensor],
        others: Callable[[Callable[..., Any], Sequence[Any], dict[str, Any]], Any] | None = None,
    ) -> None:
        super().__init__()
        self._attend, self._others = attend, others

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            return self._attend(AttentionCall(*args, **(kwargs or {})))
        if self._others is not None:
            return self._others(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def as_torch_lays(out_BNlD: Tensor) -> Tensor:
    """Return [B, N, l, D] in the memory layout of torch's attention, which models may rely on.

    The heads of a token are contiguous, so that `view` can make [B, l, N * D] of its transpose.
    """
    return out_BNlD.transpose(1, 2).contiguous().transpose(1, 2) if out_BNlD.ndim == 4 else out_BNlD
