"""The avatar in the package: it is small, its mouth follows the sound, and ranks stream what one process would."""

from __future__ import annotations

import random
import wave

import numpy as np
import pytest
import torch
from PIL import Image

from patchpar import PlanError, StreamConfig, StreamingPipeline
from patchpar.models.files import embedded_model
from patchpar.models.streaming.decoder import WanDecoder, WanEncoder, as_pixels, from_pixels
from training.evaluate_face import Avatar, Talk, frames_of, held_out_talk, packaged_avatar
from training.face_data import openings, prompt_of
from training.face_measure import correlation, identity_error, mouth_opening
from training.faces import Pose, render_face, sample_identity
from training.package import LIMIT_BYTES
from training.package_face import FACE_FOLDER, REFERENCE, STREAM
from training.speech import RATE

SECONDS = 3.0
LAGS = range(-2, 3)


@pytest.fixture(scope="module")
def avatar() -> Avatar:
    return packaged_avatar()


@pytest.fixture(scope="module")
def talk() -> Talk:
    return held_out_talk(1, SECONDS)


@pytest.fixture(scope="module")
def frames(avatar: Avatar, talk: Talk) -> np.ndarray:
    return frames_of(avatar, talk, talk.levels)


def test_it_is_small_and_streams_as_the_code_says() -> None:
    files = [path for path in FACE_FOLDER.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= LIMIT_BYTES
    assert {path.suffix for path in files} <= {".json", ".txt", ".safetensors", ".png", ".wav"}
    assert StreamConfig.load(FACE_FOLDER) == STREAM
    assert embedded_model("embedded-face") == FACE_FOLDER


def test_there_is_speech_to_try_it_with() -> None:
    with wave.open(str(FACE_FOLDER / "speech.wav")) as file:
        assert (file.getnchannels(), file.getframerate()) == (1, RATE)
        samples = np.frombuffer(file.readframes(file.getnframes()), np.int16)
    assert 5 <= len(samples) / RATE <= 10
    assert np.abs(samples).max() > 3000


def test_each_frame_of_a_video_is_encoded_as_well_as_the_first(avatar: Avatar) -> None:
    """So that it can be streamed from a video."""
    decoder = WanDecoder(avatar.vae)
    encoder, state = WanEncoder(decoder), decoder.new_state()
    face = np.asarray(Image.open(FACE_FOLDER / REFERENCE).convert("RGB").resize((STREAM.width, STREAM.height)))
    images = from_pixels(torch.from_numpy(face.copy())[None]).expand(3, -1, -1, -1)
    with torch.no_grad():
        blocks = [encoder.encode(images, 3) for _ in range(2)]
        displayed = np.concatenate([as_pixels(decoder.decode(state, block)).numpy() for block in blocks])
    assert torch.equal(*blocks)
    assert torch.equal(blocks[0][:, :, :1], decoder.encode(images[:1]))
    assert np.abs(displayed.astype(int) - face).mean((1, 2, 3)).max() < 5


@pytest.mark.breadth  # of weights, which seldom change
def test_the_mouth_follows_the_audio_and_no_other(avatar: Avatar, talk: Talk, frames: np.ndarray) -> None:
    wanted = openings(talk.levels).numpy()[: len(frames)]
    by_lag = {lag: correlation(mouth_opening(frames), wanted, lag) for lag in LAGS}
    assert by_lag[0] >= 0.8
    assert max(by_lag, key=lambda lag: by_lag[lag]) == 0
    shuffled = talk.levels[np.random.default_rng(0).permutation(len(talk.levels))]
    assert correlation(mouth_opening(frames_of(avatar, talk, shuffled)), wanted) <= 0.2


@pytest.mark.breadth  # of weights, which seldom change
def test_it_has_the_looks_of_the_reference_and_of_nobody_else(talk: Talk, frames: np.ndarray) -> None:
    own = identity_error(frames[len(frames) // 2 :], talk.reference)
    assert max(own.values()) <= 12
    other = render_face(sample_identity(random.Random("somebody else")), Pose(), side=STREAM.height)
    assert sum(identity_error(frames, other).values()) > 3 * sum(own.values())


@pytest.mark.breadth  # tests/stream has ranks that stream a tiny model
def test_ranks_stream_what_one_process_does(avatar: Avatar, talk: Talk) -> None:
    samples = talk.samples[: RATE // 2]
    with StreamingPipeline.from_pretrained("embedded-face", devices=2) as pipe:
        options = {"seed": talk.seed, "audio": (samples, RATE)}
        with pipe.stream(prompt_of(talk.mood), reference=talk.reference, **options) as session:
            found = np.concatenate([chunk.frames for chunk in session])
        with pipe.stream(prompt_of(talk.mood), **options) as session:
            by_itself = np.concatenate([chunk.frames for chunk in session])
    want = frames_of(avatar, talk, talk.levels)
    assert len(found) >= 6
    assert np.array_equal(found[:6], want[:6])
    displayed = render_face(sample_identity(random.Random("packaged face")), Pose(), side=STREAM.height)
    assert max(identity_error(by_itself, displayed).values()) < max(identity_error(by_itself, talk.reference).values())


def test_a_reference_lies_in_the_folder() -> None:
    with pytest.raises(PlanError, match=r"\.\./face\.png.*name of a file"):
        StreamConfig(sigmas=(1.0, 0.0), fps=16, height=96, width=96, reference="../face.png")
