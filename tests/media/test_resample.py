"""Sound of another rate: the same samples in whatever pieces it comes, nothing lost in an hour, no sound changed."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from patchpar.media.resample import Resampler
from tests.tensors import noise


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
    assert abs(len(whole) - 3001 * target / rate) < 1


def test_one_channel_of_several_as_it_lies_in_memory() -> None:
    both = noise(4800, 2)
    apart, together = Resampler(48000, 16000), Resampler(48000, 16000)
    assert torch.equal(apart.push(both[:, 1].requires_grad_()), together.push(both[:, 1].clone()))


def test_each_piece_by_itself_would_drift() -> None:
    """Why the remainder is kept: pieces of 1000 samples would be rounded to 363 each."""
    together = len(resampled(torch.zeros(100_000), 44100, 16000, 1000))
    apart = sum(len(resampled(torch.zeros(1000), 44100, 16000, 1000)) for _ in range(100))
    assert (together, apart) == (36281, 36300)


def tone(hertz: float, rate: int) -> Tensor:
    """One second."""
    return torch.sin(2 * math.pi * hertz * torch.arange(rate) / rate)


@pytest.mark.parametrize("rate", [8000, 44100, 48000])
def test_a_tone_stays_a_tone(rate: int) -> None:
    found = resampled(tone(220, rate), rate, 16000, 999)[:16000]
    inside = slice(100, -100)  # the filter begins and ends with silence
    assert (found - tone(220, 16000))[inside].abs().max() < 1e-3
    assert (found - tone(221, 16000))[inside].abs().max() > 0.5


@pytest.mark.parametrize("hertz", [9000, 12000, 20000])
def test_what_the_new_rate_cannot_hold_is_filtered_out_and_not_folded_back(hertz: int) -> None:
    """Taken as every third sample, 9 kHz would be heard as 7 kHz, as loud as before."""
    folded = tone(hertz, 48000)[::3]
    found = resampled(tone(hertz, 48000), 48000, 16000, 4800)[100:-100]
    assert 20 * math.log10(found.std() / folded.std()) < -50


def test_what_is_constant_stays_so() -> None:
    for rate in (8000, 44100):
        assert (resampled(torch.ones(5000), rate, 16000, 100)[100:-100] - 1).abs().max() < 1e-3


def test_little_is_held_back() -> None:
    resampler = Resampler(44100, 16000)
    arrived = sum(len(resampler.push(torch.zeros(441))) for _ in range(100))
    assert 16000 - 32 <= arrived <= 16000  # 2 ms


def test_nothing_gives_nothing() -> None:
    assert len(resampled(torch.zeros(0), 44100, 16000, 1)) == 0
