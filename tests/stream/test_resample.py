"""Sound of another rate: the same samples in whatever pieces it comes, nothing lost in an hour, no sound changed."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from patchpar.stream.resample import Resampler
from tests.stream.tiny import noise


def resampled(samples: Tensor, rate: int, target: int, piece: int) -> Tensor:
    resampler = Resampler(rate, target)
    return torch.cat([*(resampler.push(part) for part in samples.split(piece)), resampler.end()])


@pytest.mark.parametrize(
    ("rate", "target"), [(44100, 16000), (48000, 16000), (16000, 16000), (8000, 16000), (11025, 48000)]
)
@pytest.mark.parametrize("piece", [1, 7, 1000])
def test_pieces_make_no_difference(rate: int, target: int, piece: int) -> None:
    samples = noise(3001)
    found, whole = resampled(samples, rate, target, piece), resampled(samples, rate, target, len(samples))
    assert torch.equal(found, whole)
    assert len(whole) == round(3001 * target / rate)


def test_each_piece_by_itself_would_drift() -> None:
    """Why the remainder is kept: pieces of 1000 samples would be rounded to 363 each."""
    together = len(resampled(torch.zeros(100_000), 44100, 16000, 1000))
    apart = sum(len(resampled(torch.zeros(1000), 44100, 16000, 1000)) for _ in range(100))
    assert (together, apart) == (36281, 36300)


@pytest.mark.parametrize("rate", [8000, 44100, 48000])
def test_a_tone_stays_a_tone(rate: int) -> None:
    seconds = torch.arange(rate) / rate
    wanted = torch.sin(2 * math.pi * 220 * torch.arange(16000) / 16000)
    found = resampled(torch.sin(2 * math.pi * 220 * seconds), rate, 16000, 999)
    shift = torch.sin(2 * math.pi * 220 * torch.arange(16000) / 16000 + math.pi / 3)
    assert (found - wanted).abs().mean() < 0.06  # half a sample's delay and the line between two
    assert (found - shift).abs().mean() > 0.5


def test_what_is_constant_stays_so() -> None:
    for rate in (8000, 44100):
        assert set(resampled(torch.ones(5000), rate, 16000, 100).tolist()) == {1.0}


def test_little_is_held_back() -> None:
    resampler = Resampler(44100, 16000)
    came = sum(len(resampler.push(torch.zeros(441))) for _ in range(100))
    assert 16000 - 3 <= came <= 16000


def test_nothing_gives_nothing() -> None:
    assert len(resampled(torch.zeros(0), 44100, 16000, 1)) == 0
