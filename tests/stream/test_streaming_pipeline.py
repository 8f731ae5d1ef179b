"""A folder, prompts, an image and sound in; the very frames of one process out, however the steps are spread."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanPipeline
from PIL import Image
from torch import Tensor

from patchpar.errors import LaunchError, PlanError
from patchpar.models.speech.parts import align_weights
from patchpar.models.streaming.causal.audio_conditioner import AudioConditioner, audio_levels, latent_tokens
from patchpar.models.streaming.causal.causal_wan import CausalWan
from patchpar.models.streaming.config import StreamConfig
from patchpar.models.streaming.decoder import WanDecoder, from_pixels
from patchpar.plan.stream_plan import StreamPlan
from patchpar.stream.causal import wan
from patchpar.stream.causal.pipeline import StreamingPipeline
from patchpar.stream.causal.wan import WanStream
from patchpar.stream.delivery import StreamDelivery
from patchpar.stream.events import Change, Parameter, Prompt, Reference
from tests.stream.tiny import AUDIO, COLUMNS, FRAMES, ROWS, TEXT, begun_with, run_of, write_folder
from tests.tensors import noise

BLOCKS = 6
SPEECH = noise(2000, seed=9) * 0.3  # one second: 20 frames, in blocks of 3, 4, 4, 4, 4 and 4
FACE = (noise(2 * ROWS, 2 * COLUMNS, 3, seed=8) * 60 + 128).clamp(0, 255).to(torch.uint8)


@torch.no_grad()
def plain(face_folder: Path, changes: dict[int, list[Any]], seed: int = 3) -> list[Tensor]:
    """Frames by block, from one loop over blocks and steps. A text stands for a switch to that prompt."""
    pipe, config = WanPipeline.from_pretrained(face_folder), StreamConfig.load(face_folder)
    align_weights(pipe.transformer)  # as of a stream: products round otherwise where weights lie otherwise
    network = CausalWan(pipe.transformer.eval(), config.blocks, AudioConditioner.load(face_folder / "transformer"))
    decoder = WanDecoder(pipe.vae)

    def change(update: Any) -> Change:
        if not isinstance(update, str):
            return update
        text, _ = pipe.encode_prompt(update, do_classifier_free_guidance=False, max_sequence_length=TEXT)
        return Prompt(text=text)

    text = torch.zeros(1, TEXT, pipe.transformer.config.text_dim)
    model = WanStream(network, config.schedule, decoder, run_of(seed=seed), begun_with(text))
    states = [model.new_state(step) for step in range(config.steps)]
    levels = audio_levels(torch.cat([SPEECH, torch.zeros(1000)]), AUDIO)
    memory, frames, first = model.new_decoder(), [], None
    for block in range(BLOCKS):
        due = [change(update) for update in changes.get(block, [])]
        if block == 0:
            due.append(Reference(latents=decoder.encode(from_pixels(FACE[None]))))
        if block == config.steps:
            assert first is not None
            due.insert(0, Reference(latents=first))
        payload = model.begin(block, (latent_tokens(levels, range(block * FRAMES, (block + 1) * FRAMES), AUDIO)[None],))
        for state in states:
            for each in due:
                model.apply(state, each)
            payload = model.step(state, block, payload)
        first = payload[0][:, :, :1] if block == 0 else first
        frames.append(model.decode(memory, payload))
    return frames


def differing(found: list[Any], wanted: list[Tensor]) -> list[int]:
    assert len(found) == len(wanted)
    return [chunk.block for chunk, frames in zip(found, wanted, strict=True) if not torch.equal(chunk.frames, frames)]


@pytest.mark.parametrize("which", ["one", "three"])
def test_the_frames_of_one_loop(which: str, face_folder: Path, request: pytest.FixtureRequest) -> None:
    pipe: StreamingPipeline = request.getfixturevalue(which)
    with pipe.stream("a fox", reference=FACE, audio=(SPEECH, 2000), seed=3) as stream:
        stream.set_prompt("a hen", at=3)
        stream.set_param("audio_scale", 2.0, at=4)
        chunks = list(stream)
    wanted = plain(face_folder, {0: ["a fox"], 3: ["a hen"], 4: [Parameter(name="audio_scale", value=2.0)]})
    assert differing(chunks, wanted) == []
    assert differing(chunks, plain(face_folder, {0: ["a fox"]})) == [3, 4, 5]
    assert differing(chunks, plain(face_folder, {0: ["a fox"]}, seed=4)) == list(range(6))
    assert [one.blocks for one in stream.figures] == [BLOCKS] * pipe.plan.ranks


def test_the_decoder_s_values_are_those_of_one_loop(
    one: StreamingPipeline, face_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit, and not only after rounding to pixels, which one such bit changes in a rare one."""
    monkeypatch.setattr(wan, "as_pixels", lambda images_FCHW: images_FCHW.permute(0, 2, 3, 1).clone())
    with one.stream("a fox", reference=FACE, audio=(SPEECH, 2000), seed=3) as stream:
        chunks = list(stream)
    assert all(chunk.frames.is_floating_point() for chunk in chunks)
    assert differing(chunks, plain(face_folder, {0: ["a fox"]})) == []


