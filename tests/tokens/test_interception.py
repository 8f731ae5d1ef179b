"""Which functions of a split model are intercepted: attention where torch holds it, others in small modules only."""

from __future__ import annotations

import gc
import threading
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention as attention_by_another_name

from patchpar.comm.collectives import Communicator
from patchpar.errors import UnsupportedModel
from patchpar.plan.mesh import Axis
from patchpar.shard.attention.all_gather import attend_gathered
from patchpar.shard.fingerprint import fingerprint
from patchpar.shard.sdpa import AttentionReplaced
from patchpar.shard.transformer.attention import TokenSplit
from patchpar.shard.transformer.install import TransformerSharder
from patchpar.shard.transformer.local_tokens import LocalTokens, TokenSource, local_tokens
from patchpar.shard.transformer.probe.capture import Severed
from patchpar.shard.transformer.probe.discover import discover_tokens
from patchpar.shard.transformer.token_plan import Replicated
from tests.unit.threads import on_threads

from .ranks import LIMIT, TRANSFORMERS, error, hooks_of, plan_of, predictions

WIDTH, HEADS = 12, 3


def modes_at(model: nn.Module) -> dict[str, int]:
    """Filled when the model runs: the most modes that intercept functions while each of its modules is called."""
    found: dict[str, int] = {}

    def noting(path: str) -> Any:
        def hook(*_: object) -> None:
            found[path] = max(found.get(path, 0), torch._C._len_torch_function_stack())

        return hook

    for path, module in model.named_modules():
        module.register_forward_hook(noting(path))
    return found


@pytest.mark.parametrize(
    ("name", "watched"),
    [
        ("FluxTransformer2DModel", ()),
        ("PixArtTransformer2DModel", ()),
        ("SanaTransformer2DModel", ("attn1", "ff.conv_depth")),
    ],
)
def test_no_mode_stands_over_a_forward(name: str, watched: tuple[str, ...]) -> None:
    plan = plan_of(name)
    assert {block.watched for block in plan.blocks} == {watched}
    models = [TRANSFORMERS[name].build() for _ in range(2)]
    seen = [modes_at(model) for model in models]

    def on_rank(transport: Any) -> None:
        split = TokenSplit(Communicator(transport), Axis("patch", transport.rank, 2, (0, 1)), attend_gathered)
        shard = TransformerSharder(models[transport.rank], plan, split)
        with torch.no_grad():
            shard.denoise(models[transport.rank].forward, **TRANSFORMERS[name].call(0))
        shard.restore()
        assert not hooks_of(models[transport.rank])

    assert on_threads(2, on_rank) == [None, None]
    for modes in seen:
        under_one = {path for path, number in modes.items() if number}
        parts = {part for path in under_one for part in watched if f".{part}." in path}
        assert all(any(f".{part}." in path for part in watched) for path in under_one)
        assert parts == {part for part in watched if part == "attn1"}  # the other one has no parts


class Attention(nn.Module):
    """Attention by a name that the module has imported."""

    def __init__(self) -> None:
        super().__init__()
        self.to_qkv, self.to_out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in self.to_qkv(x).chunk(3, -1))
        return self.to_out(attention_by_another_name(q, k, v).transpose(1, 2).flatten(2))


class AttentionAgain(Attention):
    """Attention as most models call it."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in self.to_qkv(x).chunk(3, -1))
        return self.to_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(WIDTH), Attention(), AttentionAgain()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(self.norm(x))
        return x + self.second(self.norm(x))


class Denoiser(nn.Module):
    """Latents [B, C, H, W] as tokens. `kept`: what the last block returned."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.blocks = nn.ModuleList([Block(), Block()])
            self.norm_out, self.proj_out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)
        self.kept: Tensor | None = None

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states.flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        self.kept = x
        x = self.proj_out(self.norm_out(x.float()).type_as(x) * 1.5 + x)
        return x.transpose(1, 2).unflatten(2, hidden_states.shape[2:])


def latent() -> Tensor:
    return torch.randn(2, WIDTH, 5, 4, generator=torch.Generator().manual_seed(0))


def test_attention_by_another_name() -> None:
    model = Denoiser()
    plan = discover_tokens(model, model.forward, (), {"hidden_states": latent()})
    (block,) = plan.blocks
    assert block.watched == ("first",)
    assert len(block.attentions) == 2
    assert "first                            its functions are intercepted" in str(plan)
    models = [Denoiser() for _ in range(2)]
    with torch.no_grad():
        want = predictions(model(latent()))

    def on_rank(transport: Any) -> Any:
        own, comm = models[transport.rank], Communicator(transport)
        shard = TransformerSharder(
            own, plan, TokenSplit(comm, Axis("patch", transport.rank, 2, (0, 1)), attend_gathered)
        )
        with torch.no_grad():
            got = predictions(shard.denoise(own.forward, latent()))
        shard.restore()
        return got, dict(comm.traffic.rounds), comm.traffic.bytes_sent["tokens"]

    for got, rounds, sent in on_threads(2, on_rank):
        assert error([got], want) <= LIMIT
        assert rounds == {"kv": 4, "tokens": 1}
        assert sent == 2 * 10 * 3 * 4  # the prediction, not the tokens it is made of


