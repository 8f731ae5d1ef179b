"""Audio tokens from wav2vec2's hidden states: layers weighted as learnt, then causal convolutions in time.

    hidden states [L, W] per image --weights--> [W] --3 convolutions--> n tokens and a global one per latent frame

A latent frame reads the features of its last image and of the 8 before it (Wan-S2V, arXiv:2508.18621, section 3.2; the
kernels are those of its checkpoint). Each latent frame is computed from a window of 9 images (its last one and
those 8 before), by kernels of one shape, so that a stream in blocks has the bits of the whole.

Shapes: B batch, L layers, W width of a hidden state, T images, F latent frames, n audio tokens, D width.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from patchpar.models.speech.config import PER_LATENT, REACH

EPS = 1e-6


class TimeConvolution(nn.Module):
    """A convolution over 3 images, without padding: inputs begin with the images before. Nested as in checkpoints."""

    def __init__(self, inside: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv1d(inside, out, 3, stride=stride)

    def forward(self, x_BCT: Tensor) -> Tensor:
        """Return the convolution [B, C', T'] of features [B, C, T]."""
        return self.conv(x_BCT)


class TokenConvolutions(nn.Module):
    """From 9 images' features to one latent frame's tokens."""

    def __init__(self, features: int, dim: int, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens
        self.conv1_local = TimeConvolution(features, dim // 4 * tokens)
        self.conv1_global = TimeConvolution(features, dim // 4)
        self.conv2 = TimeConvolution(dim // 4, dim // 2, stride=2)
        self.conv3 = TimeConvolution(dim // 2, dim, stride=2)
        self.final_linear = nn.Linear(dim, dim)
        self.padding_tokens = nn.Parameter(torch.zeros(1, 1, 1, dim))

    def forward(self, x_BWT: Tensor) -> Tensor:
        """Return the tokens of one latent frame [B, n + 2, D] from features [B, W, 9]: n, a padding one, a global one.

        Each of the n tokens has its own first convolution.
        """
        batch = x_BWT.shape[0]
        local = self.conv1_local(x_BWT).unflatten(1, (self.tokens, -1)).flatten(0, 1)
        own = torch.unflatten(self._rest(local), 0, (batch, self.tokens))
        whole = self.final_linear(self._rest(self.conv1_global(x_BWT)))[:, None]
        return torch.cat([own, self.padding_tokens[0].expand(batch, -1, -1), whole], 1)

    def _rest(self, x_BCT: Tensor) -> Tensor:
        """The last two convolutions, [B, C, 7] to [B, D]."""
        return _activated(self.conv3(_activated(self.conv2(_activated(x_BCT)))))[..., 0]


class CausalAudioEncoder(nn.Module):
    """Hidden states of all layers to audio tokens, for blocks of a stream or all of it at once."""

    def __init__(self, layers: int, features: int, dim: int, tokens: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.full((1, layers, 1, 1), 0.01))
        self.encoder = TokenConvolutions(features, dim, tokens)

    def forward(self, features_BLWT: Tensor, before_BLWR: Tensor | None = None) -> Tensor:
        """Return tokens [B, F, n + 2, D] of features [B, L, W, T] with T = 4 F; the last token is the global one.

        `before_BLWR`: the features of the 8 images before, the state of a stream; None repeats the first image.
        """
        if before_BLWR is None:
            before_BLWR = features_BLWT[..., :1].expand(*features_BLWT.shape[:-1], REACH)
        seen = torch.cat([before_BLWR, features_BLWT], -1)[..., PER_LATENT - 1 :]
        windows = seen.unfold(-1, REACH + 1, PER_LATENT).unbind(-2)
        return torch.stack([self.encoder(self._weighted(window.contiguous())) for window in windows], 1)

    def _weighted(self, features_BLWT: Tensor) -> Tensor:
        weights = functional.silu(self.weights)
        return (features_BLWT * weights / weights.sum(1, keepdim=True)).sum(1)


def _activated(x_BCT: Tensor) -> Tensor:
    """SiLU of each image's normalised channels."""
    x_BTC = x_BCT.transpose(1, 2)
    return functional.silu(functional.layer_norm(x_BTC, x_BTC.shape[-1:], eps=EPS)).transpose(1, 2)
