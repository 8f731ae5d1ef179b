"""An image in a file is looked at before it is decoded, whoever asks for it."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import EpsImagePlugin, Image

from patchpar.cli.stream.images import ImageFrames
from patchpar.cli.upscale import UpscaleFlags, enlarge
from patchpar.cli.video import VideoFlags
from patchpar.errors import PlanError
from patchpar.media.image_file import MOST_PIXELS, read_image_file, read_mask_file
from patchpar.stream import video_source
from patchpar.stream.video_source import frames_from, load_reference_image

SIDE = 9_400  # pixels, of an image that would take most of a gigabyte while it is decoded


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def huge_png(path: Path, side: int = SIDE) -> Path:
    """Some kilobytes with a header that says `side` x `side` pixels."""
    header = struct.pack(">IIBBBBB", side, side, 8, 6, 0, 0, 0)
    data = zlib.compress(bytes(1 << 20), 9)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b""))
    return path


@pytest.fixture
def never_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(self: Any) -> None:
        raise AssertionError("it was decoded")

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", decode)


@pytest.mark.usefixtures("never_decoded")
def test_a_small_file_of_a_huge_image_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    path = huge_png(tmp_path / "huge.png")
    assert path.stat().st_size < 20_000
    request = VideoFlags(model="m", image=path)
    for read in (
        lambda: read_image_file(path, "it"),
        lambda: read_image_file(io.BytesIO(path.read_bytes()), "it"),
        lambda: request.opened_image(),
        lambda: list(ImageFrames.of(tmp_path, None)),
        lambda: load_reference_image(path, 96, 96),
    ):
        with pytest.raises(PlanError, match=f"has {SIDE} x {SIDE} pixels: at most 80 million are taken"):
            read()
    with pytest.raises(PlanError, match="has too many pixels: at most 80 million are taken"):  # beyond Pillow's own
        read_image_file(huge_png(tmp_path / "huger.png", 60_000), "it")


@pytest.mark.usefixtures("never_decoded")
def test_the_limit_is_what_refuses(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="it was decoded"):
        read_image_file(huge_png(tmp_path / "large.png", int(MOST_PIXELS**0.5)), "it")


def test_upscale_says_so_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import typer

    with pytest.raises(typer.Exit) as ended:
        enlarge(UpscaleFlags(image=huge_png(tmp_path / "huge.png"), output=tmp_path / "x.png"))
    assert ended.value.exit_code == 2
    assert "at most 80 million are taken" in capsys.readouterr().err


def test_frames_of_a_video_are_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=4)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        container.mux(stream.encode(av.VideoFrame.from_ndarray(np.zeros((48, 64, 3), np.uint8), format="rgb24")))
        container.mux(stream.encode())
    assert ImageFrames.of(path, 8).fps == 8
    monkeypatch.setattr("patchpar.media.image_file.check_pixels.__defaults__", (64 * 48 - 1,))
    for fps in (None, 8):  # before any worker is started
        with pytest.raises(PlanError, match=r"a frame of --input .* has 64 x 48 pixels"):
            ImageFrames.of(path, fps)


def video_of(path: Path, *sides: int) -> Path:
    """A file of raw H.264, with a frame of each side after a header of its own."""
    parts = []
    for side in sides:
        encoder: Any = av.CodecContext.create("libx264", "w")
        encoder.width, encoder.height, encoder.pix_fmt, encoder.framerate = side, side, "yuv420p", 4
        frame = av.VideoFrame.from_ndarray(np.zeros((side, side, 3), np.uint8), format="rgb24")
        parts += [bytes(packet) for packet in (*encoder.encode(frame), *encoder.encode(None))]
    path.write_bytes(b"".join(parts))
    return path


@pytest.mark.parametrize("sides", [(128, 128), (64, 64, 128, 128)], ids=["at once", "later"])
def test_large_frames_of_a_video_are_never_decoded(
    sides: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of kilobytes has frames of hundreds of megabytes; the first frames may be small ones."""
    path, widths = video_of(tmp_path / "a.h264", *sides), list[int]()
    displayed = video_source.displayed_image

    def note(frame: Any, *args: Any) -> Any:
        widths.append(frame.width)
        return displayed(frame, *args)

    monkeypatch.setattr(video_source, "displayed_image", note)
    assert len(list(frames_from(path, 4, 8, 8))) >= len(sides) - 1
    assert 128 in widths, "the control"
    widths.clear()
    monkeypatch.setattr("patchpar.media.image_file.check_pixels.__defaults__", (64 * 64,))
    monkeypatch.setattr("patchpar.media.media_file.MOST_PIXELS", 64 * 64)
    with pytest.raises(PlanError, match=r"a frame of video=.* has 128 x 128 pixels|cannot be read"):
        list(frames_from(path, 4, 8, 8))
    assert 128 not in widths


