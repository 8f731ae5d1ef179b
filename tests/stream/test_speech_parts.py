"""The parts of Wan-S2V, each against a forward of its own; audio in blocks has the bits of the whole."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from patchpar.errors import PlanError, UnsupportedModel
from patchpar.models.speech.config import REACH, SpeechConfig
from patchpar.models.speech.features import SpeechFeatures
from patchpar.models.speech.frame_packer import packed_grids
from patchpar.models.speech.parts import SpeechParts
from patchpar.stream.audio_track import AudioTrack
from tests.stream.reference_speech import ReferenceSpeech
from tests.stream.tiny_speech import (
    AFTER,
    COLUMNS,
    DIM,
    FEATURES,
    HEADS,
    LAYERS,
    ROWS,
    samples,
    speech_weights,
    wav2vec2,
)
from tests.tensors import noise, relative

CONFIG = SpeechConfig(dim=DIM, heads=HEADS, after=AFTER, layers=LAYERS, features=FEATURES)
EPSILON = 1e-6


def parts(config: SpeechConfig = CONFIG) -> SpeechParts:
    made = SpeechParts(config)
    made.load_state_dict(speech_weights())
    return made.eval().requires_grad_(False)


def reference() -> ReferenceSpeech:
    return ReferenceSpeech({"blocks.0": torch.empty(0), **speech_weights()}, HEADS, AFTER)


def states(images: int) -> Tensor:
    return noise(1, LAYERS, FEATURES, images, seed=4)


def test_audio_tokens_are_those_of_padded_sequences() -> None:
    features = states(12)
    local, whole = reference().audio(features[0])
    found = parts().casual_audio_encoder(features)
    assert found.shape == (1, 3, 6, DIM)
    assert relative(found[0, :, :-1], local) < EPSILON
    assert relative(found[0, :, -1], whole) < EPSILON


@pytest.mark.parametrize("blocks", [[12, 12, 12], [4, 24, 8]])
def test_chunks_have_the_bits_of_the_whole(blocks: list[int]) -> None:
    encoder, features = parts().casual_audio_encoder, states(36)
    before, found = features[..., :1].expand(1, LAYERS, FEATURES, REACH), []
    for chunk in features.split(blocks, -1):
        found.append(encoder(chunk, before))
        before = torch.cat([before, chunk], -1)[..., -REACH:]
    assert torch.equal(torch.cat(found, 1), encoder(features))
    local, _ = reference().audio(features[0])
    assert relative(encoder(features)[0, :, :-1], local) < EPSILON
    apart = [encoder(chunk) for chunk in features.split(blocks, -1)]  # without the state
    assert not torch.equal(torch.cat(apart, 1), encoder(features))


def test_audio_tokens_depend_on_no_later_image() -> None:
    encoder, features = parts().casual_audio_encoder, states(12)
    changed = features.clone()
    changed[..., 8:] += 1
    one, other = encoder(features), encoder(changed)
    assert torch.equal(one[:, :2], other[:, :2])
    assert not torch.equal(one[:, 2], other[:, 2])


def test_learnt_weights_of_layers_matter() -> None:
    made, features = parts().casual_audio_encoder, states(12)
    before = made(features)
    made.weights[0, 1] += 1
    assert relative(made(features), before) > 1e-2


@pytest.mark.parametrize("layer", AFTER)
def test_attention_to_audio(layer: int) -> None:
    made, oracle = parts(), reference()
    hidden, audio = noise(1, 3 * 5, DIM), made.casual_audio_encoder(states(12))
    local, whole = oracle.audio(states(12)[0])
    wanted = oracle.injected(AFTER.index(layer), hidden[0], local, whole)
    assert relative(made(layer, hidden, audio)[0], wanted) < EPSILON
    swapped = audio.clone()
    swapped[:, :, -1] = audio[:, :, -1].flip(1)  # another global token: the adaptive norm
    assert relative(made(layer, hidden, swapped)[0], wanted) > 1e-3


def test_earlier_frames_are_packed_the_coarser_the_older() -> None:
    made, latents = parts(), noise(1, 16, 19, ROWS, COLUMNS)
    wanted, turns = reference().packed(latents[0], DIM // HEADS)
    assert relative(made.frame_packer(latents)[0], wanted) < EPSILON
    grids = packed_grids(ROWS, COLUMNS)
    assert sum(grid.tokens for grid in grids) == len(wanted) == len(turns)
    assert [grid.times for grid in grids] == [(-1,), (-3,), (-19, -14, -9, -4)]
    assert [(grid.rows, grid.columns) for grid in grids[1:]] == [((0, 3), (0, 2, 4, 7)), ((0,), (0, 7))]
    fewer = made.frame_packer(latents[:, :, -3:])
    assert torch.equal(fewer[:, : 4 * 8 + 2 * 4], made.frame_packer(latents)[:, : 4 * 8 + 2 * 4])


def test_the_published_size_has_the_tokens_of_the_paper_s_code() -> None:
    assert [grid.tokens for grid in packed_grids(90, 50)] == [1125, 264, 264]
    with pytest.raises(PlanError, match="latents of 4 x 50: this model packs patches of 8 x 8"):
        packed_grids(4, 50)


def test_pose() -> None:
    made = parts()
    patches, pose = noise(1, DIM, 3, 4, 8), noise(1, 16, 3, ROWS, COLUMNS)
    zero = made.posed(patches, torch.zeros_like(pose))
    assert torch.equal(made.posed(patches), zero)
    assert relative(made.posed(patches, pose) - zero, made.cond_encoder(pose) - made.cond_encoder(0 * pose)) < EPSILON


def per_image(model: Any, audio: Tensor, images: int, fps: float) -> np.ndarray[Any, Any]:
    """wav2vec2's hidden states, at 30 a second on a straight line between both ends, then the nearest."""
    x = audio.numpy().astype(np.float64)
    x = torch.from_numpy((x - x.mean()) / np.sqrt(x.var() + 1e-7)).float()
    with torch.no_grad():
        hidden = torch.cat(model(x[None], output_hidden_states=True).hidden_states).numpy()
    count = int(hidden.shape[1] / 50 * 30)
    at = np.linspace(0, hidden.shape[1] - 1, count)
    between = np.stack([[np.interp(at, range(len(row)), row) for row in layer.T] for layer in hidden])
    return between[..., [min(count - 1, round(image / fps * 30)) for image in range(images)]]


