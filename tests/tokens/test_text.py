"""Text of joint attention is a second run of tokens, and split like the image: nothing is computed by every rank."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from patchpar.comm.collectives import Communicator
from patchpar.plan.attention_mode import AttentionMode
from patchpar.plan.mesh import Axis
from patchpar.shard.attention.all_gather import attend_gathered
from patchpar.shard.attention.dispatch import attend_together
from patchpar.shard.transformer.attention import TokenSplit
from patchpar.shard.transformer.install import TransformerSharder
from patchpar.shard.transformer.probe.discover import discover_tokens
from patchpar.shard.transformer.shipped_plans import shipped_for
from patchpar.shard.transformer.token_plan import TokenPlan, TokenRows
from tests.breadth import first_of
from tests.unit.threads import on_threads
from tests.versions import needs_diffusers

from .nobody import Nobody
from .ranks import LIMIT, TRANSFORMERS, error, plain, plan_of, predictions

FLUX, FLUX2, SD3 = "FluxTransformer2DModel", "Flux2Transformer2DModel", "SD3Transformer2DModel"
SPLIT = {
    FLUX: "encoder_hidden_states",
    SD3: "encoder_hidden_states",  # after the image
    FLUX2: "hidden_states",  # one sequence with the image in single blocks
    "QwenImageTransformer2DModel": "encoder_hidden_states",  # a mask of text
    "HunyuanVideoTransformer3DModel": "encoder_hidden_states",  # masks over both
    "CogVideoXTransformer3DModel": "encoder_hidden_states",
}
"""Classes, and the argument of their last kind of block that has the text."""


def divided(name: str, plan: TokenPlan, call: dict[str, Any], ranks: int, mode: Any, **options: Any) -> list[Any]:
    """The predictions of each rank, and the sizes of its shares of text by list of blocks."""
    models = [TRANSFORMERS[name].build() for _ in range(ranks)]

    def on_rank(transport: Any) -> Any:
        axis = Axis("patch", transport.rank, ranks, tuple(range(ranks)))
        shard = TransformerSharder(
            models[transport.rank], plan, TokenSplit(Communicator(transport), axis, mode, **options)
        )
        with torch.no_grad():
            found = predictions(shard.denoise(models[transport.rank].forward, **call))
        return found, {name: ranges.sizes for name, ranges in shard.ranges.items() if name.endswith("text")}

    found = on_threads(ranks, on_rank, deadline=30.0)
    errors = [each for each in found if isinstance(each, Exception)]
    if errors:
        raise errors[0]
    return found


def shipped_plan(model: nn.Module) -> TokenPlan | None:
    """The plan that comes with the package, which `test_shipped` finds to be what a search tells."""
    shipped = shipped_for(model)
    return None if shipped is None else shipped.plan_for(model)


def plan_for(name: str) -> TokenPlan:
    """The plan that comes with the package; what a search tells where blocks are of an older diffusers."""
    return shipped_plan(TRANSFORMERS[name].build()) or plan_of(name)


@pytest.mark.parametrize("name", first_of(SPLIT, FLUX2, SD3))
def test_every_rank_has_some_of_the_text(name: str) -> None:
    """Uneven shares too, and in every mode the prediction of one process; not where nothing is exchanged."""
    plan = plan_for(name)
    text = plan.blocks[-1].text
    assert text is not None
    assert next(iter(text.inputs)) == SPLIT[name]
    want, call = plain(name, 0), TRANSFORMERS[name].call(0)
    for ranks, keys in ((5, AttentionMode(algorithm="ring")), (4, AttentionMode(ulysses=2))):
        found = divided(name, plan, call, ranks, partial(attend_together, keys))
        assert error([predicted for predicted, _ in found], want) <= LIMIT
        for _, parts in found:
            assert parts
            assert all(max(sizes) - min(sizes) <= 1 and len(sizes) == ranks for sizes in parts.values())
    found = divided(name, plan, call, 2, None)
    assert error([predicted for predicted, _ in found], want) > 100 * LIMIT


def test_text_of_fewer_tokens_than_ranks() -> None:
    """Every rank computes all of it."""
    call = TRANSFORMERS[FLUX].call(0)
    call |= {"encoder_hidden_states": call["encoder_hidden_states"][:, :2], "txt_ids": call["txt_ids"][:2]}
    with torch.no_grad():
        want = predictions(TRANSFORMERS[FLUX].build()(**call))
    for predicted, parts in divided(FLUX, plan_for(FLUX), call, 3, attend_gathered):
        assert error([predicted], want) <= LIMIT
        assert not parts


class Joint(nn.Module):
    """Attention between an image and a text, each of which may be `masked` from the other's last token."""

    def __init__(self, masked: str) -> None:
        super().__init__()
        self.masked = masked

    def forward(self, text: Tensor, image: Tensor, text_tokens: int) -> tuple[Tensor, Tensor]:
        both = torch.cat([text, image], 1).unsqueeze(1)
        mask = None
        if self.masked == "by query and key":
            mask = torch.ones(both.shape[2], both.shape[2], dtype=torch.bool).tril(text_tokens)
        out = F.scaled_dot_product_attention(both, both, both, mask).squeeze(1)
        if self.masked == "a mean":
            text = text + text.mean(1, keepdim=True)
        first, second = out.split([text_tokens, out.shape[1] - text_tokens], 1)
        return text + first, image + second


