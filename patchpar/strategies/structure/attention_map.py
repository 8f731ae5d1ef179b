"""Attention of image positions to content tokens, without materialising the attention matrix.

The probability mass that a position gives to all content tokens is attention whose values are one column, 1 for
content and 0 for the rest. So each recorded attention call is followed by a second one with that column, with any
kernel, and no matrix of positions x tokens is held. Resized to the patch, averaged over layers and scaled to 0..1 it is
the mask M of ASGDiffusion (arXiv:2412.06163, equation 4).

    UNets            cross-attention of the up blocks, sharper on objects than that of the down blocks
    transformers     joint attention, queries of the image, keys of the text; the middle half of the blocks
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchpar.shard.hooks import HookSet
from patchpar.shard.sdpa import AttentionCall, SdpaMode
from patchpar.strategies.structure.sizing import stride_of

# Processors of joint attention, by whether the text's tokens come before the image's.
TEXT_FIRST = {"JointAttnProcessor2_0": False, "FluxAttnProcessor": True, "FluxAttnProcessor2_0": True}


class AttentionMap:
    """Attention to text in one denoiser, recorded in its `layers`. Without any there is no mask."""

    def __init__(self, denoiser: nn.Module) -> None:
        self.layers = _cross_attentions(denoiser) or _joint_attentions(denoiser)

    @contextmanager
    def recorded_by(self, recording: "AttentionRecorder") -> Iterator[None]:
        """Record calls of the denoiser while open."""
        with HookSet() as hooks, recording:
            for layer, text_first in self.layers:
                hooks.before(layer, partial(recording.enter, text_first))
                hooks.after(layer, recording.leave)
            yield


class AttentionRecorder(SdpaMode):
    """Records attention in the chosen layers. `weights_BT`: of the text's tokens, for the last B images of a batch."""

    def __init__(self, weights_BT: Tensor) -> None:
        super().__init__(self._look)
        self._weights_BT = weights_BT
        self._inside = False
        self._text_first: bool | None = None
        self._seen: list[Tensor] = []

    def enter(self, text_first: bool | None, *_: Any) -> None:
        """Forward pre-hook: a layer begins. `text_first` is None where the text has an attention call of its own."""
        self._inside, self._text_first = True, text_first

    def leave(self, *_: Any) -> None:
        """Forward hook: the layer has ended."""
        self._inside = False

    def _look(self, call: AttentionCall) -> Tensor:
        if self._inside:
            self._note(call.query, call.key, call.scale)
        return call.run()

    def _note(self, q_BNID: Tensor, k_BNTD: Tensor, scale: float | None) -> None:
        tokens = self._weights_BT.shape[1]
        if self._text_first is not None:
            image = slice(tokens, None) if self._text_first else slice(None, -tokens)
            text = slice(None, tokens) if self._text_first else slice(-tokens, None)
            q_BNID, k_BNTD = q_BNID[:, :, image], k_BNTD[:, :, text]
        if k_BNTD.shape[2] != tokens:
            return  # keys of something else, such as an image prompt
        batch = len(self._weights_BT)
        column = self._weights_BT.to(k_BNTD)[:, None, :, None].expand(-1, k_BNTD.shape[1], -1, -1).contiguous()
        found = F.scaled_dot_product_attention(q_BNID[-batch:], k_BNTD[-batch:], column, scale=scale)
        self._seen.append(found[..., 0].mean(1).float())

    def mask(self, size: tuple[int, int]) -> Tensor | None:
        """Return the mask of `size` (h, w), [B, 1, h, w], scaled to 0..1 per image; None if nothing was recorded."""
        maps = [_as_image(found, size) for found in self._seen]
        resized = [F.interpolate(found, size, mode="bilinear") for found in maps if found is not None]
        if not resized:
            return None
        mean = torch.stack(resized).mean(0)
        low, high = mean.amin((2, 3), keepdim=True), mean.amax((2, 3), keepdim=True)
        return (mean - low) / (high - low).clamp_min(1e-6)


def _as_image(found_BI: Tensor, size: tuple[int, int]) -> Tensor | None:
    """Return tokens as a map [B, 1, h / s, w / s] for the power of two s that fits their number; None if none does."""
    stride = stride_of(size, found_BI.shape[1])
    return None if stride is None else found_BI.reshape(-1, 1, *(-(-side // stride) for side in size))


def _cross_attentions(denoiser: nn.Module) -> list[tuple[nn.Module, bool | None]]:
    return [
        (module, None)
        for path, module in denoiser.named_modules()
        if path.startswith("up_blocks") and path.endswith(".attn2")
    ]


def _joint_attentions(denoiser: nn.Module) -> list[tuple[nn.Module, bool | None]]:
    found: list[tuple[nn.Module, bool | None]] = []
    for path, module in denoiser.named_modules():
        order = TEXT_FIRST.get(type(getattr(module, "processor", None)).__name__)
        if order is not None and path.endswith(".attn") and getattr(module, "add_k_proj", None) is not None:
            found.append((module, order))
    quarter = len(found) // 4
    return found[quarter : len(found) - quarter]