@pytest.mark.parametrize("fps", [25.0, 16.0])
def test_features_of_images(fps: float) -> None:
    model, images = wav2vec2(), 30
    audio = samples(images / fps)
    found = SpeechFeatures(model.wav2vec2)(audio, images, fps)
    wanted = torch.from_numpy(per_image(model, audio, images, fps))
    assert found.shape == (LAYERS, FEATURES, images)
    assert relative(found, wanted) < 1e-5
    assert relative(SpeechFeatures(model.wav2vec2, normalises=False)(audio, images, fps), wanted) > 1e-3


def test_the_audio_of_blocks() -> None:
    """Block 0 has 9 images, those after it 12; before the stream there is silence."""
    config = dataclasses.replace(CONFIG, context=20)
    audio = torch.arange(1, 33 * 640 + 1, dtype=torch.float32) / 2**20
    track = AudioTrack(config, 3)
    for piece in audio.split(5000):
        track.push(piece, 16000)
    whole = torch.cat([torch.zeros(23 * 640), audio])
    for block, end in enumerate((9, 21, 33)):
        assert track.is_here(block)
        inputs, heard = track.take(block)
        assert inputs.shape == config.shape(3) == (1, 32, 640)
        assert torch.equal(inputs.flatten(), whole[(end - 9) * 640 : (end + 23) * 640])
        assert torch.equal(heard, audio[max(0, end - 12) * 640 : end * 640])
    assert not track.is_here(3)


def test_convolutions_begin_anew_with_each_block_or_continue() -> None:
    anew, continuing = parts(), parts(dataclasses.replace(CONFIG, continues=True))
    anew.features = continuing.features = SpeechFeatures(wav2vec2().wav2vec2)
    inputs = samples(62 / 25).view(1, 62, 640)
    features = anew.features(inputs.flatten(), 62, 25.0)
    local, _ = reference().audio(features[..., 50:])
    assert relative(anew.heard(inputs)[0, :, :-1], local) < EPSILON
    local, _ = reference().audio(features[..., 42:])
    assert relative(continuing.heard(inputs)[0, :, :-1], local[-3:]) < EPSILON


def test_saved_parts_are_loaded(tmp_path: Path) -> None:
    made = parts()
    made.save(tmp_path)
    loaded = SpeechParts.load(tmp_path)
    assert loaded.config == made.config
    assert all(torch.equal(x, y) for x, y in zip(loaded.parameters(), made.parameters(), strict=True))
    (tmp_path / "speech.json").write_text((tmp_path / "speech.json").read_text().replace('"tokens": 4', '"tokens": 3'))
    with pytest.raises(PlanError, match=r"speech.json and speech.safetensors are not those of one model"):
        SpeechParts.load(tmp_path)


def test_bad_configurations_are_refused() -> None:
    for bad, message in (
        ({"fps": 24}, r"fps=24: it must divide the rate of 16000"),
        ({"dim": 20}, r"dim=20 is no multiple of 4 \* heads = 8"),
        ({"after": (0, 0)}, r"after=\(0, 0\): it must be indices of different blocks"),
        ({"context": 4, "continues": True}, r"continues=True: .* needs context=8 or more"),
        ({"layers": 0}, r"layers=0: it must be a whole number"),
    ):
        with pytest.raises(PlanError, match=message):
            dataclasses.replace(CONFIG, **bad)  # type: ignore[arg-type]


def test_another_wav2vec2_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"has no config.json: copy the folder of the wav2vec2 model"):
        SpeechFeatures.load(tmp_path, rate=16000, layers=LAYERS, features=FEATURES)
    wav2vec2().save_pretrained(tmp_path)
    assert SpeechFeatures.load(tmp_path, rate=16000, layers=LAYERS, features=FEATURES).normalises
    with pytest.raises(UnsupportedModel, match=r"3 hidden states of width 16, but .* 25 of width 1024"):
        SpeechFeatures.load(tmp_path, rate=16000, layers=25, features=1024)
    (tmp_path / "preprocessor_config.json").write_text('{"sampling_rate": 8000}')
    with pytest.raises(UnsupportedModel, match="hears 8000 samples per second, and the model was trained with 16000"):
        SpeechFeatures.load(tmp_path, rate=16000, layers=LAYERS, features=FEATURES)
    (tmp_path / "config.json").write_text('{"model_type": "wav2vec2", "conv_dim": 3}')
    with pytest.raises(PlanError, match="cannot be loaded as a wav2vec2 model"):
        SpeechFeatures.load(tmp_path, rate=16000, layers=LAYERS, features=FEATURES)
