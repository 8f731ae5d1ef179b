"""The transformers whose tokens are split in `benchmarks.tokens`: random weights, alive, of 50 million or more.

Both have twelve heads of 64 in five blocks of self-attention, attention to a text, and a feed-forward layer:

    pixart      as PixArt: an image of 128 x 128 latents, patches of 2 x 2
    wan         as Wan: four frames of 64 x 64 latents, patches of 2 x 2; diffusers can split this one, too

Either makes 4,096 tokens. A toy of the same kind is narrow, has four blocks, and makes 256.
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

    def at(self, step: int) -> Call:
        """The call of a later step: the latent has moved a little, the same way on every rank."""
        latent = self.call["hidden_states"]
        change = torch.randn(latent.shape, generator=torch.Generator().manual_seed(step))
        return self.call | {"hidden_states": latent + DRIFT * step * change}


def subject(name: str, *, toy: bool) -> Subject:
    """The model of that name, the same on every rank."""
    from tests.tiny.weights import enliven

    torch.manual_seed(0)
    build, call = _KINDS[name]
    model = enliven(build(toy).eval().requires_grad_(False))
    few = call(model, PROBE)
    with torch.no_grad():
        plan = discover_tokens(model, model.forward, (), few)
    whole = Subject(name=name, model=model, call=few, plan=plan, tokens=(PROBE // 2) ** 2)
    return whole.of_size(TOY_LATENTS if toy else LATENTS)


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


def _noise(*shape: int) -> Tensor:
    return torch.randn(1, *shape, generator=torch.Generator().manual_seed(1))


_KINDS: dict[str, tuple[Callable[[bool], nn.Module], Callable[[Any, int], Call]]] = {
    "pixart": (_pixart, _pixart_call),
    "wan": (_wan, _wan_call),
}
