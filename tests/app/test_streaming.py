"""A stream goes on until its page stops it, follows a new prompt, and says how it went."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import pytest
import torch
from PIL import Image

from app import streaming
from app.face import TalkingFaceJob, TalkingFaceRequest
from app.footage import VideoFile
from app.jobs import Job, JobQueue
from app.keeping import SavedVideo
from app.live import ImageFeed, VideoFeed
from app.orders import GenerateRequest
from app.streaming import ImageStreamJob, StreamControls, StreamRequest
from app.walk import PICTURES_PER_ROUND, NoiseWalk
from patchpar import PlanError
from tests.unit.test_picture_file import huge_png

from .fakes import FakePipeline, FakeWorkers
from .films import grey_film
from .waiting import over, until

ORDER = GenerateRequest(prompt="a fox", width=64, height=64, steps=4, guidance=1.5)


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    return tmp_path / "kept.mp4"


class Streaming:
    """A stream on workers that draw at once."""

    def __init__(self, desk: JobQueue, kept: Path, **wanted: Any) -> None:
        workers: Any = FakeWorkers(FakePipeline())
        self.workers, self.controls, self.feed = workers, StreamControls(), ImageFeed()
        work = ImageStreamJob(workers, StreamRequest(order=ORDER, **wanted), self.controls, self.feed, SavedVideo(kept))
        self.job = desk.submit("A", "stream", work.run)


def test_a_prompt_becomes_pictures_until_it_is_stopped(desk: JobQueue, kept: Path) -> None:
    stream = Streaming(desk, kept)
    until(lambda: stream.feed.count >= 5, "five pictures")
    stream.controls.is_stopped = True
    view = over(stream.job)
    assert view.state == "done"
    assert view.result.pictures == stream.feed.count
    assert view.result.latency == 0.25
    assert stream.feed.is_over
    first, second = (request["latents"] for request in stream.workers.streamed[:2])
    assert 0 < float((first - second).abs().max()) < 0.5  # a little further on the walk
    assert not stream.workers.streamed[0]["takes_image"]


def test_a_prompt_can_be_changed_while_it_runs(desk: JobQueue, kept: Path) -> None:
    stream = Streaming(desk, kept)
    until(lambda: stream.feed.count >= 2, "two pictures")
    stream.controls.say("a pine")
    until(lambda: any(request["prompt"] == "a pine" for request in stream.workers.streamed), "the new prompt")
    stream.controls.is_stopped = True
    over(stream.job)
    prompts = [request["prompt"] for request in stream.workers.streamed]
    assert prompts == sorted(prompts)  # "a fox", then "a pine", and never back
    with pytest.raises(PlanError, match="1 to 1000 characters"):
        stream.controls.say(" ")


def test_a_picture_is_drawn_anew_again_and_again(desk: JobQueue, kept: Path) -> None:
    stream = Streaming(desk, kept, source="picture", picture=Image.new("RGB", (200, 100)), strength=0.5)
    until(lambda: stream.feed.count >= 2, "two pictures")
    stream.controls.is_stopped = True
    over(stream.job)
    request = stream.workers.streamed[0]
    assert (request["takes_image"], request["strength"], request["image"].size) == (True, 0.5, (64, 64))
    assert "height" not in request


def test_every_frame_of_a_film_is_drawn_anew_and_then_it_ends(desk: JobQueue, kept: Path, tmp_path: Path) -> None:
    film = VideoFile.of(grey_film(tmp_path / "a.mp4", frames=20, fps=10))
    stream = Streaming(desk, kept, source="film", film=film, rate=5, strength=0.5)
    view = over(stream.job)
    assert view.state == "done", view.error
    assert view.result.pictures == 10
    assert "streaming: 10 of 10 pictures" in view.note
    shades = [request["image"].getpixel((5, 5))[0] for request in stream.workers.streamed]
    assert shades == pytest.approx([20 * frame for frame in range(10)], abs=4)
    assert {request["image"].size for request in stream.workers.streamed} == {(64, 64)}


def test_what_was_streamed_is_kept_as_a_film(desk: JobQueue, kept: Path, tmp_path: Path) -> None:
    """Every picture once, in order, as fast as the film it was drawn from."""
    film = VideoFile.of(grey_film(tmp_path / "a.mp4", frames=20, fps=10))
    for rate, pictures, fps in ((5, 10, 5), (30, 20, 10)):
        view = over(Streaming(desk, kept, source="film", film=film, rate=rate, strength=0.5).job)
        assert view.result.film == kept
        with av.open(str(kept)) as container:
            frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(container.streams.video[0])]
            assert container.streams.video[0].average_rate == fps
        assert {frame.shape for frame in frames} == {(32, 32, 3)}
        assert [frame.mean() for frame in frames] == pytest.approx([*range(pictures)], abs=2)


def test_a_stream_without_pictures_leaves_no_film(kept: Path) -> None:
    nothing = SavedVideo(kept)
    nothing.close()
    assert nothing.film is None
    assert not kept.exists()


def test_a_film_that_breaks_off_is_a_sentence(desk: JobQueue, kept: Path, tmp_path: Path) -> None:
    path = grey_film(tmp_path / "a.mp4", frames=20, fps=10)
    film = VideoFile.of(path)
    path.write_bytes(path.read_bytes()[:60])
    view = over(Streaming(desk, kept, source="film", film=film).job)
    assert view.state == "failed"
    assert view.error.startswith("the film breaks off after 0 frames: ")


def test_the_camera_s_newest_picture_is_taken(desk: JobQueue, kept: Path, tmp_path: Path) -> None:
    """One that is too large ends the stream undecoded."""
    stream = Streaming(desk, kept, source="camera")
    for shade in (10, 200):
        path = tmp_path / f"{shade}.png"
        Image.new("RGB", (80, 60), (shade,) * 3).save(path)
        stream.controls.frame = str(path)
        until(lambda shade=shade: stream.workers.streamed and _shade(stream) == shade, "the new frame")
    stream.controls.frame = str(huge_png(tmp_path / "huge.png", 4000))
    assert "has 4000 x 4000 pixels: at most 9 million are taken" in over(stream.job).error


def _shade(stream: Streaming) -> int:
    return int(stream.workers.streamed[-1]["image"].getpixel((0, 0))[0])


def test_a_camera_that_sends_nothing_is_a_sentence(desk: JobQueue, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "CAMERA_SECONDS", 0.1)
    view = over(Streaming(desk, kept, source="camera").job)
    assert (view.state, view.error) == ("failed", "no picture from the camera for 0.1 s: allow the page to use it")


def test_a_stream_is_cancelled_like_any_job(desk: JobQueue, kept: Path) -> None:
    stream = Streaming(desk, kept)
    until(lambda: stream.feed.count >= 1, "a picture")
    desk.cancel("A")
    assert over(stream.job).state == "cancelled"
    assert stream.feed.is_over


def test_a_stream_that_nobody_stops_ends(desk: JobQueue, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "MOST_SECONDS", 0.1)
    assert over(Streaming(desk, kept).job).state == "done"


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({"source": "picture"}, "no picture to begin with"),
        ({"source": "film"}, "no film to begin with"),
        ({"strength": 0.0}, "strength 0: it is a number from 0.05"),
        ({"rate": 31.0}, "31 frames from a second: it is a number from 1 to 30"),
    ],
)
def test_a_bad_wish_is_a_sentence(wanted: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        StreamRequest(order=ORDER, **wanted)


@pytest.mark.parametrize(
    ("wanted", "devices", "said"),
    [
        ({"strength": 0.6}, 2, None),
        ({"strength": 0.3}, 1, None),
        ({"strength": 0.2}, 1, "4 steps, of which strength 0.2 leaves 0, but each of 1 devices .* at least 5 steps"),
        ({"strength": 0.3}, 2, "4 steps, of which strength 0.3 leaves 1, but each of 2 devices .* at least 7 steps"),
        ({"source": "prompt"}, 5, "4 steps, but each of 5 devices draws one: use at least 5 steps"),
    ],
)
def test_there_is_a_step_for_every_device(wanted: dict[str, Any], devices: int, said: str | None) -> None:
    order = StreamRequest(order=ORDER, **{"source": "camera", **wanted})
    if said is None:
        order.check_devices(devices)
    else:
        with pytest.raises(PlanError, match=said):
            order.check_devices(devices)


def test_a_walk_of_noise_stays_white_and_closes() -> None:
    walk = NoiseWalk(3, (4, 32, 32))
    for number in (0, 7, 40):
        assert float(walk.at(number).std()) == pytest.approx(1, abs=0.05)
    assert torch.allclose(walk.at(0), walk.at(PICTURES_PER_ROUND), atol=1e-5)
    assert torch.equal(NoiseWalk(3, (4, 32, 32)).at(5), walk.at(5))
    assert float((walk.at(0) - walk.at(24)).abs().max()) > 1


class FakeFace:
    """Stands for StreamingPipeline: blocks of eight grey frames, with their sound."""

    config = SimpleNamespace(fps=16.0, width=32, height=32)

    def __init__(self) -> None:
        self.asked: dict[str, Any] = {}
        self.prompts: list[str] = []
        self.is_stopped = False

    def stream(self, prompt: str, **conditions: Any) -> Any:
        self.asked = {"prompt": prompt, **conditions}
        return self

    def __enter__(self) -> FakeFace:
        return self

    def __exit__(self, *_: object) -> None: ...

    def __iter__(self) -> Iterator[Any]:
        for _ in range(100):
            if self.is_stopped:
                return
            yield SimpleNamespace(
                frames=torch.full((8, 32, 32, 3), 90, dtype=torch.uint8), audio=torch.zeros(8000), latency=0.1
            )

    def set_prompt(self, prompt: str) -> None:
        self.prompts.append(prompt)

    def stop(self) -> None:
        self.is_stopped = True


def test_a_face_talks_until_it_is_stopped(desk: JobQueue, kept: Path) -> None:
    face, controls, feed = FakeFace(), StreamControls(), VideoFeed()
    workers: Any = SimpleNamespace(face_stream=lambda: face, setup=FakeWorkers(FakePipeline()).setup)
    wanted = TalkingFaceRequest(prompt="smile", sound=([0.0] * 16000, 16000), seed=3)
    seen = []

    def work(job: Job) -> Any:
        controls.say("frown")
        controls.is_stopped = True
        return TalkingFaceJob(workers, wanted, controls, feed, SavedVideo(kept)).run(job)

    view = over(desk.submit("A", "stream", work))
    seen.append(view)
    assert view.state == "done", view.error
    assert (view.result.pictures, face.prompts) == (8, ["frown"])
    assert (face.asked["prompt"], face.asked["seed"], face.asked["audio"][1]) == ("smile", 3, 16000)
    assert feed.head is not None
    assert feed.head.data[4:8] == b"ftyp"
    assert feed.held > 0
    assert feed.is_over
    assert view.result.film == kept
    with av.open(str(kept)) as container:
        assert len([*container.decode(container.streams.video[0])]) == 8
        assert container.streams.video[0].average_rate == face.config.fps
        assert len(container.streams.audio) == 1


def test_a_film_has_an_end() -> None:
    with pytest.raises(PlanError, match="500 seconds: a film has more than 0 and at most 120"):
        TalkingFaceRequest(seconds=500)
