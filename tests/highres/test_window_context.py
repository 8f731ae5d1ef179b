"""Self-attention of a window sees bands of its neighbours as they were in the last step, and nothing else."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor
from torch import Tensor, nn
from torch.nn import functional as F

from patchpar.errors import ExchangeError, PlanError, UnsupportedModel
from patchpar.plan.mesh import Axis
from patchpar.plan.step_clock import StepClock
from patchpar.strategies.structure.window_context import WindowContext, _WindowCall
from patchpar.strategies.structure.windows import Tiling
from patchpar.strategies.structure.work_schedule import Evaluation, assign_units
from tests.tensors import noise
from tests.tiny import build

from .test_definition import EARLY, LATE, large, text

SIZE, NATIVE = (16, 8), (8, 8)  # two windows, one below the other


class Layer(nn.Module):
    """Attention of every place to every place of its own values."""

    def forward(self, tokens_BLC: Tensor) -> Tensor:
        x = tokens_BLC[:, None]
        return F.scaled_dot_product_attention(x, x, x)[:, 0]


class Denoiser(nn.Module):
    """One self-attention in an up block."""

    def __init__(self) -> None:
        super().__init__()
        self.up_blocks = nn.ModuleList([nn.ModuleDict({"attn1": Layer()})])

    def forward(self, x_BCHW: Tensor) -> Tensor:
        tokens = self.up_blocks[0]["attn1"](x_BCHW.flatten(2).transpose(1, 2))
        return tokens.transpose(1, 2).reshape(x_BCHW.shape)


def tokens(x_BCHW: Tensor) -> Tensor:
    return x_BCHW.flatten(2).transpose(1, 2)[:, None]


def test_bands_of_the_last_step() -> None:
    denoiser, clock = Denoiser(), StepClock()
    windows = Tiling(margin=0.0, moved=False).lay(SIZE, NATIVE, key="")
    parts = assign_units(len(windows), 1, 1)
    found = WindowContext(denoiser, (None, Axis("patch")), clock, 0.25)  # type: ignore[arg-type]  # alone
    steps = [noise(2, 3, *SIZE, seed=seed) for seed in range(3)]
    for step, x in enumerate(steps):
        found.begin(windows, parts)
        for number in range(2):
            with found.around(Evaluation(number, (0,))):
                got = denoiser(windows.cut(x, number))
            keys = [tokens(windows.cut(x, number))]
            if step:
                band = (slice(8, 10), slice(6, 8))[number]  # two rows, of the other window
                keys.append(tokens(steps[step - 1][..., band, :]))
            seen = torch.cat(keys, 2)
            want = F.scaled_dot_product_attention(keys[0], seen, seen)[:, 0].transpose(1, 2).reshape(got.shape)
            assert torch.allclose(got, want, atol=1e-6), f"step {step}, window {number}"
        found.end(parts, silent=False)
        clock.tick()


def test_what_is_longer_ago_is_forgotten() -> None:
    """So is what was seen of windows elsewhere, and of another image."""
    denoiser, clock = Denoiser(), StepClock()
    windows = Tiling(margin=0.0, moved=False).lay(SIZE, NATIVE, key="")
    parts, x = assign_units(2, 1, 1), noise(1, 3, *SIZE)
    found = WindowContext(denoiser, (None, Axis("patch")), clock, 0.25)  # type: ignore[arg-type]  # alone

    def first_window() -> Tensor:
        found.begin(windows, parts)
        answers = []
        for number in range(2):
            with found.around(Evaluation(number, (0,))):
                answers.append(denoiser(windows.cut(x, number)))
        found.end(parts, silent=False)
        return answers[0]

    plain = denoiser(windows.cut(x, 0))
    assert torch.equal(first_window(), plain)
    clock.tick()
    assert not torch.allclose(first_window(), plain)
    clock.tick()
    clock.tick()
    assert torch.equal(first_window(), plain)
    clock.tick()
    found.reset()
    assert torch.equal(first_window(), plain)


def test_a_plan_is_removed_though_a_rank_is_lost() -> None:
    """The next image waits for the last exchange, as its ranks are there; a plan that is removed does not."""
    answer: Any = large(build("sd"), context=0.25)

    def lost() -> Any:
        raise ExchangeError("rank 1 was lost")

    calls = answer._detail._window_context._calls
    calls[0] = _WindowCall(pending=lost)
    with pytest.raises(ExchangeError, match="rank 1 was lost"):
        answer.reset()
    calls[0] = _WindowCall(pending=lost)
    answer.restore()
    answer.reset()


def test_who_cannot_see() -> None:
    """Transformers, whose keys know their places, and attention that is not torch's."""
    with pytest.raises(PlanError, match=r"context=0\.25: SD3Transformer2DModel is no UNet with self-attention"):
        large(build("sd3"), context=0.25)
    own = deepcopy(build("sd").denoiser)
    own.set_attn_processor(AttnProcessor())
    blind = build("sd")
    blind.pipe.unet = own
    answer: Any = large(blind, context=0.25)
    with pytest.raises(UnsupportedModel, match=r"attn1 does not call scaled_dot_product_attention.*context=0"):
        answer.denoise(own.forward, noise(2, 4, 16, 16), LATE, encoder_hidden_states=text(2))
    answer.denoise(own.forward, noise(2, 4, 16, 16), EARLY, encoder_hidden_states=text(2))
