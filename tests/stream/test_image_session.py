"""Frames pushed, images taken: in order, bounded, and those of the plain pipeline on any number of ranks."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline

from patchpar.errors import PlanError
from patchpar.stream.images import pipeline as image_pipeline
from patchpar.stream.images import session as image_session
from patchpar.stream.images.pipeline import ImageSession, ImageStreamingPipeline
from patchpar.stream.images.session import ImageStreamOptions
from patchpar.stream.messages import EndStream, GeneratedImage, ImageRequest
from tests.stream.on_pool import PoolExecutor
from tests.stream.test_images import quiet, same
from tests.stream.test_session import refused_to_a_child
from tests.tiny import image_pipelines

ARGUMENTS = {"num_inference_steps": 4, "strength": 1.0, "output_type": "np", "guidance_scale": 1.0}


class Ranks:
    """Pretend to draw; every image is its arguments. They draw while `go` is set."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.go.set()
        self.orders: list[ImageRequest] = []
        self.stops: list[int] = []

    def run(self, rank: int, on_event: Callable[[int, Any], None], on_start: Callable[[Any], None]) -> list[Any]:
        heard: queue.Queue[Any] = queue.Queue()
        on_start(lambda _, word: heard.put(word))
        while not isinstance(word := heard.get(timeout=10), EndStream):
            self.orders.append(word)
            assert self.go.wait(10)
            on_event(rank, GeneratedImage(number=word.number, image=dict(word.arguments)))
        self.stops.append(rank)
        return []


def session(ranks: Ranks, **manner: Any) -> ImageSession:
    """Three images at most are under way."""
    return ImageSession(ranks.run, ImageStreamOptions(ranks=2, seed=1, lead=1, **manner), {"prompt": "a"})


def test_all_come_out_in_order() -> None:
    ranks = Ranks()
    with session(ranks) as stream:
        results = list(stream.map({"image": n} for n in range(20)))
    assert [(result.number, result.image["image"]) for result in results] == [(n, n) for n in range(20)]
    assert sorted(ranks.stops) == [0, 1]
    assert {order.seed for order in ranks.orders} == {1}


def test_a_forked_child_is_told_and_does_not_wait() -> None:
    with session(Ranks()) as stream:
        assert "was forked from it and cannot use them" in refused_to_a_child(stream)


def test_images_that_end_on_several_ranks_come_out_in_order() -> None:
    """The first rank ends its first image after the other one has ended all that it may begin."""
    ended = threading.Semaphore(0)

    class Late(Ranks):
        def run(self, rank: int, on_event: Callable[[int, Any], None], on_start: Callable[[Any], None]) -> list[Any]:
            def event(who: int, word: Any) -> None:
                if rank == 0 and word.number == 0:
                    assert ended.acquire(timeout=10)
                on_event(who, word)
                ended.release()

            time.sleep(0.1)  # the first image is pushed before any rank can take it
            return super().run(rank, event, on_start)

    with ImageSession(Late().run, ImageStreamOptions(ranks=2, seed=1), {}) as stream:
        assert [result.number for result in stream.map([{}] * 6)] == list(range(6))


def test_arguments_hold_from_the_next_image() -> None:
    with session(Ranks()) as stream:
        stream.push()
        assert stream.set(prompt="b") == 1
        stream.push()
        stream.stop()
        assert [result.image["prompt"] for result in stream] == ["a", "b"]
        with pytest.raises(PlanError, match="takes no more"):
            stream.push()


def test_what_is_under_way_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_session, "PUSH_SECONDS", 0.05)
    ranks = Ranks()
    with session(ranks) as stream:
        for number in range(4):  # three under way, one waits
            stream.push(image=number)
        with pytest.raises(PlanError, match="3 are in flight"):
            stream.push(image=4)
        assert (stream.in_flight, len(ranks.orders) <= 3) == (3, True)


def test_a_stream_of_many_that_is_stopped_gives_those_that_have_begun() -> None:
    with session(Ranks()) as stream:
        results = stream.map({"image": n} for n in range(20))
        first = next(results)
        end = stream.stop()
        found = [first.number, *(result.number for result in results)]
        assert found == list(range(len(found)))
        assert end <= len(found) < 20


