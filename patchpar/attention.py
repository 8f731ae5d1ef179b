"""Self-attention over the tokens of the whole picture, as a diffusers hook.

    this step     own queries against our own keys while the others' come, merged by log-sum-exp
    last step     own queries against our own keys of this step and what is held of the others', see `stale_attention`

The processor of the layer runs as it is; only its call of scaled_dot_product_attention is answered differently.
"""

from collections.abc import Callable, Sequence
from typing import Any

from diffusers.hooks import ModelHook
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from patchpar.context import KeysValues
from patchpar.errors import UnsupportedModel
from patchpar.sequence.call import Shared
from patchpar.sequence.modes import attend_together
from patchpar.share import Share
from patchpar.stale_attention import Asked, attend_with_past


class AttentionHook(ModelHook):  # type: ignore[misc]  # diffusers is not typed
    """Self-attention over the tokens of the whole picture: the processor runs as it is, its attention call does not."""

    def __init__(self, share: Share, where: str) -> None:
        super().__init__()
        self.share, self.where = share, where

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Replaces Attention.forward."""
        if not self.share.active:
            return self.fn_ref.original_forward(*args, **kwargs)
        with _AttentionOverShares(self.share, self.where) as mode:
            result = self.fn_ref.original_forward(*args, **kwargs)
        if mode.calls == 0:
            processor = type(getattr(module, "processor", module)).__name__
            raise UnsupportedModel(
                f"{self.where}: the attention processor {processor} does not call scaled_dot_product_attention, so its "
                "keys cannot be shared. Use the default processor: pipe.unet.set_default_attn_processor()"
            )
        return result


class _AttentionOverShares(TorchFunctionMode):
    def __init__(self, share: Share, where: str) -> None:
        super().__init__()
        self.share, self.where, self.calls = share, where, 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            self.calls += 1
            return attend_over_shares(self.share, self.where, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def attend_over_shares(  # noqa: PLR0913 - the signature is torch's
    share: Share,
    where: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Own queries against everybody's keys, of this step or of the last one. Raises UnsupportedModel."""
    if attn_mask is not None or is_causal or dropout_p or enable_gqa:
        raise UnsupportedModel(
            f"{where}: spatial self-attention with a mask, causality or dropout cannot be split: use cfg=2 or data=N"
        )
    here = KeysValues(key.transpose(1, 2), value.transpose(1, 2))
    grid, slot = share.grid(here.k_BlND.shape[1]), share.slot(where, share.treatment.context)
    if slot is not None:
        return attend_with_past(share, where, grid, Asked(query, here, scale), slot)
    sizes = tuple(grid.num_tokens(place) for place in range(share.axis.size))
    shared = Shared(q_BNlD=query, k_BMlD=key, v_BMlD=value, sizes=sizes, place=share.place, scale=scale)
    return attend_together(share.treatment.keys, share.door, share.axis, where, shared)
