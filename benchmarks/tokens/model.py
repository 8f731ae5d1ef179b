"""The transformers whose tokens are split in `benchmarks.tokens`: random weights, alive, of 50 million or more.

All have twelve heads of 64. The first two have five blocks of self-attention, attention to a text, and a feed-forward
layer, and make 4,096 tokens:

    pixart      as PixArt: an image of 128 x 128 latents, patches of 2 x 2
    wan         as Wan: four frames of 64 x 64 latents, patches of 2 x 2; diffusers can split this one, too
    flux        as FLUX: 512 tokens of text beside 1,024 of an image, in two joint blocks and four single ones

A toy of the same kind is narrow and makes 256 tokens.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from patchpar.shard.transformer.probe.discover import discover_tokens
from patchpar.shard.transformer.token_plan import TokenPlan

Call = dict[str, Any]
TEXT, TEXT_WIDTH, TOY_TEXT_WIDTH = 120, 2048, 64
DRIFT = 0.02  # of the latent's size, from one step to the next
LATENTS, TOY_LATENTS = 128, 32  # a side of the image
JOINT_LATENTS, JOINT_TEXT = 64, 512  # of the model with joint attention
PROBE = 8  # latents a side of the call that is watched: where the tokens are does not depend on how many there are


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model, what it is called with, where its tokens are, and how many."""

    name: str
    model: nn.Module
    call: Call
    plan: TokenPlan
    tokens: int

    @property
    def parameters(self) -> int:
        """How many weights it has."""
        return sum(each.numel() for each in self.model.parameters())

    def twin(self) -> nn.Module:
        """The same model, to be hooked by itself; it shares the weights."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        return copy.deepcopy(self.model, {id(x): x for x in tensors})

    def of_size(self, latents: int) -> "Subject":
        """The same model, called with an image of so many latents a side."""
        call = _KINDS[self.name][1](self.model, latents)
        return replace(self, call=call, tokens=(latents // 2) ** 2)

    def with_text_on_every_rank(self) -> "Subject":
        """The same model, whose text is not split."""
        return replace(
            self, plan=replace(self.plan, blocks=tuple(replace(each, text=None) for each in self.plan.blocks))
        )

    def at(self, step: int) -> Call:
        """The call of a later step: the latent has moved a little, the same way on every rank."""
        latent = self.call["hidden_states"]
        change = torch.randn(latent.shape, generator=torch.Generator().manual_seed(step))
        return self.call | {"hidden_states": latent + DRIFT * step * change}


def subject(name: str, *, toy: bool) -> Subject:
    """The model of that name, the same on every rank."""
    from tests.tiny.weights import enliven

    torch.manual_seed(0)
    build, call, latents = _KINDS[name]
    model = enliven(build(toy).eval().requires_grad_(False))
    few = call(model, PROBE)
    with torch.no_grad():
        plan = discover_tokens(model, model.forward, (), few)
    whole = Subject(name=name, model=model, call=few, plan=plan, tokens=(PROBE // 2) ** 2)
    return whole.of_size(TOY_LATENTS if toy else latents)


def _pixart(toy: bool) -> nn.Module:
    from diffusers import PixArtTransformer2DModel

    heads, width = (12, 8) if toy else (12, 64)
    return PixArtTransformer2DModel(
        num_attention_heads=heads,
        attention_head_dim=width,
        cross_attention_dim=heads * width,
        num_layers=4 if toy else 5,
        sample_size=LATENTS,
        caption_channels=TOY_TEXT_WIDTH if toy else TEXT_WIDTH,
        use_additional_conditions=False,
    )


def _wan(toy: bool) -> nn.Module:
    from diffusers import WanTransformer3DModel

    heads, width = (12, 16) if toy else (12, 64)
    return WanTransformer3DModel(
        num_attention_heads=heads,
        attention_head_dim=width,
        ffn_dim=4 * heads * width,
        num_layers=4 if toy else 5,
        text_dim=TOY_TEXT_WIDTH if toy else TEXT_WIDTH,
    )


def _flux(toy: bool) -> nn.Module:
    from diffusers import FluxTransformer2DModel

    width = 8 if toy else 64
    return FluxTransformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=4,
        num_attention_heads=12,
        attention_head_dim=width,
        joint_attention_dim=TOY_TEXT_WIDTH if toy else TEXT_WIDTH,
        pooled_projection_dim=TOY_TEXT_WIDTH,
        axes_dims_rope=(width // 4, width // 4, width // 2),
    )


def _pixart_call(model: Any, side: int) -> Call:
    words = torch.arange(TEXT)[None] < TEXT // 2  # the rest of the prompt is padding, as in the pipeline
    return {
        "hidden_states": _noise(model.config.in_channels, side, side),
        "encoder_hidden_states": _noise(TEXT, model.config.caption_channels),
        "encoder_attention_mask": words.to(torch.float32),
        "timestep": torch.tensor([500]),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        "return_dict": False,
    }


def _wan_call(model: Any, side: int) -> Call:
    return {
        "hidden_states": _noise(model.config.in_channels, 4, side // 2, side // 2),
        "encoder_hidden_states": _noise(TEXT, model.config.text_dim),
        "timestep": torch.tensor([500]),
        "return_dict": False,
    }


def _flux_call(model: Any, side: int) -> Call:
    rows, columns = torch.meshgrid(torch.arange(side // 2), torch.arange(side // 2), indexing="ij")
    return {
        "hidden_states": _noise((side // 2) ** 2, model.config.in_channels),
        "encoder_hidden_states": _noise(JOINT_TEXT, model.config.joint_attention_dim),
        "pooled_projections": _noise(model.config.pooled_projection_dim),
        "timestep": torch.tensor([0.5]),
        "img_ids": torch.stack([torch.zeros_like(rows), rows, columns], -1).flatten(0, 1).float(),
        "txt_ids": torch.zeros(JOINT_TEXT, 3),
        "return_dict": False,
    }


def _noise(*shape: int) -> Tensor:
    return torch.randn(1, *shape, generator=torch.Generator().manual_seed(1))


_KINDS: dict[str, tuple[Callable[[bool], nn.Module], Callable[[Any, int], Call], int]] = {
    "pixart": (_pixart, _pixart_call, LATENTS),
    "wan": (_wan, _wan_call, LATENTS),
    "flux": (_flux, _flux_call, JOINT_LATENTS),
}