def test_live_audio_and_a_pause_change_nothing(three: StreamingPipeline, face_folder: Path) -> None:
    with three.stream("a fox", reference=Image.fromarray(FACE.numpy()), audio="live", seed=3) as stream:
        for piece in SPEECH.split(300):
            stream.push_audio(piece, 2000)
        chunks = [next(stream)]
        stream.pause()
        stream.end_audio()
        stream.resume()
        chunks += list(stream)
    assert differing(chunks, plain(face_folder, {0: ["a fox"]})) == []


def test_streams_follow_one_another_on_the_same_ranks(three: StreamingPipeline) -> None:
    """Also after one that was cancelled in the middle: nothing of it is left in any rank or on its way."""
    runs = []
    for _ in range(2):
        with three.stream(seed=5, seconds=0.5) as stream:
            runs.append(list(stream))
        with three.stream(seed=6) as stream:
            next(stream)
            with pytest.raises(PlanError, match="a stream is running"):
                three.stream()
        assert stream.status == "cancelled"
    assert [chunk.block for chunk in runs[0]] == [0, 1, 2]
    assert differing(runs[1], [chunk.frames for chunk in runs[0]]) == []


@pytest.mark.breadth
def test_a_worker_that_dies_is_replaced_and_the_stream_goes_on(face_folder: Path) -> None:
    with (
        StreamingPipeline.from_pretrained(face_folder, devices="cpu:2", deadline=30) as two,
        two.stream(seed=5, seconds=1.9, delivery=StreamDelivery(lead=1)) as stream,
    ):
        before = [next(stream) for _ in range(3)]
        os.kill(two._workers.pids[1], signal.SIGKILL)
        after = list(stream)
    assert [chunk.block for chunk in before + after] == list(range(10))
    assert [chunk.epoch for chunk in before] == [0, 0, 0]
    assert after[-1].epoch == 1
    assert stream.status == "finished"
    assert [len(chunk.frames) for chunk in after] == [4] * 7


@pytest.mark.parametrize("devices", ["ray:1", "ray:3"])
def test_ranks_of_a_stream_are_on_this_machine(devices: str, face_folder: Path) -> None:
    with pytest.raises(LaunchError, match=f"devices='{devices}': this needs devices of this machine"):
        StreamingPipeline.from_pretrained(face_folder, devices=devices)


def test_a_size_of_no_whole_latents_is_refused(tmp_path: Path) -> None:
    """It would be made smaller by the autoencoder, and no reference would fit."""
    folder = write_folder(tmp_path, hears=False)
    config = replace(StreamConfig.load(folder), height=2 * ROWS + 1)
    message = f"height={2 * ROWS + 1} is no multiple of 2, the model's grid: use {2 * ROWS} or"
    with (
        StreamingPipeline.from_pretrained(folder, devices="cpu", config=config) as pipe,
        pytest.raises(PlanError, match=message),
    ):
        pipe.stream(seconds=0.3)


