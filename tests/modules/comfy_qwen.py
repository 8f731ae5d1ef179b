"""The structure of ComfyUI's own Qwen-Image: joint attention of text and image, positions from the image's centre."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.modules.comfy_attention import EmbedND, Executor, apply_rope, optimized_attention, timestep_embedding

HEADS, HEAD, TEXT = 2, 16, 12
DIM = HEADS * HEAD
PATCH = 2


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.ModuleList(
            [
                nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(approximate="tanh")),
                nn.Dropout(0.0),
                nn.Linear(4 * DIM, DIM),
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        for part in self.net:
            x = part(x)
        return x


class Attention(nn.Module):
    """Of both kinds of tokens, each with projections and norms of its own."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"):
            setattr(self, name, nn.Linear(DIM, DIM))
        for name in ("norm_q", "norm_k", "norm_added_q", "norm_added_k"):
            setattr(self, name, nn.RMSNorm(HEAD, eps=1e-6))
        self.to_out = nn.ModuleList([nn.Linear(DIM, DIM), nn.Dropout(0.0)])

    def forward(
        self, hidden_states: Tensor, encoder_hidden_states: Tensor, mask: Any, pe: Tensor, transformer_options: Any
    ) -> tuple[Tensor, Tensor]:
        batch, count, texts = hidden_states.shape[0], hidden_states.shape[1], encoder_hidden_states.shape[1]

        def heads(x: Tensor, length: int) -> Tensor:
            return x.view(batch, length, HEADS, -1).transpose(1, 2).contiguous()

        q, k, v = (heads(part(hidden_states), count) for part in (self.to_q, self.to_k, self.to_v))
        added = (self.add_q_proj, self.add_k_proj, self.add_v_proj)
        txt_q, txt_k, txt_v = (heads(part(encoder_hidden_states), texts) for part in added)
        joint_q = torch.cat([self.norm_added_q(txt_q), self.norm_q(q)], dim=2)
        joint_k = torch.cat([self.norm_added_k(txt_k), self.norm_k(k)], dim=2)
        joint = optimized_attention(
            apply_rope(joint_q, pe),
            apply_rope(joint_k, pe),
            torch.cat([txt_v, v], dim=2),
            HEADS,
            mask,
            skip_reshape=True,
            transformer_options=transformer_options,
        )
        img = self.to_out[1](self.to_out[0](joint[:, texts:, :]))
        return img, self.to_add_out(joint[:, :texts, :])


class QwenImageTransformerBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in ("img", "txt"):
            setattr(self, f"{name}_mod", nn.Sequential(nn.SiLU(), nn.Linear(DIM, 6 * DIM)))
            setattr(self, f"{name}_norm1", nn.LayerNorm(DIM, elementwise_affine=False, eps=1e-6))
            setattr(self, f"{name}_norm2", nn.LayerNorm(DIM, elementwise_affine=False, eps=1e-6))
            setattr(self, f"{name}_mlp", FeedForward())
        self.attn = Attention()

    def _modulate(self, x: Tensor, mod: Tensor) -> tuple[Tensor, Tensor]:
        shift, scale, gate = mod.chunk(3, dim=-1)
        return torch.addcmul(shift.unsqueeze(1), x, 1 + scale.unsqueeze(1)), gate.unsqueeze(1)

    def forward(
        self, hidden_states: Tensor, encoder_hidden_states: Tensor, mask: Any, temb: Tensor, pe: Tensor, options: Any
    ) -> tuple[Tensor, Tensor]:
        img_mod1, img_mod2 = self.img_mod(temb).chunk(2, dim=-1)
        txt_mod1, txt_mod2 = self.txt_mod(temb).chunk(2, dim=-1)
        img, img_gate1 = self._modulate(self.img_norm1(hidden_states), img_mod1)
        txt, txt_gate1 = self._modulate(self.txt_norm1(encoder_hidden_states), txt_mod1)
        img_attn, txt_attn = self.attn(img, txt, mask, pe, options)
        hidden_states = hidden_states + img_gate1 * img_attn
        encoder_hidden_states = encoder_hidden_states + txt_gate1 * txt_attn
        img, img_gate2 = self._modulate(self.img_norm2(hidden_states), img_mod2)
        hidden_states = torch.addcmul(hidden_states, img_gate2, self.img_mlp(img))
        txt, txt_gate2 = self._modulate(self.txt_norm2(encoder_hidden_states), txt_mod2)
        return torch.addcmul(encoder_hidden_states, txt_gate2, self.txt_mlp(txt)), hidden_states


class LastLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(DIM, 2 * DIM), nn.LayerNorm(DIM, elementwise_affine=False, eps=1e-6)

    def forward(self, x: Tensor, conditioning: Tensor) -> Tensor:
        scale, shift = self.linear(F.silu(conditioning)).chunk(2, dim=1)
        return torch.addcmul(shift[:, None, :], self.norm(x), (1 + scale)[:, None, :])


class QwenImageTransformer2DModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch_size, self.in_channels = PATCH, 16
        self.pe_embedder = EmbedND((4, 6, 6))
        self.time_in = nn.Sequential(nn.Linear(32, DIM), nn.SiLU(), nn.Linear(DIM, DIM))
        self.txt_norm, self.img_in, self.txt_in = nn.RMSNorm(TEXT), nn.Linear(16, DIM), nn.Linear(TEXT, DIM)
        self.transformer_blocks = nn.ModuleList(QwenImageTransformerBlock() for _ in range(2))
        self.norm_out, self.proj_out = LastLayer(), nn.Linear(DIM, 16)

    def process_img(self, x: Tensor, index: int = 0) -> tuple[Tensor, Tensor, tuple[int, int, int]]:
        """Tokens of latents [B, C, T, H, W], their positions, and the padded size."""
        batch, channels = x.shape[:2]
        x = F.pad(x, (0, x.shape[-1] % PATCH, 0, x.shape[-2] % PATCH, 0, 0), mode="circular")
        times, rows, columns = x.shape[2], x.shape[-2] // PATCH, x.shape[-1] // PATCH
        tokens = x.view(batch, channels, times, rows, PATCH, columns, PATCH).permute(0, 2, 3, 5, 1, 4, 6)
        ids = torch.zeros(times, rows, columns, 3)
        ids[..., 0] = ids[..., 0] + torch.linspace(index, index + times - 1, times)[:, None, None]
        ids[..., 1] = ids[..., 1] + torch.linspace(0, rows - 1, rows)[None, :, None] - rows // 2
        ids[..., 2] = ids[..., 2] + torch.linspace(0, columns - 1, columns)[None, None, :] - columns // 2
        positions = ids.reshape(1, -1, 3).repeat(batch, 1, 1)
        return tokens.reshape(batch, times * rows * columns, -1), positions, (times, rows, columns)

    def forward(
        self,
        x: Tensor,
        timestep: Tensor,
        context: Tensor,
        attention_mask: Tensor | None = None,
        ref_latents: Any = None,
        transformer_options: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        """[B, 4, T, H, W] to the same."""
        options = {} if transformer_options is None else transformer_options
        return Executor.of(self, options).execute(x, timestep, context, attention_mask, ref_latents, options, **kwargs)

    def _forward(
        self,
        x: Tensor,
        timestep: Tensor,
        context: Tensor,
        attention_mask: Tensor | None,
        ref_latents: Any,
        transformer_options: dict[str, Any],
        control: Any = None,
    ) -> Tensor:
        tokens, img_ids, (times, rows, columns) = self.process_img(x)
        own = tokens.shape[1]
        for index, each in enumerate(ref_latents or (), 1):
            more, more_ids, _ = self.process_img(each, index)
            tokens, img_ids = torch.cat([tokens, more], dim=1), torch.cat([img_ids, more_ids], dim=1)
        start = round(max(columns // 2, rows // 2))
        txt_ids = torch.arange(start, start + context.shape[1]).reshape(1, -1, 1).repeat(x.shape[0], 1, 3)
        pe = self.pe_embedder(torch.cat((txt_ids, img_ids), dim=1)).to(x.dtype).contiguous()
        hidden, text = self.img_in(tokens), self.txt_in(self.txt_norm(context))
        temb = self.time_in(timestep_embedding(1000 * timestep, 32))
        for number, block in enumerate(self.transformer_blocks):
            transformer_options["block_index"] = number  # the caller's dict
            text, hidden = block(hidden, text, attention_mask, temb, pe, transformer_options)
            if control is not None:
                added = control["input"][number]
                hidden[:, : added.shape[1]] += added
        hidden = self.proj_out(self.norm_out(hidden, temb))
        hidden = hidden[:, :own].view(x.shape[0], times, rows, columns, 4, PATCH, PATCH).permute(0, 4, 1, 2, 5, 3, 6)
        return hidden.reshape(x.shape[0], 4, times, rows * PATCH, columns * PATCH)[..., : x.shape[-2], : x.shape[-1]]
