"""Colours of a face over a long stream, with its sink and without: serial, in one process, for benchmarks.stream.long.

Without a sink the looks live in the window alone, from which they go on and on being copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from patchpar.models.streaming.causal.audio_conditioner import latent_tokens
from patchpar.stream.causal.wan import StepState
from training.evaluate_face import Avatar, Talk, held_out_talk, packaged_avatar, stream_of
from training.face_measure import identity_error

SPEECH_SECONDS = 6.0
"""Of one talk, which is said again and again."""
Colours = dict[str, float]


def talk_of(number: int = 0) -> Talk:
    """A face and speech that training has not seen."""
    return held_out_talk(number, SPEECH_SECONDS)


def drift(model: Path, talk: Talk, blocks: int, looks: int, *, has_sink: bool) -> list[Colours]:
    """By how much mean colours differ from the reference's, `looks` times in `blocks` blocks.

    `has_sink`: without it the sink is taken away when the window is full.
    """
    avatar = packaged_avatar(model)
    every, found = max(1, blocks // looks), []
    for block, frames_FHWC in enumerate(_frames(avatar, talk, blocks, has_sink=has_sink)):
        if block % every == 0:
            found.append(identity_error(frames_FHWC, talk.reference))
    return found


@torch.no_grad()
def _frames(avatar: Avatar, talk: Talk, blocks: int, *, has_sink: bool) -> Iterator[np.ndarray]:
    """Frames (F, H, W, 3) in uint8, block by block."""
    causal, stream = avatar.causal, stream_of(avatar, talk)
    assert causal.audio is not None, "a face that talks hears"
    states, memory = [stream.new_state(step) for step in range(stream.steps)], stream.new_decoder()
    per_block, config = causal.options.frames, causal.audio.config
    levels_PC = talk.levels
    levels_PC = levels_PC.repeat(-(-blocks * per_block * config.per_latent // len(levels_PC)) + 1, 1)
    for block in range(blocks):
        if block == causal.options.window and not has_sink:
            _take_sinks(states)
        latents = range(block * per_block, (block + 1) * per_block)
        payload = stream.begin(block, (latent_tokens(levels_PC, latents, config)[None],))
        for state in states:
            payload = stream.step(state, block, payload)
        yield stream.decode(memory, payload).numpy()


def _take_sinks(states: Sequence[StepState]) -> None:
    """Not offered by the stream itself: nobody should want it."""
    for state in states:
        state.now, state.memory.has_sink = replace(state.now, sink=None), False


def rows(kept: Sequence[Colours], without: Sequence[Colours]) -> list[str]:
    """As Markdown: the beginning and the end of both."""
    tenth = max(1, len(kept) // 10)
    lines = [
        "| mean colour against the reference, 0 to 255 | with a sink, first tenth | last tenth | without, first tenth "
        "| last tenth |",
        "|---|---|---|---|---|",
    ]
    for name in kept[0]:
        ends = [part for found in (kept, without) for part in (found[:tenth], found[-tenth:])]
        cells = " | ".join(f"{np.mean([one[name] for one in end]):.1f}" for end in ends)
        lines.append(f"| {name} | {cells} |")
    return lines
