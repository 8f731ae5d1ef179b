"""The page on serving names every field of a request, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from patchpar.serving.image_request import EditRequest, GenerationRequest
from patchpar.serving.streams.stream_request import LiveStreamRequest, StreamControl
from patchpar.serving.video_request import VideoRequest

PAGE = (Path(__file__).parents[2] / "docs" / "howto" / "serve.md").read_text()
EDITS = {"strength", "input_fidelity"}
OF_ALL = {"model", "user"}
"""Fields that the table of images explains for streams too."""


def section(heading: str) -> str:
    return PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def words(text: str) -> set[str]:
    return set(re.findall(r"`(\w+)`", text))


def test_fields_of_images() -> None:
    table = "\n".join(re.findall(r"^\| (`.*?) \|", section("Requests"), re.MULTILINE))
    assert words(table) | {"strength"} == set(GenerationRequest.model_fields)
    assert set(EditRequest.model_fields) - set(GenerationRequest.model_fields) == {"input_fidelity"}
    assert words(section("Edits")) >= EDITS


def test_fields_of_videos() -> None:
    """Those of images, but for those that the page names, and some of their own."""
    (left_out,) = re.findall(r"Fields are those of images, without [^(]*\(([^)]*)\)", PAGE)
    shared = set(GenerationRequest.model_fields) - words(left_out)
    assert shared | {"seconds", "num_frames", "fps"} == set(VideoRequest.model_fields)


def test_fields_of_streams_and_their_controls() -> None:
    assert set(LiveStreamRequest.model_fields) - OF_ALL - {"audio"} <= words(section("Streams"))
    assert set(StreamControl.model_fields) - {"type"} <= words(section("Streams"))
