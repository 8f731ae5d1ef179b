"""The forward pass of Live Avatar (arXiv:2512.04677) on weights of Wan-S2V (arXiv:2508.18621), under their own names.

Written from the papers, with nothing of the package. Sound is whole sequences with padding on the left, and the three
groups of earlier frames are spelt out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from tests.stream.reference_wan import EPS, KV, ReferenceWan, Seen

PADDING = 73
"""Copies of a block's first image before it, of which the convolutions make 19 latent frames."""


@dataclass(frozen=True)
class Sinks:
    """Keys before rotation and values of reference and earlier frames, and where the latter are."""

    kv: KV
    earlier: Tensor


class ReferenceSpeech(ReferenceWan):
    def __init__(self, weights: Mapping[str, Tensor], heads: int, after: Sequence[int]) -> None:
        super().__init__(weights, heads)
        self.after = after

    def convolved(self, name: str, x_CT: Tensor, stride: int = 1) -> Tensor:
        """A convolution of a whole sequence, its first value repeated before it."""
        weight, bias = (self.weights[f"casual_audio_encoder.encoder.{name}.conv.{each}"] for each in ("weight", "bias"))
        padded = torch.cat([x_CT[:, :1], x_CT[:, :1], x_CT], 1)
        return functional.conv1d(padded[None], weight, bias, stride=stride)[0]

    def active(self, x_CT: Tensor) -> Tensor:
        return functional.silu(functional.layer_norm(x_CT.T, x_CT.shape[:1], eps=EPS)).T

    def audio(self, features_LWT: Tensor, padding: int = PADDING) -> tuple[Tensor, Tensor]:
        """(local tokens [F, n + 1, D], global tokens [F, D]) of T = 4 F images."""
        weights = functional.silu(self.weights["casual_audio_encoder.weights"][0, :, 0, 0])
        mixed = torch.einsum("l,lwt->wt", weights / weights.sum(), features_LWT)
        mixed = torch.cat([mixed[:, :1].expand(-1, padding), mixed], 1)
        count = features_LWT.shape[-1] // 4
        dim = self.weights["casual_audio_encoder.encoder.final_linear.bias"].shape[0]

        def rest(x: Tensor) -> Tensor:
            return self.active(self.convolved("conv3", self.active(self.convolved("conv2", self.active(x), 2)), 2)).T

        local = self.convolved("conv1_local", mixed).unflatten(0, (-1, dim // 4))
        tokens = torch.stack([rest(each) for each in local], 1)[-count:]
        pad = self.weights["casual_audio_encoder.encoder.padding_tokens"][0].expand(count, -1, -1)
        whole = rest(self.convolved("conv1_global", mixed))[-count:]
        return torch.cat([tokens, pad], 1), self.linear("casual_audio_encoder.encoder.final_linear", whole)

    def injected(self, number: int, x: Tensor, local: Tensor, whole: Tensor) -> Tensor:
        """What the attention to audio adds to tokens [L, D]."""
        rows = []
        for frame, tokens, token in zip(x.chunk(len(local)), local, whole, strict=True):
            name = f"audio_injector.injector_adain_layers.{number}.linear"
            shift, scale = self.linear(name, functional.silu(token)).chunk(2)
            h = functional.layer_norm(frame, frame.shape[-1:], eps=1e-5) * (1 + scale) + shift
            rows.append(self.crossed(f"audio_injector.injector.{number}", h, tokens))
        return torch.cat(rows)

    def packed(self, latents_CFHW: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """(tokens [L, D], turns) of the last 19 latent frames: the last one, the two before, the sixteen before."""
        _, frames, rows, columns = latents_CFHW.shape
        tokens, turns = [], []
        groups = (("proj", 1, 1, 2, [-1]), ("proj_2x", 2, 3, 4, [-3]), ("proj_4x", 16, 19, 8, [-19, -14, -9, -4]))
        for name, count, oldest, patch, times in groups:
            weight, bias = self.weights[f"frame_packer.{name}.weight"], self.weights[f"frame_packer.{name}.bias"]
            part = latents_CFHW[:, frames - oldest : frames - oldest + count]
            y = functional.conv3d(part[None], weight, bias, stride=weight.shape[2:])[0]
            tokens.append(y.flatten(1).T)
            positions = [
                [math.floor(at * (size // 2 - 1) / max(1, size // patch - 1)) for at in range(size // patch)]
                for size in (rows, columns)
            ]
            turns.append(self.turn(width, times, *positions))
        return torch.cat(tokens), torch.cat(turns)

    @torch.no_grad()
    def sinks(self, reference_CFHW: Tensor, earlier_CFHW: Tensor, text_TD: Tensor) -> Sinks:
        """Reference, at time 30, and earlier frames attend to one another at noise level 0."""
        kinds = self.weights["trainable_cond_mask.weight"]
        patches = self.patches(reference_CFHW)
        width = patches.shape[0] // self.heads
        packed, earlier = self.packed(earlier_CFHW, width)
        x = torch.cat([patches.flatten(1).T + kinds[1], packed + kinds[2]])
        turn = torch.cat([self.turn(width, [30], *map(range, patches.shape[2:])), earlier])
        text, (_, e6) = self.text(text_TD), self.timestep(0.0)
        kept: KV = []
        for layer in range(self.layers):
            x, kv = self.layer(layer, x, e6, text, turn, ())
            kept.append(kv)
        return Sinks(kept, earlier)

    @torch.no_grad()
    def block(
        self,
        x_CFHW: Tensor,
        t: float,
        text_TD: Tensor,
        frames: Sequence[int],
        seen: Sequence[Seen],
        sinks: Sinks,
        at: int,
        audio: tuple[Tensor, Tensor],
        pose_CFHW: Tensor | None = None,
    ) -> tuple[Tensor, KV]:
        """The velocity of a block that sees the reference at time `at`, and its keys and values."""
        pose = torch.zeros_like(x_CFHW) if pose_CFHW is None else pose_CFHW
        weight, bias = self.weights["cond_encoder.weight"], self.weights["cond_encoder.bias"]
        patches = self.patches(x_CFHW) + functional.conv3d(pose[None], weight, bias, stride=weight.shape[2:])[0]
        grid = patches.shape[1:]
        width, space = patches.shape[0] // self.heads, [*map(range, grid[1:])]
        x = patches.flatten(1).T + self.weights["trainable_cond_mask.weight"][0]
        text, (e, e6) = self.text(text_TD), self.timestep(t)
        sink_turn = torch.cat([self.turn(width, [at], *space), sinks.earlier])
        turns = [self.turn(width, times, *space) for times in (frames, *(each.frames for each in seen))]
        own: KV = []
        for layer in range(self.layers):
            others = [(each.kv[layer], turn) for each, turn in zip(seen, turns[1:], strict=True)]
            x, kv = self.layer(layer, x, e6, text, turns[0], [*others, (sinks.kv[layer], sink_turn)])
            own.append(kv)
            if layer in self.after:
                x = x + self.injected(self.after.index(layer), x, *audio)
        return self.head(x, e, grid), own
