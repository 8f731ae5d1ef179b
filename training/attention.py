"""Attention for training on a CPU: plain matrix products where the fused kernel is slower.

torch's fused attention for CPUs takes five times as long as two matrix products and a softmax where there are few keys
(the tokens of a caption) or few queries, backwards above all. Long self-attention stays with the fused kernel.
"""

from __future__ import annotations

from diffusers.models.attention_processor import Attention
from torch import Tensor, float32, softmax
from torch.nn import functional

from training.model import Networks

FEW_SCORES = 256 * 256
"""Up to this many scores per head the plain way is faster."""
SHORT_ROW = 64


class PlainAttention:
    """A diffusers attention processor for the blocks of this UNet: tokens (B, N, C), no mask, no group norm inside."""

    def __call__(
        self,
        attn: Attention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Attend from hidden_states (B, N, C) to encoder_hidden_states (B, M, D), or to themselves."""
        if attention_mask is not None:
            raise ValueError("this UNet is trained without attention masks")
        context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        heads = (attn.heads, -1)
        query, key, value = (
            tokens.unflatten(-1, heads).transpose(1, 2)
            for tokens in (attn.to_q(hidden_states), attn.to_k(context), attn.to_v(context))
        )
        return attn.to_out[0](attend(query, key, value).transpose(1, 2).flatten(2))


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention over heads (B, heads, N, width) in whichever way is faster on a CPU."""
    if query.shape[-2] * key.shape[-2] > FEW_SCORES:
        return functional.scaled_dot_product_attention(query, key, value)
    scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-1, -2)
    precise = float32 if key.shape[-2] <= SHORT_ROW else None  # softmax over short rows is faster in fp32
    return softmax(scores, -1, dtype=precise).to(value.dtype) @ value


def use_plain_attention(networks: Networks) -> None:
    """Train these networks with plain attention. Weights and saved files do not change."""
    networks.unet.set_attn_processor(PlainAttention())
    for encoder in (networks.text_encoder, networks.text_encoder_2):
        encoder.set_attn_implementation("eager")
