"""Is a transformer a fit instrument for measuring parallel strategies? One process, no ranks.

    python -m benchmarks.sensitivity.tokens --model assets/scenes-dit --strips 4

As `benchmarks.sensitivity`, for a joint transformer: image tokens are cut into strips of rows, and every strip has its
own text tokens, as every rank has. The keys and values of the other strips' image tokens are missing ("off") or one
step old ("stale"). Prints dB of the images against the exact run, a verdict per bar; exit code 1 if one is missed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from diffusers import DiffusionPipeline, SD3Transformer2DModel
from diffusers.models.attention_processor import Attention
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.image_quality import psnr_db
from benchmarks.sensitivity.__main__ import Bar, Settings, cosine_bar, cosines, cost_bar, images, parse, run

KIND = "keys and values"


@dataclass(slots=True, kw_only=True)
class StripAttention:
    """Joint attention (a diffusers processor) of strips of image tokens, each with its own text tokens.

    Text tokens (B, strips * T, C) are one copy after the other. Stale keeps the image keys and values of the last step.
    """

    strips: int
    warmup: int
    stale: bool
    calls: int = 0
    last: tuple[Tensor, Tensor] | None = None

    def __call__(
        self, attn: Attention, hidden_states: Tensor, encoder_hidden_states: Tensor, attention_mask: None = None
    ) -> tuple[Tensor, Tensor]:
        """The attention of image tokens (B, N, C) and text tokens as ranks would have it."""
        image = _heads(attn, hidden_states, attn.to_q, attn.to_k, attn.to_v)
        text = _heads(attn, encoder_hidden_states, attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
        if image[0].shape[2] % self.strips:
            raise ValueError(f"{image[0].shape[2]} tokens do not make {self.strips} strips: use fewer")
        own, words = ([part.chunk(self.strips, 2) for part in parts] for parts in (image, text))
        self.calls += 1
        seen = []
        for rank in range(self.strips):
            context = [self._context(rank, index, own[index]) for index in (1, 2)]
            key, value = (torch.cat([some, words[index][rank]], 2) for index, some in zip((1, 2), context, strict=True))
            query = torch.cat([own[0][rank], words[0][rank]], 2)
            seen.append(functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))
        self.last = image[1:] if self.stale else None
        length = own[0][0].shape[2]
        seen_image, seen_text = (
            torch.cat(parts, 1) for parts in zip(*((s[:, :length], s[:, length:]) for s in seen), strict=True)
        )
        return attn.to_out[0](seen_image), seen_text if attn.context_pre_only else attn.to_add_out(seen_text)

    def _context(self, rank: int, index: int, now: tuple[Tensor, ...]) -> Tensor:
        if self.calls <= self.warmup:
            return torch.cat(now, 2)
        if self.last is None:
            return now[rank]
        old = self.last[index - 1].chunk(self.strips, 2)
        return torch.cat([*old[:rank], now[rank], *old[rank + 1 :]], 2)


def _heads(attn: Attention, tokens: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
    return tuple(layer(tokens).unflatten(-1, (attn.heads, -1)).transpose(1, 2) for layer in layers)


@contextmanager
def cut_tokens(transformer: SD3Transformer2DModel, settings: Settings, *, stale: bool) -> Iterator[None]:
    """Compute the transformer with tokens in strips."""
    kept = transformer.attn_processors
    options = {"strips": settings.strips, "warmup": settings.warmup, "stale": stale}
    transformer.set_attn_processor({name: StripAttention(**options) for name in kept})
    copies = transformer.context_embedder.register_forward_hook(lambda *call: call[-1].repeat(1, settings.strips, 1))
    try:
        yield
    finally:
        copies.remove()
        transformer.set_attn_processor(kept)


@dataclass(slots=True)
class FlowLog:
    """A forward hook on the transformer that keeps the noise each step predicts for the captions' branch."""

    noises: list[Tensor] = field(default_factory=list)

    def __call__(self, _module: nn.Module, _inputs: tuple, named: dict, output: tuple) -> None:
        """Noise is the noisy latent, led along the flow to noise level one."""
        level = named["timestep"].view(-1, 1, 1, 1) / 1000
        self.noises.append((named["hidden_states"] + (1 - level) * output[0]).chunk(2)[1])


def measure(pipe: DiffusionPipeline, settings: Settings) -> list[Bar]:
    """Run everything, print as it goes, judge."""
    log, found = FlowLog(), {}
    handle = pipe.transformer.register_forward_hook(log, with_kwargs=True)
    exact = images(pipe, settings)
    handle.remove()
    for stale in (True, False):
        with cut_tokens(pipe.transformer, settings, stale=stale):
            found[stale] = psnr_db(images(pipe, settings), exact)
        print(f"{KIND:16s} {'stale' if stale else 'off':6s} {found[stale]:6.2f} dB", flush=True)
    return [cosine_bar(cosines(log.noises)), cost_bar(KIND, found)]


if __name__ == "__main__":
    sys.exit(run(parse(__doc__, "scenes-dit"), measure))
