"""Blocks that attend to finished blocks: the published forward under a mask, on one rank and on several."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from patchpar.errors import PlanError, UnsupportedModel
from patchpar.models.streaming.config import CausalOptions, StreamConfig
from patchpar.models.streaming.decoder import WanDecoder
from patchpar.models.streaming.flow_schedule import FlowSchedule, keyed_noise
from patchpar.plan.stream_plan import StreamPlan
from patchpar.stream.causal.clean_history import CleanHistoryStream
from patchpar.stream.causal.pipeline import StreamingPipeline
from patchpar.stream.causal.runner import HISTORIES
from patchpar.stream.causal.wan import WanStream
from patchpar.stream.events import Prompt
from tests.breadth import first_of
from tests.stream.running import BLOCKS, Script, differing, pipelined, serial
from tests.stream.test_inner import apart, shared
from tests.stream.tiny import COLUMNS, FRAMES, ROWS, STREAM, begun_with, causal, run_of, speech, text, vae, write_folder

SEED, SHAPE = 7, (1, 16, FRAMES, ROWS, COLUMNS)
SCHEDULE = FlowSchedule.shifted(3, shift=5.0, sampler="renoise")
CHANGES = {2: (Prompt(text=text(1), transition="recache"),), 4: (Prompt(text=text(0), transition="blend", over=2),)}


def clean(kind: type[WanStream] = CleanHistoryStream, **options: Any) -> WanStream:
    run = run_of(seed=SEED, adapt_sink=False)
    return kind(causal(**options), SCHEDULE, WanDecoder(vae()), run, begun_with(text(0)))


@torch.no_grad()
def published(window: int, schedule: FlowSchedule = SCHEDULE, blocks: int = BLOCKS) -> list[Tensor]:
    """Self-Forcing (arXiv:2506.08009, algorithm 2): earlier blocks at timestep 0 beside the block that is denoised.

    One forward over all frames under a block-causal mask, with a timestep for each block and no cache.
    """
    net, done = causal(window=window), list[Tensor]()
    heard = torch.cat([speech(block) for block in range(blocks)], 1)
    for block in range(blocks):
        x = keyed_noise(SEED, block, 0, SHAPE)
        for step in range(schedule.steps):
            levels = torch.tensor([[0.0] * block + [schedule.timestep(step)]])
            audio = heard[:, : (block + 1) * FRAMES]
            velocity = net.banded(torch.cat([*done, x], 2), levels, text(0), audio_BFnC=audio)[:, :, -FRAMES:]
            noise = keyed_noise(SEED, block, step + 1, SHAPE) if schedule.needs_noise(step) else None
            x = schedule.advance(step, x, velocity, noise)
        done.append(x)
    return done


def furthest(found: list[Tensor], wanted: list[Tensor]) -> float:
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("positions", ["abs", "relative"])
@pytest.mark.parametrize("window", first_of([1, 2, 8], 2))
def test_it_is_the_published_forward(window: int, positions: Any) -> None:
    """Also in windows shorter than the stream, whose blocks were computed with those before them."""
    wanted = published(window)
    found = [latents for latents, _ in serial(clean(window=window, positions=positions), {})]
    assert furthest(found, wanted) < 1e-5
    if window > 1:
        others = [latents for latents, _ in serial(clean(WanStream, window=window, positions=positions), {})]
        assert furthest(others[:1], wanted[:1]) < 1e-5, "the first block has no history"
        assert furthest(others, wanted) > 1e-3, "the control: keys and values of each noise level"


def test_without_the_last_pass_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    predicted = CleanHistoryStream._predicted

    def noisy(stream: Any, state: Any, block: int, payload: Any, timestep: float, **options: Any) -> Tensor:
        if timestep == 0:
            return payload[0]
        return predicted(stream, state, block, payload, timestep, **options)

    monkeypatch.setattr(CleanHistoryStream, "_predicted", noisy)
    assert furthest([latents for latents, _ in serial(clean(), {})], published(3)) > 1e-3


@pytest.mark.parametrize("decode", ["last", "own"])
def test_on_ranks_it_is_the_stream_of_one_process(decode: Any) -> None:
    outcome, _ = pipelined(clean, StreamPlan(sizes=(1,), decode=decode), Script(CHANGES))
    assert differing(outcome, serial(clean(), CHANGES)) == []


def test_ranks_share_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not to the last bit: a matrix product of fewer rows may round otherwise."""
    monkeypatch.setattr("tests.stream.test_inner.stream", lambda steps, **options: clean(**options))
    outcome = shared(StreamPlan(sizes=(1,), inner=2, decode="own"), Script(CHANGES), heads=4)
    assert apart(outcome, serial(clean(heads=4), CHANGES)) < 1e-5


