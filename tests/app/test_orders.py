"""What a person asks for is checked at once, in sentences; ways to share the work are plans that can be run."""

from __future__ import annotations

import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from app import limits
from app.limits import picture_from, sound_from
from app.orders import LONGEST_PROMPT, GenerateRequest
from app.ways import own_way, way_named, ways_for
from patchpar import Plan, PlanError

GOOD: dict[str, Any] = {
    "prompt": "a fox", "negative": "", "height": 256.0, "width": 128, "steps": 20.0, "guidance": 3.5, "seed": 7.0
}  # fmt: skip


def test_an_order_becomes_the_pipeline_s_arguments() -> None:
    order = GenerateRequest.of(**GOOD)
    arguments = order.arguments(["prompt", "negative_prompt", "height", "width", "guidance_scale"])
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


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"prompt": "  "}, "no prompt: say what to draw"),
        ({"prompt": "x" * (LONGEST_PROMPT + 1)}, "1001 characters: at most 1000"),
        ({"negative": "x" * 2000}, "the negative prompt has 2000 characters"),
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
def test_a_bad_order_is_a_sentence(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        GenerateRequest.of(**GOOD | changes)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_every_way_is_a_plan_for_all_devices_or_for_one(count: int) -> None:
    ways = ways_for(count)
    assert len({way.label for way in ways}) == len(ways)
    for way in ways:
        plan = way.plan(count)
        assert plan == "auto" or (isinstance(plan, Plan) and plan.world_size in (1, count))
        assert way.means
        assert way_named(way.label, count) is not None
    assert any("cfg=2" in way.degrees for way in ways) == (count % 2 == 0)


def test_a_way_of_one_s_own() -> None:
    assert own_way(" ", "", 2) is None
    way = own_way("", "fresh-edges:context=pooled", 2)
    assert way is not None
    assert str(way.plan(2)) == "patch=2,strategy=fresh-edges:context=pooled"
    for degrees, strategy, said in (
        ("patch=3", "", "takes 3 devices, but there are 2"),
        ("pach=2", "", "unknown axis 'pach'"),
        ("patch=2", "fresh", "unknown strategy 'fresh'"),
        ("auto", "pcpp", "needs a plan to go with"),
    ):
        with pytest.raises(PlanError, match=said):
            own_way(degrees, strategy, 2)
    with pytest.raises(PlanError, match="no way called 'x'"):
        way_named("x", 2)


def test_pictures_that_are_uploaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = tmp_path / "a.png", tmp_path / "b.png"
    Image.new("RGBA", (30, 20)).save(good)
    assert (picture_from(good).mode, picture_from(good).size) == ("RGB", (30, 20))
    bad.write_bytes(b"GIF89a no picture at all")
    with pytest.raises(PlanError, match="the file cannot be read as a picture: use PNG"):
        picture_from(bad)
    monkeypatch.setattr(limits, "MOST_PICTURE_PIXELS", 599)
    with pytest.raises(PlanError, match="30 x 20 pixels"):
        picture_from(good)
    monkeypatch.setattr(limits, "MOST_BYTES", 10)
    with pytest.raises(PlanError, match="the file has"):
        picture_from(good)
    with pytest.raises(PlanError, match="no picture: choose one"):
        picture_from(None)


def test_a_photograph_is_upright(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned a quarter, clockwise
    Image.new("RGB", (30, 20)).save(path, exif=exif)
    assert picture_from(path).size == (20, 30)


def sound(path: Path, seconds: float, rate: int = 8000) -> Path:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(np.full(round(seconds * rate), 16384, np.int16).tobytes())
    return path


def test_sound_that_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples, rate = sound_from(sound(tmp_path / "a.wav", 0.5))
    assert (rate, len(samples) / rate) == (16000, pytest.approx(0.5, abs=0.01))
    assert float(samples[2000]) == pytest.approx(0.5, abs=0.01)
    with pytest.raises(PlanError, match="121 s: at most 120 s"):
        sound_from(sound(tmp_path / "long.wav", 121, rate=1000))
    with pytest.raises(PlanError, match="no sound"):
        sound_from(None)
    bad = tmp_path / "bad.wav"
    bad.write_bytes(b"no sound at all" * 100)
    with pytest.raises(PlanError, match=r"bad\.wav cannot be read as sound") as refused:
        sound_from(bad)
    assert str(tmp_path) not in str(refused.value)
    monkeypatch.setattr(limits, "MOST_UNKNOWN_BYTES", 10)
    with pytest.raises(PlanError, match="does not say how long it is"):
        sound_from(bad)
