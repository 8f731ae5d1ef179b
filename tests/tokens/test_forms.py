"""Calls of one denoiser that differ in form: each is watched where it must be, and every prediction is exact."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchpar.comm.collectives import Communicator
from patchpar.errors import UnsupportedModel, VerificationError
from patchpar.plan.mesh import Axis
from patchpar.shard.transformer import verify as token_verify
from patchpar.shard.transformer.probe import discover as discovery
from patchpar.shard.verification_cache import VerificationCache
from patchpar.strategies.exact import ExactPatch
from tests.breadth import first_of
from tests.tensors import relative
from tests.tiny.transformers import TRANSFORMERS
from tests.tiny.transformers_entry import noise
from tests.unit.threads import on_threads

from .ranks import LIMIT, hooks_of, predictions

Calls = list[dict[str, Any]]
WAN, LTX = "WanTransformer3DModel", "LTXVideoTransformer3DModel"
TIMED = {
    WAN: "one dim more where every token has a time",
    LTX: "as many dims, one row or one for every token",
}


def generated(
    models: list[Any], calls: Calls, folder: Path | None = None, exchange: str = "on", trusted: Sequence[str] = ()
) -> list[list[Tensor]]:
    """The predictions of one denoiser called in turn, on every rank."""

    def on_rank(transport: Any) -> list[Tensor]:
        model, ranks = models[transport.rank], len(models)
        axis = Axis("patch", transport.rank, ranks, tuple(range(ranks)))
        verifications = VerificationCache.of(False if folder is None else folder / str(transport.rank), trusted)
        denoiser = ExactPatch().install(model, Communicator(transport), axis, verifications=verifications)
        denoiser.exchange = exchange
        try:
            with torch.no_grad():
                return [predictions(denoiser.denoise(model.forward, **call))[0] for call in calls]
        finally:
            denoiser.restore()
            assert not hooks_of(model)

    found = on_threads(len(models), on_rank, deadline=60.0)
    for each in found:
        if isinstance(each, Exception):
            raise each
    return found


def timed(name: str) -> Calls:
    """One time for all tokens, one for each, and both again with other numbers."""
    call = TRANSFORMERS[name].call(0)
    latent, time = call["hidden_states"], call["timestep"]
    tokens = latent.shape[1] if latent.ndim == 3 else latent[0, 0, :, ::2, ::2].numel()
    each = time[:, None] * (torch.arange(tokens) % 3 > 0)
    moved = latent + 0.3 * noise(*latent.shape, seed=5)
    return [
        call,
        call | {"timestep": each},
        call | {"hidden_states": moved},
        call | {"timestep": each.flip(1), "hidden_states": moved},
        call | {"timestep": time[:, None]} if latent.ndim == 3 else call,
    ]


@pytest.mark.parametrize(("name", "kept"), first_of([(name, kept) for name in TIMED for kept in (True, False)]))
def test_times_of_all_tokens_and_of_each(name: str, kept: bool, tmp_path: Path) -> None:
    """Verified, or taken as it is found."""
    calls = timed(name)
    models = [TRANSFORMERS[name].build() for _ in range(2)]
    with torch.no_grad():
        want = [predictions(models[0](**call))[0] for call in calls]
    assert relative(want[1], want[0]) > 1e-2
    for got in generated(models, calls, tmp_path if kept else None):
        assert max(relative(x, y) for x, y in zip(got, want, strict=True)) <= LIMIT
    if kept:
        alone = generated(models, calls, tmp_path, "off")[0]
        assert min(relative(x, y) for x, y in zip(alone, want, strict=True)) > 10 * LIMIT


def test_what_is_kept_for_one_form_is_not_believed_for_another(tmp_path: Path) -> None:
    """A second program begins with the form that the first one met last."""
    calls = timed(LTX)
    models = [TRANSFORMERS[LTX].build() for _ in range(2)]
    for order in (calls[:2], calls[1::-1]):
        with torch.no_grad():
            want = [predictions(models[0](**call))[0] for call in order]
        for got in generated(models, order, tmp_path):
            assert max(relative(x, y) for x, y in zip(got, want, strict=True)) <= LIMIT


class Block(nn.Module):
    """Attention over tokens, and what is added to each, which may be left out. `alone`: refuses to see a part."""

    def __init__(self, alone: int = 0) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(8, 8) for _ in range(3))
        self.alone = alone

    def forward(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        if self.alone and x.shape[1] != self.alone:
            raise IndexError("index 4 is out of bounds for dimension 0 with size 4")
        q, k, v = (layer(x).unflatten(-1, (2, 4)).transpose(1, 2) for layer in (self.to_q, self.to_k, self.to_v))
        x = x + F.scaled_dot_product_attention(3 * q, k, v).transpose(1, 2).flatten(2)
        return x if added is None else x * added


class LateGuest(nn.Module):
    """Adds to its tokens only when it is late, which nothing in the form of a call tells."""

    def __init__(self, alone: int = 0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(alone) for _ in range(2))

    def forward(self, hidden_states: Tensor, timestep: float) -> Tensor:
        added = torch.linspace(-1, 1, hidden_states.shape[1])[:, None] if timestep < 500 else None
        for block in self.blocks:
            hidden_states = block(hidden_states, added)
        return hidden_states


def models_of(count: int, alone: int = 0) -> list[nn.Module]:
    found: list[nn.Module] = []
    for _ in range(count):
        torch.manual_seed(0)
        found.append(LateGuest(alone).eval().requires_grad_(False))
    return found


@pytest.mark.parametrize("kept", [True, False], ids=["verified", "not verified"])
def test_a_block_that_is_called_otherwise_in_a_later_step(kept: bool, tmp_path: Path) -> None:
    latent = noise(1, 12, 8)
    calls: Calls = [
        {"hidden_states": latent + step, "timestep": time} for step, time in enumerate((900.0, 400.0, 300.0, 700.0))
    ]
    models = models_of(2)
    want = [models[0](**call) for call in calls]
    for got in generated(models, calls, tmp_path if kept else None):
        assert max(relative(x, y) for x, y in zip(got, want, strict=True)) <= LIMIT
    alone = generated(models, calls, tmp_path if kept else None, "off")[0]
    assert min(relative(x, y) for x, y in zip(alone, want, strict=True)) > 10 * LIMIT


class OneGuest(LateGuest):
    """Only its second block adds anything: when it is late, or what it is given."""

    def forward(self, hidden_states: Tensor, timestep: float, given: Tensor | None = None) -> Tensor:
        late = torch.linspace(-1, 1, hidden_states.shape[1])[:, None] if timestep < 500 else None
        return self.blocks[1](self.blocks[0](hidden_states, None), late if given is None else given)


@pytest.mark.parametrize("second", [{"timestep": 400.0}, {"given": noise(12, 1)}], ids=["unforeseen", "another form"])
def test_what_is_known_of_other_calls_is_not_looked_for_again(
    second: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at: list[list[str]] = []
    plain = discovery._plan_of
    monkeypatch.setattr(
        discovery, "_plan_of", lambda block, *rest: (looked_at.append(block.paths), plain(block, *rest))[1]
    )
    models: list[nn.Module] = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(OneGuest().eval().requires_grad_(False))
    first = {"hidden_states": noise(1, 12, 8, seed=3), "timestep": 900.0}
    calls: Calls = [first, first | second]
    want = [models[0](**call) for call in calls]
    for turn in (1, -1):  # a second program begins with the form that the first one met last
        for got in generated(models, calls[::turn], tmp_path):
            assert max(relative(x, y) for x, y in zip(got, want[::turn], strict=True)) <= LIMIT
    assert sorted(looked_at) == [["blocks.0", "blocks.1"]] * 2 + [["blocks.1"]] * 2


def test_a_block_that_fails_while_it_is_tried_is_a_reason_in_words(tmp_path: Path) -> None:
    calls: Calls = [{"hidden_states": noise(1, 12, 8), "timestep": 900.0}]
    with pytest.raises(
        UnsupportedModel, match=r"LateGuest cannot be split by tokens .*index 4 is out of bounds.*cfg=2"
    ):
        generated(models_of(2, alone=12), calls, tmp_path)


class GivenFirst(nn.Module):
    """Its first tokens are those of a given frame, which no tensor tells."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(GivenFirstBlock() for _ in range(2))

    def forward(self, hidden_states: Tensor, given: int) -> Tensor:
        for block in self.blocks:
            hidden_states = block(hidden_states, given)
        return hidden_states


