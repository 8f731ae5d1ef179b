"""Cross-attention from a latent frame's tokens to its audio tokens, behind an adaptive normalisation (AdaIN).

    tokens --layer norm--> * (1 + scale) + shift, both from the frame's global audio token --attention--> added

Wan-S2V, arXiv:2508.18621, section 3.2; kernels as in its checkpoint.

Shapes: B batch, L tokens, F latent frames, n audio tokens per latent frame, D width.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

NORM_EPS, RMS_EPS = 1e-5, 1e-6


class AdaptiveNorm(nn.Module):
    """A layer norm whose scale and shift are computed from another token."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, 2 * dim)

    def forward(self, x_RLD: Tensor, token_RD: Tensor) -> Tensor:
        """Return the normalised rows [R, L, D]; `token_RD`: one token for each row."""
        shift, scale = self.linear(functional.silu(token_RD))[:, None].chunk(2, -1)
        return functional.layer_norm(x_RLD, x_RLD.shape[-1:], eps=NORM_EPS) * (1 + scale) + shift


class CrossAttention(nn.Module):
    """Wan's cross-attention: queries and keys have an RMS norm over all heads."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.norm_q, self.norm_k = (nn.RMSNorm(dim, eps=RMS_EPS) for _ in range(2))

    def forward(self, x_RLD: Tensor, tokens_RnD: Tensor) -> Tensor:
        """Return the attention [R, L, D] of rows [R, L, D] to tokens [R, n, D]."""
        q, k, v = (
            x.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for x in (self.norm_q(self.q(x_RLD)), self.norm_k(self.k(tokens_RnD)), self.v(tokens_RnD))
        )
        return self.o(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class AudioInjector(nn.Module):
    """Attention layers behind `count` of a transformer's blocks."""

    def __init__(self, count: int, dim: int, heads: int) -> None:
        super().__init__()
        self.injector = nn.ModuleList([CrossAttention(dim, heads) for _ in range(count)])
        self.injector_adain_layers = nn.ModuleList([AdaptiveNorm(dim) for _ in range(count)])

    def forward(self, number: int, hidden_BLD: Tensor, audio_BFnD: Tensor) -> Tensor:
        """Return what layer `number` adds to the tokens [B, L, D] of F frames with L / F tokens each, [B, L, D].

        The last audio token of a frame is its global one.
        """
        batch, frames = audio_BFnD.shape[:2]
        rows = torch.unflatten(hidden_BLD, 1, (frames, -1)).flatten(0, 1)
        audio = audio_BFnD.flatten(0, 1)
        normed = self.injector_adain_layers[number](rows, audio[:, -1])
        return self.injector[number](normed, audio[:, :-1]).unflatten(0, (batch, frames)).flatten(1, 2)