class Denoiser(nn.Module):
    def __init__(self, masked: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Joint(masked)])

    def forward(self, hidden_states: Tensor, text: Tensor) -> Tensor:
        text, image = self.blocks[0](text, hidden_states, text.shape[1])
        return image + text.mean(1, keepdim=True)


def test_the_number_of_its_tokens_is_found_by_trying() -> None:
    model = Denoiser("")
    plan = discover_tokens(model, model.forward, (torch.randn(2, 35, 8), torch.randn(2, 12, 8)), {})
    text = plan.blocks[0].text
    assert text is not None
    assert (text.inputs, text.counts) == ({"text": TokenRows(1)}, ("text_tokens",))
    assert text.attentions[0].keys == TokenRows(2, 0, None)
    assert dict(text.outputs) == {0: TokenRows(1)}


@pytest.mark.parametrize("masked", ["by query and key", "a mean"])
def test_text_that_cannot_be_split(masked: str) -> None:
    """Every rank has all of it."""
    model = Denoiser(masked)
    plan = discover_tokens(model, model.forward, (torch.randn(2, 35, 8), torch.randn(2, 12, 8)), {})
    assert plan.blocks[0].inputs == {"image": TokenRows(1)}
    assert plan.blocks[0].text is None


def flops(ranks: int, **options: Any) -> int:
    """What the first of `ranks` computes for FLUX.1 dev of fewer blocks, 1024 x 1024 pixels, on the meta device."""
    with torch.device("meta"):
        model = FluxTransformer2DModel(guidance_embeds=True, num_layers=2, num_single_layers=4).eval()
        call = {
            "hidden_states": torch.empty(1, 4096, 64),
            "encoder_hidden_states": torch.empty(1, 512, 4096),
            "pooled_projections": torch.empty(1, 768),
            "timestep": torch.empty(1),
            "guidance": torch.empty(1),
            "img_ids": torch.empty(4096, 3),
            "txt_ids": torch.empty(512, 3),
        }
    plan = shipped_plan(model)
    assert plan is not None
    split = TokenSplit(
        Communicator(Nobody(0)), Axis("patch", 0, ranks, tuple(range(ranks))), attend_gathered, **options
    )
    shard = TransformerSharder(model, plan, split)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        shard.denoise(model.forward, **call)
    return counter.get_total_flops()


@needs_diffusers("0.42", "blocks with the code that the plan in the package is of")
def test_flops_of_a_rank() -> None:
    """A rank of eight computes an eighth; with all the text on every rank, 1.6 times as much."""
    fraction = flops(1) / 8
    assert flops(8) <= 1.06 * fraction
    assert flops(8, text=False) > 1.5 * fraction
