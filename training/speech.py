"""Sounds like speech, made by code: syllables of vowels and hisses in phrases with pauses, no words.

Vowels are a pulse train through three resonances (Peterson and Barney, JASA 24, 1952, table II), hisses are noise above
3 kHz.
"""

from __future__ import annotations

import random

import numpy as np

RATE = 16_000
"""Samples per second."""
_VOWELS = (
    (270, 2290, 3010),
    (530, 1840, 2480),
    (730, 1090, 2440),
    (570, 840, 2410),
    (300, 870, 2240),
    (490, 1350, 1690),
)
"""Hz of the three resonances."""
_BANDWIDTHS = (80.0, 110.0, 160.0)


def speech(key: str, samples: int) -> np.ndarray:
    """Mono samples (N,) float32 between -1 and 1, a function of the key and the length alone."""
    rng = random.Random(f"speech {key}")
    noise = np.random.default_rng(rng.getrandbits(62))
    audio = np.zeros(samples + RATE, np.float32)
    if rng.random() < 0.5:
        audio += noise.standard_normal(len(audio)).astype(np.float32) * 10 ** rng.uniform(-4.2, -3)
    pitch, gain = rng.uniform(85, 230), rng.uniform(-6, 3)
    at = -rng.randrange(RATE // 2)
    while at < samples:
        for _ in range(rng.randint(1, 7)):
            made = _syllable(rng, noise, pitch * rng.uniform(0.85, 1.2), gain)
            start = max(0, at)
            made = made[start - at : len(audio) - at] if at < len(audio) else made[:0]
            audio[start : start + len(made)] += made
            at = at + round(RATE * rng.uniform(0.12, 0.34))
        at += round(RATE * rng.choice((0.05, 0.25, 0.5, 0.9)) * rng.uniform(0.6, 1.2))
    return np.clip(audio[:samples], -1, 1)


def _syllable(rng: random.Random, noise: np.random.Generator, pitch: float, gain: float) -> np.ndarray:
    """A vowel, one time in three with a hiss before it; its level is between -26 and -9 dB before the gain."""
    length = round(RATE * rng.uniform(0.13, 0.36))
    source = np.zeros(length)
    source[:: round(RATE / pitch)] = 1
    source += noise.standard_normal(length) * 0.02
    vowel = _filtered(source, _resonances(length, rng.choice(_VOWELS)))
    vowel *= np.sin(np.linspace(0, np.pi, length)) ** rng.uniform(0.5, 1.2)
    audio = _at_level(vowel, rng.uniform(-26, -9) + gain)
    if rng.random() < 1 / 3:
        short = length // 3
        frequencies = np.fft.rfftfreq(short, 1 / RATE)
        hiss = _filtered(noise.standard_normal(short), (frequencies > 3000) * 1.0) * np.hanning(short)
        audio[:short] += _at_level(hiss, rng.uniform(-36, -22) + gain)
    return audio.astype(np.float32)


def _resonances(length: int, peaks: tuple[int, int, int]) -> np.ndarray:
    frequencies = np.fft.rfftfreq(length, 1 / RATE)
    gains = [1 / (1 + ((frequencies - peak) / width) ** 2) for peak, width in zip(peaks, _BANDWIDTHS, strict=True)]
    return gains[0] + 0.5 * gains[1] + 0.2 * gains[2]


def _filtered(audio: np.ndarray, response: np.ndarray) -> np.ndarray:
    return np.fft.irfft(np.fft.rfft(audio) * response, len(audio))


def _at_level(audio: np.ndarray, decibels: float) -> np.ndarray:
    return audio * 10 ** (decibels / 20) / (np.sqrt(np.mean(audio**2)) + 1e-9)
