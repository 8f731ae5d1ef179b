"""Feeds: everybody who watches gets what they can take, a slow one holds nobody up, and what is held stays small."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

import pytest
from PIL import Image

from patchpar.media.mp4_fragments import Mp4Fragment, Mp4Header
from patchpar.web import feed as feed_module
from patchpar.web.feed import BOUNDARY, ImageFeed, MediaFeed, VideoFeed

HEAD = Mp4Header(mime="video/mp4", data=b"head ")
T = TypeVar("T")


def image(value: int) -> Image.Image:
    return Image.new("RGB", (16, 16), (value, 0, 0))


def shade(part: bytes) -> int:
    pixel = Image.open(io.BytesIO(part.split(b"\r\n\r\n", 1)[1])).getpixel((0, 0))
    assert isinstance(pixel, tuple)
    return round(pixel[0] / 50)


def block(number: int, count: int = 3) -> list[Mp4Fragment]:
    """A key and what needs it."""
    return [Mp4Fragment(data=f"{number}.{group_rank} ".encode(), is_key=group_rank == 0) for group_rank in range(count)]


def read(parts: AsyncIterator[T], during: Callable[[int], object] = lambda count: None) -> list[T]:
    """All of them; `during` is called after each."""

    async def all_parts() -> list[T]:
        found = []
        async for part in parts:
            found.append(part)
            during(len(found))
        return found

    return asyncio.run(asyncio.wait_for(all_parts(), 30))


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is sent again, however slow the machine."""
    monkeypatch.setattr(feed_module, "AGAIN_SECONDS", 1000.0)


def test_without_an_image_none_is_sent() -> None:
    feed = ImageFeed()
    feed.close()
    assert b"".join(read(feed.parts())) == b"--patchpar-image--\r\n"


def test_what_comes_just_before_the_end_is_sent() -> None:
    """After a browser has found nothing new, and before it finds that the feed is over."""

    class Ending(VideoFeed):
        def _next(self, number: int) -> tuple[int, Mp4Fragment] | None:
            found = super()._next(number)
            if found is None and not self.is_over:
                self.put(HEAD, block(0))
                self.close()
            return found

    assert read(Ending().parts()) == [b"head ", b"0.0 ", b"0.1 ", b"0.2 "]


def test_an_image_that_comes_just_before_the_end_is_sent() -> None:
    """While it is asked whether there will be more."""

    class Ending(ImageFeed):
        is_asked = False

        @property
        def is_over(self) -> bool:  # type: ignore[override]
            if self.is_asked:
                self.put(image(50))
            return self.is_asked

        @is_over.setter
        def is_over(self, value: bool) -> None:
            pass

    feed = Ending()
    feed.is_asked = True
    _, *parts, _ = read(feed.parts())
    assert [shade(part) for part in parts] == [1]


@pytest.mark.usefixtures("patient")
def test_an_image_is_not_sent_again_at_once() -> None:
    """But after AGAIN_SECONDS, for which a network has nothing to carry."""
    feed = ImageFeed()
    feed.put(image(50))

    async def first_and_next() -> None:
        parts = feed.parts()
        assert [await anext(parts) for _ in range(2)]
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(anext(parts), 10 * feed_module.LOOK_SECONDS)

    asyncio.run(first_and_next())


def test_each_image_says_its_length() -> None:
    feed = ImageFeed()
    feed.put(image(50).convert("RGBA"))
    feed.close()
    _, part, _ = read(feed.parts())
    head, _, rest = part.removeprefix(b"\r\n").partition(b"\r\n\r\n")
    assert head == b"Content-Type: image/jpeg\r\nContent-Length: %d" % (len(rest) - len(f"\r\n--{BOUNDARY}"))


def test_a_new_browser_begins_with_the_newest_key_frame() -> None:
    """Also where all are still stored."""
    feed = VideoFeed(kept=4)
    for number in range(3):
        feed.put(HEAD, block(number))
    feed.close()
    assert read(feed.parts()) == [b"head ", b"2.0 ", b"2.1 ", b"2.2 "]


