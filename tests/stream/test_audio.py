"""Levels per image frame, tokens per latent frame: no frame hears what comes after it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from patchpar.errors import PlanError
from patchpar.models.streaming.causal.audio_conditioner import (
    SILENCE,
    AudioConditioner,
    AudioConfig,
    audio_levels,
    latent_tokens,
)
from tests.stream.tiny import conditioner, speech
from tests.tensors import noise

CONFIG = AudioConfig(dim=24, heads=2, after=(1,), fps=12.5, rate=16000, bands=4, tokens=3)


def tone(hertz: float, seconds: float = 0.8, amplitude: float = 0.5) -> Tensor:
    return amplitude * torch.sin(2 * math.pi * hertz * torch.arange(round(16000 * seconds)) / 16000)


def test_loudness_is_that_of_the_samples() -> None:
    levels = audio_levels(tone(1000), CONFIG)
    assert levels.shape == (10, 5)
    decibels = 10 * math.log10(0.5**2 / 2)
    assert torch.allclose(levels[:, 0], torch.tensor((decibels + 50) / 50), atol=1e-3)


@pytest.mark.parametrize(("hertz", "band"), [(150, 0), (500, 1), (1500, 2), (5000, 3)])
def test_a_tone_is_in_its_band(hertz: float, band: int) -> None:
    levels = audio_levels(tone(hertz), CONFIG)
    assert levels[:, 1:].argmax(1).tolist() == [band] * 10
    assert torch.allclose(levels[:, 1 + band], levels[:, 0], atol=0.02)


def test_no_audio_is_silence() -> None:
    assert (audio_levels(torch.zeros(16000), CONFIG) == SILENCE).all()
    assert audio_levels(torch.zeros(10), CONFIG).shape == (0, 5)


def test_a_frame_hears_its_own_time_only() -> None:
    samples = noise(16000) * 0.1
    louder = samples.clone()
    louder[5 * 1280 : 6 * 1280] *= 3
    moved = (audio_levels(samples, CONFIG) != audio_levels(louder, CONFIG)).any(1)
    assert moved.nonzero().flatten().tolist() == [5]


@pytest.mark.parametrize("fps", [24, 29.97])
def test_frames_do_not_drift(fps: float) -> None:
    config = AudioConfig(dim=24, heads=2, after=(), fps=fps)
    assert len(audio_levels(torch.zeros(16000 * 60), config)) == math.floor(60 * fps)


def test_tokens_are_the_last_frames_heard() -> None:
    levels = torch.arange(10.0)[:, None].expand(-1, 5)
    assert latent_tokens(levels, range(2), CONFIG)[..., 0].tolist() == [[-1, -1, 0], [-1, 0, 1]]
    four = AudioConfig(dim=24, heads=2, after=(), fps=25, tokens=3, per_latent=4)
    assert latent_tokens(levels, range(3), four)[..., 0].tolist() == [[-1, -1, 0], [2, 3, 4], [6, 7, 8]]
    assert latent_tokens(levels[5:], range(2, 3), four, first=5)[..., 0].tolist() == [[6, 7, 8]]


def test_audio_that_is_not_there_is_refused() -> None:
    with pytest.raises(PlanError, match="up to 3, but there is audio for frames 0 to 2 only"):
        latent_tokens(torch.zeros(3, 5), range(4), CONFIG)
    with pytest.raises(PlanError, match="for frames 2 to 4 only"):
        latent_tokens(torch.zeros(3, 5), range(2, 4), CONFIG, first=2)


def test_untrained_it_changes_nothing_and_trained_it_does() -> None:
    hidden = noise(2, 8, 24)
    heard = speech(0, batch=2)
    fresh = AudioConditioner(conditioner().config)
    assert not fresh(0, hidden, fresh.encode(heard)).any()
    trained = conditioner()
    added = trained(0, hidden, trained.encode(heard))
    assert added.shape == hidden.shape
    assert added.abs().max() > 1e-3


def test_a_frame_takes_from_its_own_audio() -> None:
    net, hidden, heard = conditioner(), noise(1, 8, 24), speech(0)
    other = heard.clone()
    other[:, 1] += 1
    one, two = (net(0, hidden, net.encode(x)).split(4, 1) for x in (heard, other))
    assert [torch.equal(a, b) for a, b in zip(one, two, strict=True)] == [True, False]


def test_saved_and_loaded(tmp_path: Path) -> None:
    conditioner().save(tmp_path)
    loaded = AudioConditioner.load(tmp_path)
    assert loaded.config == conditioner().config
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), conditioner().parameters(), strict=True))
    with pytest.raises(PlanError, match=r"no audio\.json"):
        AudioConditioner.load(tmp_path / "elsewhere")


def test_what_cannot_be() -> None:
    with pytest.raises(PlanError, match="no multiple of heads=5"):
        AudioConfig(dim=24, heads=5, after=(), fps=25)
    with pytest.raises(PlanError, match="fps=0"):
        AudioConfig(dim=24, heads=2, after=(), fps=0)
