"""The structure of ComfyUI's own Flux: a plain tensor in and out, options in a dict that the network writes into."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.modules.comfy_attention import EmbedND, Executor, apply_rope, optimized_attention, timestep_embedding

HEADS, HEAD = 2, 16
HIDDEN = HEADS * HEAD


class QKNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query_norm, self.key_norm = nn.RMSNorm(HEAD), nn.RMSNorm(HEAD)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return self.query_norm(q).to(v), self.key_norm(k).to(v)


class SelfAttention(nn.Module):
    """Holds projections; the block calls them one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.norm, self.proj = nn.Linear(HIDDEN, 3 * HIDDEN), QKNorm(), nn.Linear(HIDDEN, HIDDEN)


class Modulation(nn.Module):
    def __init__(self, double: bool) -> None:
        super().__init__()
        self.count = 6 if double else 3
        self.lin = nn.Linear(HIDDEN, self.count * HIDDEN)

    def forward(self, vec: Tensor) -> tuple[Tensor, ...]:
        return self.lin(F.silu(vec))[:, None, :].chunk(self.count, dim=-1)


def heads_of(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = qkv.view(qkv.shape[0], qkv.shape[1], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
    return q, k, v


def attention(q: Tensor, k: Tensor, v: Tensor, pe: Tensor, transformer_options: Any) -> Tensor:
    q, k = apply_rope(q, pe), apply_rope(k, pe)
    return optimized_attention(q, k, v, HEADS, skip_reshape=True, transformer_options=transformer_options)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(HIDDEN, 2 * HIDDEN), nn.GELU(approximate="tanh"), nn.Linear(2 * HIDDEN, HIDDEN))


class DoubleStreamBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.img_mod, self.txt_mod = Modulation(True), Modulation(True)
        for name in ("img", "txt"):
            setattr(self, f"{name}_norm1", nn.LayerNorm(HIDDEN, elementwise_affine=False, eps=1e-6))
            setattr(self, f"{name}_norm2", nn.LayerNorm(HIDDEN, elementwise_affine=False, eps=1e-6))
            setattr(self, f"{name}_attn", SelfAttention())
            setattr(self, f"{name}_mlp", mlp())

    def forward(
        self, img: Tensor, txt: Tensor, vec: Tensor, pe: Tensor, transformer_options: Any = None
    ) -> tuple[Tensor, Tensor]:
        mods = self.img_mod(vec), self.txt_mod(vec)
        found = []
        for name, x, mod in (("txt", txt, mods[1]), ("img", img, mods[0])):
            part = getattr(self, f"{name}_attn")
            q, k, v = heads_of(part.qkv((1 + mod[1]) * getattr(self, f"{name}_norm1")(x) + mod[0]))
            found.append((*part.norm(q, k, v), v))
        q, k, v = (torch.cat(each, dim=2) for each in zip(*found, strict=True))
        attended = attention(q, k, v, pe, transformer_options)
        txt_attn, img_attn = attended[:, : txt.shape[1]], attended[:, txt.shape[1] :]
        img += mods[0][2] * self.img_attn.proj(img_attn)
        img += mods[0][5] * self.img_mlp((1 + mods[0][4]) * self.img_norm2(img) + mods[0][3])
        txt += mods[1][2] * self.txt_attn.proj(txt_attn)
        txt += mods[1][5] * self.txt_mlp((1 + mods[1][4]) * self.txt_norm2(txt) + mods[1][3])
        return img, txt


class SingleStreamBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear1, self.linear2 = nn.Linear(HIDDEN, 5 * HIDDEN), nn.Linear(3 * HIDDEN, HIDDEN)
        self.norm, self.modulation = QKNorm(), Modulation(False)
        self.pre_norm = nn.LayerNorm(HIDDEN, elementwise_affine=False, eps=1e-6)

    def forward(self, x: Tensor, vec: Tensor, pe: Tensor, transformer_options: Any = None) -> Tensor:
        shift, scale, gate = self.modulation(vec)
        qkv, wide = self.linear1((1 + scale) * self.pre_norm(x) + shift).split([3 * HIDDEN, 2 * HIDDEN], dim=-1)
        q, k, v = heads_of(qkv)
        q, k = self.norm(q, k, v)
        attended = attention(q, k, v, pe, transformer_options)
        x += gate * self.linear2(torch.cat([attended, F.gelu(wide, approximate="tanh")], dim=2))
        return x


class Flux(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch_size, self.in_channels = 2, 4
        self.img_in, self.txt_in = nn.Linear(16, HIDDEN), nn.Linear(12, HIDDEN)
        self.time_in, self.guidance_in, self.vector_in = (nn.Linear(size, HIDDEN) for size in (32, 32, 8))
        self.pe_embedder = EmbedND((4, 6, 6))
        self.double_blocks = nn.ModuleList(DoubleStreamBlock() for _ in range(2))
        self.single_blocks = nn.ModuleList(SingleStreamBlock() for _ in range(2))
        self.final_norm, self.final = nn.LayerNorm(HIDDEN, elementwise_affine=False), nn.Linear(HIDDEN, 16)

    def forward(
        self,
        x: Tensor,
        timestep: Tensor,
        context: Tensor,
        y: Tensor | None = None,
        guidance: Tensor | None = None,
        control: Any = None,
        transformer_options: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        """[B, 4, H, W] to the same."""
        options = {} if transformer_options is None else transformer_options
        return Executor.of(self, options).execute(x, timestep, context, y, guidance, control, options, **kwargs)

    def _forward(
        self,
        x: Tensor,
        timestep: Tensor,
        context: Tensor,
        y: Tensor,
        guidance: Tensor,
        control: Any,
        transformer_options: dict[str, Any],
    ) -> Tensor:
        batch, channels, height, width = x.shape
        x = F.pad(x, (0, width % 2, 0, height % 2), mode="circular")
        rows, columns = x.shape[-2] // 2, x.shape[-1] // 2
        img = x.view(batch, channels, rows, 2, columns, 2).permute(0, 2, 4, 1, 3, 5).reshape(batch, rows * columns, -1)
        ids = torch.zeros(rows, columns, 3)
        ids[..., 1] = ids[..., 1] + torch.linspace(0, rows - 1, steps=rows)[:, None]
        ids[..., 2] = ids[..., 2] + torch.linspace(0, columns - 1, steps=columns)[None]
        ids = torch.cat([torch.zeros(batch, context.shape[1], 3), ids.reshape(1, -1, 3).repeat(batch, 1, 1)], dim=1)
        out = self.forward_orig(
            img, context, timestep, y, guidance, self.pe_embedder(ids), control, transformer_options
        )
        out = out.view(batch, rows, columns, channels, 2, 2).permute(0, 3, 1, 4, 2, 5)
        return out.reshape(batch, channels, 2 * rows, 2 * columns)[:, :, :height, :width]

    def forward_orig(
        self,
        img: Tensor,
        txt: Tensor,
        timesteps: Tensor,
        y: Tensor,
        guidance: Tensor,
        pe: Tensor,
        control: Any,
        options: dict[str, Any],
    ) -> Tensor:
        img, txt = self.img_in(img), self.txt_in(txt)
        vec = self.time_in(timestep_embedding(timesteps, 32)) + self.guidance_in(timestep_embedding(guidance, 32))
        vec = vec + self.vector_in(y)
        options["total_blocks"], options["block_type"] = len(self.double_blocks), "double"
        for number, block in enumerate(self.double_blocks):
            options["block_index"] = number  # the caller's dict
            img, txt = block(img=img, txt=txt, vec=vec, pe=pe, transformer_options=options)
            if control is not None:
                added = control["input"][number]
                img[:, : added.shape[1]] += added
        img = torch.cat((txt, img), 1)
        options["block_type"] = "single"
        for number, block in enumerate(self.single_blocks):
            options["block_index"] = number
            img = block(img, vec=vec, pe=pe, transformer_options=options)
        return self.final(self.final_norm(img[:, txt.shape[1] :, ...]))