@pytest.mark.usefixtures("patient")
def test_images_are_seen_as_they_come() -> None:
    """The last one comes twice: a browser shows an image when the next begins."""
    feed = ImageFeed()
    feed.put(image(0))

    def go_on(count: int) -> None:
        if count in (2, 3):
            feed.put(image(50 * (count - 1)))
        elif count == 4:
            feed.close()

    begun, *parts, end = read(feed.parts(), go_on)
    boundary = f"--{feed_module.BOUNDARY}".encode()
    assert [shade(part) for part in parts] == [0, 1, 2, 2]
    assert all(part.startswith(b"\r\n") and part.endswith(boundary) for part in parts)
    assert (begun, end) == (boundary, b"--\r\n")
    assert (feed.count, feed.watchers) == (3, 0)


def test_an_image_without_another_behind_it_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "AGAIN_SECONDS", 0.01)
    feed = ImageFeed()
    feed.put(image(50))
    _, *parts, _ = read(feed.parts(), lambda count: feed.close() if count == 5 else None)
    assert [shade(part) for part in parts] == [1] * 5


@pytest.mark.usefixtures("patient")
def test_who_comes_late_gets_the_newest_image_only() -> None:
    feed = ImageFeed()
    for value in range(0, 150, 50):
        feed.put(image(value))
    feed.close()
    _, *only, _ = read(feed.parts())
    assert [shade(part) for part in only] == [2]


def test_a_video_that_is_held_whole_is_whole_for_everybody() -> None:
    feed = VideoFeed()
    for number in range(3):
        feed.put(HEAD, block(number, 2))
    feed.close()
    whole = b"".join(read(feed.parts()))
    assert whole == b"".join(read(feed.parts())) == b"head 0.0 0.1 1.0 1.1 2.0 2.1 "
    assert read(VideoFeedThatIsOver().parts()) == []


class VideoFeedThatIsOver(VideoFeed):
    def __init__(self) -> None:
        super().__init__()
        self.close()


def test_of_a_long_video_a_few_keys_and_what_needs_them_are_held() -> None:
    feed, held = VideoFeed(kept=2), []
    feed.put(HEAD, [Mp4Fragment(data=b"sound before any picture ", is_key=False)])
    for number in range(50):
        feed.put(HEAD, block(number % 10))
        held.append(sum(len(each.data) for each in feed._fragments))
    assert held[2:] == [2 * len(b"0.0 0.1 0.2 ")] * 48
    feed.close()
    assert b"".join(read(feed.parts())) == b"head 9.0 9.1 9.2 "  # from the newest that can be begun with


def test_who_is_too_slow_misses_the_middle_and_goes_on_with_a_key() -> None:
    """While it has taken one fragment the others come: it finds the newest key, and nothing of what needs others."""
    feed = VideoFeed(kept=2)
    feed.put(HEAD, block(0))

    def fall_behind(count: int) -> None:
        if count == 1:
            for number in range(1, 9):
                feed.put(HEAD, block(number))
            feed.close()

    slow = read(feed.fragments(), fall_behind)
    assert [part.data for part in slow] == [b"0.0 ", b"8.0 ", b"8.1 ", b"8.2 "]


def test_who_keeps_up_misses_nothing_beside_a_slow_one() -> None:
    feed = VideoFeed(kept=2)
    feed.put(HEAD, block(0))

    async def watch(every: int) -> tuple[list[bytes], list[bytes]]:
        """Two watchers; the second takes one fragment in `every` turns of the first."""
        quick, slow, seen = feed.fragments(), feed.fragments(), ([], [])
        for turn in range(15):
            seen[0].append((await anext(quick)).data)
            if turn % every == 0:
                seen[1].append((await anext(slow)).data)
            if turn % 3 == 2:
                feed.put(HEAD, block(turn // 3 + 1))
        assert feed.watchers == 2
        await quick.aclose()  # type: ignore[attr-defined]
        await slow.aclose()  # type: ignore[attr-defined]
        return seen

    quick, slow = asyncio.run(asyncio.wait_for(watch(7), 30))
    assert quick == [f"{turn // 3}.{turn % 3} ".encode() for turn in range(15)]
    assert slow == [b"0.0 ", b"2.0 ", b"4.0 "]
    assert feed.watchers == 0


def test_names_cannot_be_guessed() -> None:
    names = {MediaFeed().name for _ in range(50)}
    assert len(names) == 50
    assert all(len(name) == 22 for name in names)
