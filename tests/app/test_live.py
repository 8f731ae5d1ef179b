"""Feeds: every browser gets what it can take, a slow one holds nobody up, and none goes on for ever."""

from __future__ import annotations

import asyncio
import io
import re

import numpy as np
import pytest
from PIL import Image

from app import live
from app.film import FilmWriter
from app.live import Feed, Feeds, FilmFeed, PictureFeed


def picture(value: int) -> Image.Image:
    return Image.new("RGB", (16, 16), (value, 0, 0))


def read(feed: Feed) -> list[bytes]:
    async def all_parts() -> list[bytes]:
        return [part async for part in feed.parts()]

    return asyncio.run(asyncio.wait_for(all_parts(), 30))


def test_a_browser_sees_pictures_as_they_come() -> None:
    feed = PictureFeed()

    async def watch() -> list[bytes]:
        found = []
        async for part in feed.parts():
            found.append(part)
            if len(found) < 3:
                feed.put(picture(50 * len(found)))
            else:
                feed.close()
        return found

    feed.put(picture(0))
    parts = asyncio.run(asyncio.wait_for(watch(), 30))
    shades = [Image.open(io.BytesIO(part.split(b"\r\n\r\n", 1)[1])).getpixel((0, 0)) for part in parts[:3]]
    assert [round(shade[0] / 50) for shade in shades if isinstance(shade, tuple)] == [0, 1, 2]
    assert all(part.startswith(b"--" + live.BOUNDARY.encode()) for part in parts)
    assert feed.count == 3


def test_who_comes_late_gets_the_newest_only() -> None:
    feed = PictureFeed()
    for value in range(100):
        feed.put(picture(value))
    feed.close()
    assert len(read(feed)) == 2  # the picture, and the end


def test_a_film_is_whole_for_everybody() -> None:
    feed = FilmFeed()
    for piece in (b"a", b"", b"bc"):
        feed.put(piece)
    feed.close()
    assert b"".join(read(feed)) == b"".join(read(feed)) == b"abc"


def test_feeds_have_names_that_cannot_be_guessed_and_the_oldest_makes_room() -> None:
    feeds = Feeds()
    found = [feeds.add(PictureFeed()) for _ in range(live.KEPT + 1)]
    assert len({feed.name for feed in found}) == live.KEPT + 1
    assert all(re.fullmatch(r"/live/[\w-]{22}", feed.address) for feed in found)
    assert feeds.get(found[0].name) is None
    assert found[0].is_over
    assert feeds.get(found[-1].name) is found[-1]
    assert feeds.get("nobody") is None
    feeds.close()
    assert found[-1].is_over


@pytest.mark.parametrize("rate", [16000, None])
def test_a_film_can_be_played_with_its_sound(rate: int | None) -> None:
    av = pytest.importorskip("av")
    feed = FilmFeed()
    writer = FilmWriter(feed.put, fps=16, size=(96, 64), rate=rate)
    for block in range(3):
        frames = np.full((8, 64, 96, 3), 80 * block, np.uint8)
        writer.put(frames, None if rate is None else np.sin(np.arange(8000) / 20).astype(np.float32))
    assert len(feed._fragments) > 1  # before its end
    writer.close()
    feed.close()
    with av.open(io.BytesIO(b"".join(read(feed)))) as film:
        assert len(film.streams.audio) == (rate is not None)
        pictures = [frame.to_ndarray(format="rgb24") for frame in film.decode(video=0)]
    assert [round(float(frame.mean()) / 80) for frame in pictures] == [0] * 8 + [1] * 8 + [2] * 8
    if rate is not None:
        with av.open(io.BytesIO(b"".join(read(feed)))) as film:
            samples = sum(frame.samples for frame in film.decode(audio=0))
        assert samples / rate == pytest.approx(1.5, abs=0.15)  # the codec adds a frame at either end