def test_only_the_latest_frame_waits() -> None:
    ranks = Ranks()
    ranks.go.clear()
    with session(ranks, intake="latest") as stream:
        while len(stream._sends) < 2:
            pass
        for number in range(10):
            stream.push_frame(number)
        ranks.go.set()
        stream.stop()
        assert [result.image["image"] for result in stream] == [0, 1, 2, 9]
        assert stream.dropped == 6


@pytest.mark.parametrize(("output", "seen"), [("drop_oldest", [19]), ("skip_to_live", [19])])
def test_a_slow_watcher_loses_images_instead(output: str, seen: list[int]) -> None:
    ranks = Ranks()
    with session(ranks, output=output) as stream:
        for number in range(20):
            stream.push_frame(number)
        stream.stop()
        while not stream.is_over:
            pass
        assert [result.number for result in stream] == seen
        assert stream.dropped == 19


def test_a_pause_holds_what_waits() -> None:
    ranks = Ranks()
    with session(ranks) as stream:
        assert stream.pause() == 0
        stream.push_frame(0)
        assert (stream.in_flight, stream.resume()) == (0, 0)
        assert next(stream).number == 0
        stream.push_frame(1)
        stream.push_frame(2)
        while stream.in_flight != 2 or len(ranks.orders) != 3:
            pass
        while not (flushed := stream.flush()):
            pass
        assert flushed <= 2


def test_async() -> None:
    async def numbers() -> list[int]:
        async with session(Ranks()) as stream:
            stream.push_frame(0)
            stream.push_frame(1)
            stream.stop()
            return [result.number async for result in stream]

    assert asyncio.run(numbers()) == [0, 1]


def test_cancel_ends_at_once() -> None:
    ranks = Ranks()
    ranks.go.clear()
    with session(ranks) as stream:
        stream.push()
        stream.cancel()
        assert list(stream) == []
        ranks.go.set()
        for control in (stream.push, stream.set, stream.pause, stream.resume):
            with pytest.raises(PlanError, match="takes no more images"):
                control()


def test_what_cannot_be() -> None:
    for wrong in ({"intake": "some"}, {"seed": -1}, {"output": "some"}, {"lead": 0}):
        with pytest.raises(PlanError):
            ImageStreamOptions(**{"ranks": 1, "seed": 0} | wrong)


# --- real ranks ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("img2img")
    pipe, _ = image_pipelines.sd_img2img()
    pipe.save_pretrained(path)
    return path


@pytest.fixture(scope="module", params=[pytest.param("one rank", marks=pytest.mark.breadth), "four ranks"])
def pipe(request: pytest.FixtureRequest, folder: Path) -> Iterator[ImageStreamingPipeline]:
    options = {"safety_checker": None, "feature_extractor": None}
    if request.param == "one rank":
        with ImageStreamingPipeline.from_pretrained(folder, devices="cpu", **options) as made:
            yield made
    else:
        executor = PoolExecutor(request.getfixturevalue("ranks"), "pictures", image_pipeline.ENGINE)
        yield ImageStreamingPipeline(executor, executor.call("load", str(folder), options)[0])


def test_frames_are_those_of_the_plain_pipeline(pipe: ImageStreamingPipeline, folder: Path) -> None:
    _, arguments = image_pipelines.sd_img2img()
    frames = [arguments["image"].rotate(90 * turn) for turn in range(3)]
    with pipe.stream(seed=5, prompt="a fox", **ARGUMENTS) as stream:
        results = list(stream.map({"image": frame} for frame in frames))
    oracle = quiet(DiffusionPipeline.from_pretrained(folder, safety_checker=None, feature_extractor=None))
    for result, frame in zip(results, frames, strict=True):
        generator = torch.Generator().manual_seed(5)
        wanted = oracle(prompt="a fox", image=frame, generator=generator, **ARGUMENTS).images[0]
        assert same(result.image, wanted)
    assert not same(results[0].image, results[1].image)


def test_a_mistake_is_told_and_the_next_stream_is_well(pipe: ImageStreamingPipeline) -> None:
    _, arguments = image_pipelines.sd_img2img()
    with pipe.stream(prompt=3, **ARGUMENTS) as stream, pytest.raises(ValueError, match="`prompt` has to be"):
        list(stream.map([{"image": arguments["image"]}]))
    with pipe.stream(prompt="a fox", **ARGUMENTS) as stream:
        assert len(list(stream.map([{"image": arguments["image"]}] * 2))) == 2