def test_the_name_of_a_dtype_is_no_tensor() -> None:
    tokens = local_tokens(torch.ones(2, 3), TokenSource((), "a block", lambda own, source: own))
    assert tokens.type() == "torch.FloatTensor"
    half = tokens.type(torch.float16)
    assert isinstance(half, LocalTokens)
    assert half.dtype == torch.float16


def test_a_plan_of_other_parts_leaves_no_hook() -> None:
    """The search for another plan, and its hooks, come next."""
    model = Denoiser()
    plan = discover_tokens(model, model.forward, (), {"hidden_states": latent()})
    (block,) = plan.blocks
    other = replace(plan, blocks=(replace(block, replicated=(Replicated("third", {}, {}),)),))
    nobody: Any = None
    split = TokenSplit(nobody, Axis("patch", 0, 2, (0, 1)), attend_gathered)
    with pytest.raises(AttributeError, match="third"):
        TransformerSharder(model, other, split)
    assert not hooks_of(model)
    TransformerSharder(model, plan, split).restore()


def test_what_is_kept_beyond_the_call() -> None:
    """Other ranks may not read it then, so that a gather could wait for them for ever."""
    model = Denoiser()
    plan = discover_tokens(model, model.forward, (), {"hidden_states": latent()})

    def on_rank(transport: Any) -> Any:
        own = Denoiser()
        comm = Communicator(transport)
        shard = TransformerSharder(
            own, plan, TokenSplit(comm, Axis("patch", transport.rank, 2, (0, 1)), attend_gathered)
        )
        with torch.no_grad():
            shard.denoise(own.forward, latent())
        assert own.kept is not None
        assert own.kept.shape == (2, 20, WIDTH)
        return own.kept.mean(1)

    for found in on_threads(2, on_rank):
        assert isinstance(found, UnsupportedModel)
        assert "an output of blocks.1 was kept beyond the denoiser's call" in str(found)


def test_other_threads_and_nested_calls() -> None:
    """Attention in another thread, and in what replaces it, is torch's. Afterwards it is the function of before."""
    before, (query, key, value) = F.scaled_dot_product_attention, torch.randn(3, 1, 2, 5, 8)
    want, elsewhere = before(query, key, value), []

    def attend(call: Any) -> Tensor:
        return F.scaled_dot_product_attention(call.query, call.key, call.value) + 1

    with AttentionReplaced(attend):
        other = threading.Thread(target=lambda: elsewhere.append(F.scaled_dot_product_attention(query, key, value)))
        other.start()
        other.join()
        with AttentionReplaced(lambda call: attend(call) + 1):
            inner = F.scaled_dot_product_attention(query, key, value)
        outer = F.scaled_dot_product_attention(query, key, value)
    assert torch.equal(elsewhere[0], want)
    assert torch.equal(inner, want + 1 + 1)
    assert torch.equal(outer, want + 1)
    assert F.scaled_dot_product_attention is before


def test_a_replacement_is_no_change_of_the_network() -> None:
    """One rank may look for changes while another one, in a thread, or this one itself, has attention replaced."""
    model = Denoiser()
    before = fingerprint(model)
    with AttentionReplaced(lambda call: call.run()):
        assert fingerprint(model) == before


def test_a_function_that_another_library_has_put_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs where nothing is replaced, and stays."""

    def theirs(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return torch.zeros_like(query)

    query = torch.randn(1, 2, 5, 8)
    monkeypatch.setattr(F, "scaled_dot_product_attention", theirs)
    with AttentionReplaced(lambda call: F.scaled_dot_product_attention(call.query, call.key, call.value) + 1):
        assert torch.equal(F.scaled_dot_product_attention(query, query, query), torch.ones_like(query))
    assert F.scaled_dot_product_attention is theirs


def test_what_a_search_has_seen_is_freed_with_it() -> None:
    """Not only when garbage is collected, which may be calls later: these are keys of all layers."""
    mode, keys = Severed(), torch.randn(1, 2, 4, 8)
    key = weakref.ref(keys)
    gc.disable()
    try:
        with mode:
            F.scaled_dot_product_attention(torch.randn(1, 2, 4, 8), keys, keys)
        assert (len(mode.seen.calls), mode.seen.count) == (1, 1)
        del keys
        assert key() is not None
        del mode
        assert key() is None
    finally:
        gc.enable()