def test_a_stream_can_be_streamed_without_audio(tmp_path: Path) -> None:
    with StreamingPipeline.from_pretrained(write_folder(tmp_path, hears=False), devices="cpu") as pipe:
        with pytest.raises(PlanError, match="takes no audio"):
            pipe.stream(audio="live")
        with pipe.stream(seconds=0.3) as stream:
            assert sum(len(chunk.frames) for chunk in stream) == 7
            assert all(chunk.audio is None for chunk in stream)


def test_a_rate_that_a_model_was_not_made_for_is_said(tmp_path: Path) -> None:
    with (
        StreamingPipeline.from_pretrained(write_folder(tmp_path, hears=False), devices="cpu") as pipe,
        pytest.warns(UserWarning, match="fps=25: this model was trained for 20"),
        pipe.stream(seconds=0.2, delivery=StreamDelivery(fps=25)) as stream,
    ):
        assert [chunk.pts for chunk in stream] == [0, 3 / 25]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seed": -1}, "seed=-1"),
        ({"seconds": 0}, "seconds=0"),
        ({"audio": 3}, r"\(samples, rate\)"),
        ({"audio": "speech.wav"}, "there is no such audio file"),
        ({"delivery": StreamDelivery(fps=12)}, "fps=12, but this model takes audio for 20 frames a second"),
        ({"delivery": StreamDelivery(record="no/such/folder/a.jsonl")}, "cannot be written"),
        ({"reference": "face.png"}, "face.png cannot be read as an image"),
        ({"reference": torch.zeros(5, 5, 3)}, "in torch.float32"),
        ({"audio": (torch.zeros(5, dtype=torch.int16), 2000)}, "int16"),
    ],
)
def test_what_cannot_be_streamed(one: StreamingPipeline, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        one.stream(**arguments)


def test_what_cannot_be_loaded(face_folder: Path, tmp_path: Path) -> None:
    make = StreamingPipeline.from_pretrained
    with pytest.raises(PlanError, match=r"no model_index\.json"):
        make(tmp_path)
    with pytest.raises(PlanError, match="3 steps, but the model has 2"):
        make(face_folder, plan=StreamPlan.even(3, 1))
    with pytest.raises(PlanError, match="needs 3 ranks, but there are 1 devices"):
        make(face_folder, devices="cpu", plan=StreamPlan.even(2, 3))
    with pytest.raises(PlanError, match="needs 5 ranks, but there are 4 devices"):
        make(face_folder, devices="cpu:4", plan=StreamPlan.even(2, 5))
    closed = make(face_folder, devices="cpu")
    closed.close()
    with pytest.raises(PlanError, match="closed"):
        closed.stream()


def test_two_transformers_without_a_boundary_are_refused(tmp_path: Path) -> None:
    path = write_folder(tmp_path)
    index = json.loads((path / "model_index.json").read_text())
    other = {"transformer_2": ["diffusers", "WanTransformer3DModel"]}
    (path / "model_index.json").write_text(json.dumps(index | other))
    with pytest.raises(PlanError, match="no boundary_ratio"):
        StreamingPipeline.from_pretrained(path, devices="cpu")


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        (None, r"no stream\.json"),
        ("nonsense", "is not valid JSON"),
        ({"sigmas": [1, 0]}, "incomplete"),
        ({"sigmas": [1, 0], "fps": 0, "height": 1, "width": 1}, "fps=0"),
        ({"sigmas": [1, 0], "colour": 1}, "unknown fields colour"),
        ({"sigmas": [1, 0], "blocks": {"size": 1}}, "cannot be read"),
    ],
)
def test_a_file_that_says_nothing_of_use(tmp_path: Path, facts: Any, message: str) -> None:
    if facts is not None:
        (tmp_path / "stream.json").write_text(facts if isinstance(facts, str) else json.dumps(facts))
    with pytest.raises(PlanError, match=message):
        StreamConfig.load(tmp_path)
