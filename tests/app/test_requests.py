"""What a person asks for is checked at once, in sentences; ways to share the work are plans that can be run."""

from __future__ import annotations

import wave
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from app import limits
from app.limits import read_audio_file, read_image
from app.presets import custom_preset, preset_named, presets_for
from app.requests import MAX_PROMPT, GenerateRequest
from patchpar import Plan, PlanError

GOOD: dict[str, Any] = {
    "prompt": "a fox", "negative": "", "height": 256.0, "width": 128, "steps": 20.0, "guidance": 3.5, "seed": 7.0
}  # fmt: skip


def test_an_request_becomes_the_pipeline_s_arguments() -> None:
    request = GenerateRequest.of(**GOOD)
    arguments = request.arguments(["prompt", "negative_prompt", "height", "width", "guidance_scale"])
    generator = arguments.pop("generator")
    assert arguments == {
        "prompt": "a fox",
        "height": 256,
        "width": 128,
        "guidance_scale": 3.5,
        "num_inference_steps": 20,
    }
    assert generator.initial_seed() == 7


def test_no_negative_prompt_is_an_empty_one() -> None:
    assert GenerateRequest.of(**GOOD | {"negative": None}).negative == ""


def test_a_pipeline_is_given_only_what_it_takes() -> None:
    assert set(GenerateRequest.of(**GOOD).arguments(["prompt"])) == {"prompt", "num_inference_steps", "generator"}


def test_a_negative_prompt_is_not_left_out_without_a_word() -> None:
    with pytest.raises(PlanError, match="this model takes no negative prompt: leave that field empty"):
        GenerateRequest.of(**GOOD | {"negative": "fog"}).arguments(["prompt"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": "  "}, "no prompt: describe the image"),
        ({"prompt": "x" * (MAX_PROMPT + 1)}, "1001 characters: at most 1000"),
        ({"negative": "x" * 2000}, "the negative prompt has 2000 characters"),
        ({"prompt": "a fox \ud83e"}, "the prompt has half a character at place 7: delete it"),
        ({"height": None}, "height is empty: fill it in"),
        ({"steps": 0}, "steps 0: it is a whole number from 1 to 150"),
        ({"steps": 2.5}, r"steps 2\.5: it is a whole number"),
        ({"seed": -1}, "seed -1"),
        ({"seed": float("nan")}, "seed nan"),
        ({"width": 10**6}, "width 1000000"),
        ({"width": 8192, "height": 8192}, "at most 16777216 in all"),
        ({"guidance": 51}, "guidance scale 51: it is a number from 0 to 50"),
        ({"guidance": float("nan")}, "guidance scale nan"),
    ],
)
def test_a_bad_request_is_a_sentence(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        GenerateRequest.of(**GOOD | changes)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_every_preset_is_a_plan_for_all_devices_or_for_one(count: int) -> None:
    presets = presets_for(count)
    assert len({preset.label for preset in presets}) == len(presets)
    for preset in presets:
        plan = preset.plan(count)
        assert plan == "auto" or (isinstance(plan, Plan) and plan.world_size in (1, count))
        assert preset.meaning
        assert preset_named(preset.label, count) is not None
    assert any("cfg=2" in preset.degrees for preset in presets) == (count % 2 == 0)


def test_a_preset_of_one_s_own() -> None:
    assert custom_preset(" ", "", 2) is None
    preset = custom_preset("", "fresh-edges:context=pooled", 2)
    assert preset is not None
    assert str(preset.plan(2)) == "patch=2,strategy=fresh-edges:context=pooled"
    for degrees, strategy, message in (
        ("patch=3", "", "takes 3 devices, but there are 2"),
        ("pach=2", "", "unknown axis 'pach'"),
        ("patch=2", "fresh", "unknown strategy 'fresh'"),
        ("auto", "pcpp", "needs a plan to go with"),
    ):
        with pytest.raises(PlanError, match=message):
            custom_preset(degrees, strategy, 2)
    with pytest.raises(PlanError, match="no preset 'x'"):
        preset_named("x", 2)


def test_images_that_are_uploaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = tmp_path / "a.png", tmp_path / "b.png"
    Image.new("RGBA", (30, 20)).save(good)
    assert (read_image(good).mode, read_image(good).size) == ("RGB", (30, 20))
    bad.write_bytes(b"GIF89a no image at all")
    with pytest.raises(PlanError, match="the file cannot be read as"):
        read_image(bad)
    monkeypatch.setattr(limits, "MAX_IMAGE_PIXELS", 599)
    with pytest.raises(PlanError, match="30 x 20 pixels"):
        read_image(good)
    monkeypatch.setattr(limits, "MAX_BYTES", 10)
    with pytest.raises(PlanError, match="the file has"):
        read_image(good)
    with pytest.raises(PlanError, match="no image: choose one"):
        read_image(None)


def test_a_photograph_is_upright(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned a quarter, clockwise
    Image.new("RGB", (30, 20)).save(path, exif=exif)
    assert read_image(path).size == (20, 30)


def audio(path: Path, seconds: float, rate: int = 8000) -> Path:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(np.full(round(seconds * rate), 16384, np.int16).tobytes())
    return path


def test_audio_that_does_not_declare_its_length_is_decoded_up_to_the_limit(tmp_path: Path) -> None:
    """A small file can hold days of silence."""
    path = tmp_path / "a.flac"
    with av.open(str(path), "w", format="flac") as container:
        stream = container.add_stream("flac", rate=8000, layout="mono")
        for _ in range(121):
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 8000), np.int16), format="s16", layout="mono")
            frame.sample_rate = 8000
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    data = bytearray(path.read_bytes())
    data[21:26] = bytes([data[21] & 0xF0, 0, 0, 0, 0])  # the number of samples, of STREAMINFO
    path.write_bytes(data)
    with pytest.raises(PlanError, match="is longer than 120 s: cut it there"):
        read_audio_file(path)


def test_audio_that_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples, rate = read_audio_file(audio(tmp_path / "a.wav", 0.5))
    assert (rate, len(samples) / rate) == (16000, pytest.approx(0.5, abs=0.01))
    assert float(samples[2000]) == pytest.approx(0.5, abs=0.01)
    with pytest.raises(PlanError, match="121 s: at most 120 s"):
        read_audio_file(audio(tmp_path / "long.wav", 121, rate=1000))
    with pytest.raises(PlanError, match="no audio"):
        read_audio_file(None)
    bad = tmp_path / "bad.wav"
    bad.write_bytes(b"no audio at all" * 100)
    with pytest.raises(PlanError, match=r"bad\.wav cannot be read as") as refused:
        read_audio_file(bad)
    assert str(tmp_path) not in str(refused.value)
    monkeypatch.setattr(limits, "MAX_UNKNOWN_BYTES", 10)
    with pytest.raises(PlanError, match="does not declare its length"):
        read_audio_file(bad)