def test_a_change_of_the_prompt_computes_the_window_again_from_finished_blocks() -> None:
    """With the same text that changes nothing but rounding: the window holds the same blocks."""
    again = {3: (Prompt(text=text(0), transition="recache"),)}
    found, wanted = serial(clean(window=8), again), serial(clean(window=8), {})
    assert furthest([latents for latents, _ in found], [latents for latents, _ in wanted]) < 1e-5


def test_all_steps_of_a_block_are_one_step_of_the_plan() -> None:
    config = StreamConfig.of({**STREAM, "blocks": {**STREAM["blocks"], "history": "clean"}})
    assert (config.steps, config.pipeline_steps) == (2, 1)
    assert StreamConfig.of(STREAM).pipeline_steps == 2


@pytest.mark.parametrize("history", HISTORIES)
def test_passes_of_a_block_are_those_of_the_forecast(history: Any) -> None:
    """T of its steps, and 1 for clean keys and values, or one for each block of a window that is computed anew."""
    window, passes = 3, list[int]()
    made = clean(HISTORIES[history], window=window, history=history)
    made._network.transformer.blocks[0].register_forward_pre_hook(lambda *_: passes.append(0))
    at = list[int]()
    states, decoder = [made.new_state(step) for step in range(made.steps)], made.new_decoder()
    for block in range(BLOCKS):
        payload = made.begin(block, (speech(block),))
        for state in states:
            payload = made.step(state, block, payload)
        made.decode(decoder, payload)
        at.append(len(passes))
    options = CausalOptions(frames=FRAMES, window=window, history=history)
    assert at[-1] - at[-2] == SCHEDULE.steps + options.extra_passes
    assert options.extra_passes == {"noisy": 0, "clean": 1, "recompute": window - 1}[history]


def test_bad_histories() -> None:
    with pytest.raises(PlanError, match="history='recent': use 'noisy' or 'clean'"):
        CausalOptions(history="recent")  # type: ignore[arg-type]
    network = causal()
    with pytest.raises(UnsupportedModel, match=r"this model has two transformers: use history='noisy'"):
        CleanHistoryStream(network, SCHEDULE, None, run_of(), begun_with(text(0)), (1, network))


def test_a_folder_is_streamed_so(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    facts = {**STREAM, "adapt_sink": False, "blocks": {**STREAM["blocks"], "history": "clean"}}
    (folder / "stream.json").write_text(json.dumps(facts))
    clean_frames = frames_of(folder)
    noisy_frames = frames_of(folder, config=StreamConfig.of(STREAM))
    assert clean_frames.shape == noisy_frames.shape
    assert not torch.equal(clean_frames, noisy_frames)
    message = r"the plan has 2 steps, but a block of this model is one step.*history='clean'"
    with pytest.raises(PlanError, match=message):
        StreamingPipeline.from_pretrained(folder, devices="cpu", plan=StreamPlan.even(2, 1))


def frames_of(folder: Path, **options: Any) -> Tensor:
    with (
        StreamingPipeline.from_pretrained(folder, devices="cpu", **options) as pipe,
        pipe.stream("a fox", seconds=0.5, seed=SEED) as stream,
    ):
        return torch.cat([chunk.frames for chunk in stream])