def test_a_program_is_no_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow has Ghostscript run PostScript, whatever the name of the file."""
    ran = []
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *_, **__: ran.append(1) or Image.new("RGB", (9, 9)).im)
    path = tmp_path / "a.png"
    path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF\n")
    with Image.open(path) as image:
        image.load()
    assert ran, "the control"
    ran.clear()
    for read in (read_image_file, read_mask_file):
        with pytest.raises(PlanError, match=r"it is a PostScript program, .*: save it as PNG"):
            read(path, "it")
    assert not ran


def test_a_video_that_names_other_files_is_refused(tmp_path: Path) -> None:
    """A list of files is one to FFmpeg, whatever its name says: what it names would be shown."""
    path = tmp_path / "a.mp4"
    with av.open(str(tmp_path / "private.mp4"), "w") as container:
        stream = container.add_stream("libx264", rate=4)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        container.mux(stream.encode(av.VideoFrame.from_ndarray(np.zeros((48, 64, 3), np.uint8), format="rgb24")))
        container.mux(stream.encode())
    path.write_text("ffconcat version 1.0\nfile private.mp4\n")
    with av.open(str(path)) as container:
        assert next(container.decode(video=0)).width == 64, "the control"
    with pytest.raises(PlanError, match=r"--input .*a.mp4 cannot be read as a video"):
        list(ImageFrames.of(path, None))


def test_a_reference_with_broken_exif_is_read(tmp_path: Path) -> None:
    """It is turned upright once: who turned it again would parse what is no EXIF."""
    data = io.BytesIO()
    Image.new("RGB", (32, 24), "red").save(data, "JPEG")
    good, exif = data.getvalue(), b"Exif\0\0no TIFF at all"
    broken = good[:2] + b"\xff\xe1" + (len(exif) + 2).to_bytes(2, "big") + exif + good[2:]
    (tmp_path / "a.jpg").write_bytes(broken)
    for reference in (tmp_path / "a.jpg", read_image_file(io.BytesIO(broken), "it")):
        assert load_reference_image(reference, 24, 32).shape == (24, 32, 3)


@pytest.mark.parametrize("keep", [0, 20, 40, 200])
def test_a_broken_image_is_a_sentence(tmp_path: Path, keep: int) -> None:
    whole = tmp_path / "whole.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)).save(whole)
    (tmp_path / "a.png").write_bytes(whole.read_bytes()[:keep])
    with pytest.raises(PlanError, match="it cannot be read as an image"):
        read_image_file(tmp_path / "a.png", "it")
    assert read_image_file(whole, "it").size == (64, 64)


def test_frames_of_a_folder_are_upright(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # a telephone held upright
    Image.new("RGB", (30, 20)).save(tmp_path / "a.jpg", exif=exif)
    (frame,) = ImageFrames.of(tmp_path, None)
    assert frame.size == (20, 30)


def test_grey_values_of_16_bits_keep_their_shades(tmp_path: Path) -> None:
    """Pillow makes all above 255 white."""
    values = np.arange(256, dtype=np.uint16).reshape(16, 16) * 257
    for name in ("a.png", "a.tif"):
        Image.fromarray(values).save(tmp_path / name)
        found = np.asarray(read_image_file(tmp_path / name, "it"))
        assert (found == (values >> 8)[..., None]).all()
        assert (np.asarray(read_mask_file(tmp_path / name, "it")) == values >> 8).all()
    assert np.asarray(Image.open(tmp_path / "a.png").convert("RGB")).mean() > 250, "the control"


@pytest.mark.parametrize("values", [np.zeros((8, 8), np.float32), np.full((8, 8), 2**16, np.int32)])
def test_values_of_an_unknown_range_are_refused(tmp_path: Path, values: Any) -> None:
    Image.fromarray(values).save(tmp_path / "a.tif")
    with pytest.raises(PlanError, match="it has pixels of another range than 8 or 16 bits: save it with 8 bits"):
        read_image_file(tmp_path / "a.tif", "it")


def test_a_mask_is_what_one_sees(tmp_path: Path) -> None:
    """White under transparency would be a mask of everything."""
    mask = Image.new("RGBA", (8, 8), (255, 255, 255, 0))
    mask.save(tmp_path / "clear.png")
    with pytest.raises(PlanError, match="it has transparent pixels: save the mask in black and white"):
        read_mask_file(tmp_path / "clear.png", "it")
    mask.putalpha(255)
    mask.save(tmp_path / "whole.png")
    assert read_mask_file(tmp_path / "whole.png", "it").getextrema() == (255, 255)
