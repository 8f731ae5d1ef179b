"""A small file that says it is a large image costs the page's process next to nothing, whichever way it comes."""

from __future__ import annotations

import base64
import io
import re
import struct
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import gradio as gr
import pytest
from fastapi.testclient import TestClient
from gradio.data_classes import ImageData
from PIL import Image

from app.limits import MAX_IMAGE_PIXELS, bytes_of, read_image
from app.page import build
from app.state import AppState
from patchpar import PlanError
from tests.media.test_image_file import huge_png

from .app_states import client_of, state_of

SIDE = 30_000
"""Pixels of each side: 2.7 GB, decoded."""
WEBP_SIDE = 2**14
"""The most that WebP's own decoder takes; 1 GiB."""
MOST = 32 * 2**20
"""Bytes that all ways together may take."""


def peak_of(do: Callable[[], object]) -> int:
    """Bytes of memory that this process takes meanwhile, above what it has before."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what there is now
    before = _status("VmRSS")
    do()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def encoded(kind: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (16, 16)).save(stream, kind, **options)
    return stream.getvalue()


def png(folder: Path) -> bytes:
    return huge_png(folder / "huge.png", SIDE).read_bytes()


def png_below_pillow_s_own_limit(folder: Path) -> bytes:
    return huge_png(folder / "huge.png", 9_400).read_bytes()


def jpeg(folder: Path) -> bytes:
    small = encoded("JPEG")
    offset = small.index(b"\xff\xc0") + 5  # of the sides, in the header of the frame
    return small[:offset] + struct.pack(">HH", SIDE, SIDE) + small[offset + 4 :]


def bmp(folder: Path) -> bytes:
    small = encoded("BMP")
    return small[:18] + struct.pack("<ii", SIDE, SIDE) + small[26:]


def webp(folder: Path) -> bytes:
    """Of frames, whose canvas may be larger than they are."""
    small = encoded("WEBP", save_all=True, append_images=[Image.new("RGB", (16, 16), "red")])
    offset = small.index(b"VP8X") + 12
    return small[:offset] + (WEBP_SIDE - 1).to_bytes(3, "little") * 2 + small[offset + 6 :]


KINDS = (png, png_below_pillow_s_own_limit, jpeg, bmp, webp)


@pytest.fixture(scope="module")
def state() -> Iterator[AppState]:
    with closing(state_of()) as found:
        yield found


@pytest.fixture(scope="module")
def inputs(state: AppState) -> list[gr.Image]:
    """Everything on the page that takes an image."""
    return [
        each for each in build(state).blocks.values() if isinstance(each, gr.Image) and each.interactive is not False
    ]


@pytest.fixture(scope="module")
def client(state: AppState) -> Iterator[TestClient]:
    with client_of(state) as found:
        yield found


def take_screenshots(client: TestClient, inputs: list[gr.Image], data: bytes) -> list[str]:
    """Every way of an image: uploaded, for each input of the page, and as a camera sends it. What was refused."""
    (path,) = client.post("/gradio_api/upload", files={"files": ("a.png", data, "image/png")}).json()
    camera = Path(path).with_name("camera.png")
    camera.write_bytes(bytes_of("data:image/png;base64," + base64.b64encode(data).decode()))
    presets = [partial(each.preprocess, ImageData(path=path, orig_name="a.png")) for each in inputs]
    refused = []
    for preset in (*presets, partial(read_image, path), partial(read_image, str(camera))):
        try:
            preset()
        except (PlanError, Image.DecompressionBombError) as error:
            refused.append(str(error))
    return refused


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_small_file_costs_little(
    kind: Callable[[Path], bytes], client: TestClient, inputs: list[gr.Image], tmp_path: Path
) -> None:
    data = kind(tmp_path)
    assert len(data) < 20_000
    assert take_screenshots(client, inputs, encoded("PNG")) == []  # what is begun at the first one is not counted
    refused: list[str] = []
    assert peak_of(lambda: refused.extend(take_screenshots(client, inputs, data))) < MOST
    assert all("pixels: at most 40 million are taken" in each for each in refused[-2:])


def test_what_is_decoded_shows(client: TestClient, inputs: list[gr.Image]) -> None:
    """In the same figure: an image that is just small enough."""
    side = int(MAX_IMAGE_PIXELS**0.5)
    stream = io.BytesIO()
    Image.new("L", (side, side)).save(stream, "PNG", compress_level=1)
    assert peak_of(lambda: take_screenshots(client, inputs, stream.getvalue())) > 2 * MOST