class GivenFirstBlock(Block):
    """A block of it."""

    def forward(self, x: Tensor, given: int) -> Tensor:  # type: ignore[override]
        x = super().forward(x)
        return torch.cat([2 * x[:, :given], x[:, given:] - 1], 1)


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_first_tokens_are_told_from_the_rest_by_their_number(ranks: int, tmp_path: Path) -> None:
    """By another number in a later call too, which a rank has all of, some of, or none."""
    models: list[nn.Module] = []
    for _ in range(ranks):
        torch.manual_seed(0)
        models.append(GivenFirst().eval().requires_grad_(False))
    calls: Calls = [{"hidden_states": noise(1, 14, 8, seed=given), "given": given} for given in (4, 6, 9)]
    want = [models[0](**call) for call in calls]
    for got in generated(models, calls, tmp_path):
        assert max(relative(x, y) for x, y in zip(got, want, strict=True)) <= LIMIT
    alone = generated(models, calls, tmp_path, "off")[0]
    assert min(relative(x, y) for x, y in zip(alone, want, strict=True)) > 10 * LIMIT


class Steered(LateGuest):
    """Adds a residual to the first four tokens inside its blocks, where no argument of a block tells of it."""

    def forward(self, hidden_states: Tensor, timestep: float, residual: Tensor) -> Tensor:  # type: ignore[override]
        for block in self.blocks:
            block.residual = residual
            hidden_states = block(hidden_states) + 0.0
        return hidden_states


class SteeredBlock(Block):
    """A block of it."""

    residual: Tensor

    def forward(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        return super().forward(torch.cat([x[:, :4] + self.residual[:, :4], x[:, 4:]], 1), added)


@pytest.mark.parametrize("guarded", [True, False])
def test_residuals_that_do_not_act_yet_are_checked_too(
    guarded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ControlNet that begins later gives zeros at first, under which a wrong split is right."""
    models: list[nn.Module] = []
    for _ in range(2):
        torch.manual_seed(0)
        model = Steered()
        model.blocks = nn.ModuleList(SteeredBlock() for _ in range(2))
        models.append(model.eval().requires_grad_(False))
    calls: Calls = [{"hidden_states": noise(1, 12, 8), "timestep": 900.0, "residual": torch.zeros(1, 12, 8)}]
    if guarded:
        with pytest.raises((VerificationError, UnsupportedModel), match="Steered"):
            generated(models, calls, tmp_path)
        return
    monkeypatch.setattr(token_verify, "with_noise_for_zeros", lambda call: None)
    calls.append(calls[0] | {"residual": noise(1, 12, 8, seed=3)})
    want = [models[0](**call) for call in calls]
    for got in generated(models, calls, tmp_path, trusted=["tests"]):
        assert relative(got[0], want[0]) <= LIMIT
        assert relative(got[1], want[1]) > 0.1  # silently: what the guard is for
