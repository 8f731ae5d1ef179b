"""A stream goes on until its page stops it, follows a new prompt, and says how it went."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import pytest
import torch
from PIL import Image

from app import image_stream
from app.feeds import ImageFeed, VideoFeed
from app.image_stream import ImageStreamJob, StreamControls, StreamRequest
from app.job_queue import Job, JobQueue
from app.noise_walk import PERIOD, NoiseWalk
from app.requests import GenerateRequest
from app.saved_video import SavedVideo
from app.state import AppState
from app.stream_tab import StreamTab
from app.talking_face import TalkingFaceJob, TalkingFaceRequest
from app.video_file import VideoFile
from app.workers import AppConfig, AppWorkers
from patchpar import PlanError
from patchpar.launch.devices import resolve_devices
from tests.media.test_image_file import huge_png

from .app_states import state_of
from .fakes import FakePipeline, FakeWorkers
from .test_bad_input import OWNER, fields
from .videos import grey_video
from .waits import over, until

REQUEST = GenerateRequest(prompt="a fox", width=64, height=64, steps=4, guidance=1.5)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return tmp_path / "kept.mp4"


class Streaming:
    """A stream on workers that generate at once."""

    def __init__(self, queue: JobQueue, saved: Path, **options: Any) -> None:
        workers: Any = FakeWorkers(FakePipeline())
        self.workers, self.controls, self.feed = workers, StreamControls(), ImageFeed()
        work = ImageStreamJob(
            workers, StreamRequest(generate=REQUEST, **options), self.controls, self.feed, SavedVideo(saved)
        )
        self.job = queue.submit("A", "stream", work.run)


def test_a_prompt_becomes_images_until_it_is_stopped(queue: JobQueue, saved: Path) -> None:
    stream = Streaming(queue, saved)
    until(lambda: stream.feed.count >= 5, "five images")
    stream.controls.is_stopped = True
    view = over(stream.job)
    assert view.state == "done"
    assert view.result.images == stream.feed.count
    assert view.result.latency == 0.25
    assert stream.feed.is_over
    first, second = (request["latents"] for request in stream.workers.streamed[:2])
    assert 0 < float((first - second).abs().max()) < 0.5  # a little further on the walk
    assert not stream.workers.streamed[0]["takes_image"]


def test_a_prompt_can_be_changed_while_it_runs(queue: JobQueue, saved: Path) -> None:
    stream = Streaming(queue, saved)
    until(lambda: stream.feed.count >= 2, "two images")
    stream.controls.set_prompt("a pine")
    until(lambda: any(request["prompt"] == "a pine" for request in stream.workers.streamed), "the new prompt")
    stream.controls.is_stopped = True
    over(stream.job)
    prompts = [request["prompt"] for request in stream.workers.streamed]
    assert prompts == sorted(prompts)  # "a fox", then "a pine", and never back
    with pytest.raises(PlanError, match="1 to 1000 characters"):
        stream.controls.set_prompt(" ")


def test_an_image_is_generated_anew_again_and_again(queue: JobQueue, saved: Path) -> None:
    stream = Streaming(queue, saved, source="image", image=Image.new("RGB", (200, 100)), strength=0.5)
    until(lambda: stream.feed.count >= 2, "two images")
    stream.controls.is_stopped = True
    over(stream.job)
    request = stream.workers.streamed[0]
    assert (request["takes_image"], request["strength"], request["image"].size) == (True, 0.5, (64, 64))
    assert "height" not in request


def test_every_frame_of_a_video_is_generated_anew_and_then_it_ends(
    queue: JobQueue, saved: Path, tmp_path: Path
) -> None:
    video = VideoFile.of(grey_video(tmp_path / "a.mp4", frames=20, fps=10))
    stream = Streaming(queue, saved, source="video", video=video, rate=5, strength=0.5)
    view = over(stream.job)
    assert view.state == "done", view.error
    assert view.result.images == 10
    assert "streaming: 10 of 10 images" in view.note
    shades = [request["image"].getpixel((5, 5))[0] for request in stream.workers.streamed]
    assert shades == pytest.approx([20 * frame for frame in range(10)], abs=4)
    assert {request["image"].size for request in stream.workers.streamed} == {(64, 64)}


def test_what_was_streamed_is_kept_as_a_video(queue: JobQueue, saved: Path, tmp_path: Path) -> None:
    """Every image once, in order, as fast as the video it was generated from."""
    video = VideoFile.of(grey_video(tmp_path / "a.mp4", frames=20, fps=10))
    for rate, images, fps in ((5, 10, 5), (30, 20, 10)):
        view = over(Streaming(queue, saved, source="video", video=video, rate=rate, strength=0.5).job)
        assert view.result.video == saved
        with av.open(str(saved)) as container:
            frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(container.streams.video[0])]
            assert container.streams.video[0].average_rate == fps
        assert {frame.shape for frame in frames} == {(32, 32, 3)}
        assert [frame.mean() for frame in frames] == pytest.approx([*range(images)], abs=2)


def test_a_stream_without_images_leaves_no_video(saved: Path) -> None:
    nothing = SavedVideo(saved)
    nothing.close()
    assert nothing.video is None
    assert not saved.exists()


def test_a_video_that_breaks_off_is_a_sentence(queue: JobQueue, saved: Path, tmp_path: Path) -> None:
    path = grey_video(tmp_path / "a.mp4", frames=20, fps=10)
    video = VideoFile.of(path)
    path.write_bytes(path.read_bytes()[:60])
    view = over(Streaming(queue, saved, source="video", video=video).job)
    assert view.state == "failed"
    assert view.error.startswith("the video ends early, after 0 frames: ")


def test_the_camera_s_newest_image_is_taken(queue: JobQueue, saved: Path, tmp_path: Path) -> None:
    """One that is too large ends the stream undecoded."""
    stream = Streaming(queue, saved, source="camera")
    for shade in (10, 200):
        path = tmp_path / f"{shade}.png"
        Image.new("RGB", (80, 60), (shade,) * 3).save(path)
        stream.controls.frame = str(path)
        until(lambda shade=shade: stream.workers.streamed and _shade(stream) == shade, "the new frame")
    stream.controls.frame = str(huge_png(tmp_path / "huge.png", 4000))
    assert "has 4000 x 4000 pixels: at most 9 million are taken" in over(stream.job).error


def _shade(stream: Streaming) -> int:
    return int(stream.workers.streamed[-1]["image"].getpixel((0, 0))[0])


def test_a_camera_that_sends_nothing_is_a_sentence(
    queue: JobQueue, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_stream, "CAMERA_SECONDS", 0.1)
    view = over(Streaming(queue, saved, source="camera").job)
    assert (view.state, view.error) == ("failed", "no image from the camera for 0.1 s: allow the page to use it")


def test_a_stream_is_cancelled_like_any_job(queue: JobQueue, saved: Path) -> None:
    stream = Streaming(queue, saved)
    until(lambda: stream.feed.count >= 1, "an image")
    queue.cancel("A")
    assert over(stream.job).state == "cancelled"
    assert stream.feed.is_over


def test_a_stream_that_nobody_stops_ends(queue: JobQueue, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_stream, "MAX_SECONDS", 0.1)
    assert over(Streaming(queue, saved).job).state == "done"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": "image"}, "there is no input image"),
        ({"source": "video"}, "there is no input video"),
        ({"strength": 0.0}, "strength 0: it is a number from 0.05"),
        ({"rate": 31.0}, "31 frames from a second: it is a number from 1 to 30"),
    ],
)
def test_a_bad_request_is_a_sentence(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        StreamRequest(generate=REQUEST, **options)


@pytest.mark.parametrize(
    ("source", "steps", "strength"), [("The prompt alone", 1, 0.6), ("A video", 1, 1.0), ("A video", 4, 0.3)]
)
def test_one_step_on_two_devices_is_streamed(source: str, steps: int, strength: float, tmp_path: Path) -> None:
    """Each device generates whole images in turn."""
    video = grey_video(tmp_path / "a.mp4", frames=4, fps=4) if source == "A video" else None

    async def stream(tab: StreamTab, state: AppState) -> None:
        updates = tab.generate(OWNER, source, None, video and str(video), 4, strength, *fields(steps=steps))
        async for _ in updates:
            job = state.job_queue.job_of(OWNER, "stream")
            assert job is not None, "refused"
            if state.workers.streamed:  # type: ignore[attr-defined]
                tab.stop(OWNER)

    workers: Any = FakeWorkers(FakePipeline(), count=2)
    with closing(state_of(workers)) as state:
        asyncio.run(asyncio.wait_for(stream(StreamTab(state), state), 30))
        job = state.job_queue.job_of(OWNER, "stream")
        assert job is not None
        assert over(job).state == "done"
        assert over(job).result.images >= 1
    assert workers.streamed[0]["num_inference_steps"] == steps


def test_a_strength_that_leaves_no_step_is_a_sentence() -> None:
    """Of a prompt alone no step is left out."""
    StreamRequest(generate=REQUEST, source="prompt", strength=0.2)
    for strength, steps in ((0.3, 1), (0.6, 2)):
        assert int(REQUEST.steps * strength) == steps
        StreamRequest(generate=REQUEST, source="camera", strength=strength)
    with pytest.raises(PlanError, match=r"4 steps, of which strength 0\.2 leaves none: use more of either"):
        StreamRequest(generate=REQUEST, source="camera", strength=0.2)


def test_a_walk_of_noise_stays_white_and_closes() -> None:
    noise_walk = NoiseWalk(3, (4, 32, 32))
    for number in (0, 7, 40):
        assert float(noise_walk.at(number).std()) == pytest.approx(1, abs=0.05)
    assert torch.allclose(noise_walk.at(0), noise_walk.at(PERIOD), atol=1e-5)
    assert torch.equal(NoiseWalk(3, (4, 32, 32)).at(5), noise_walk.at(5))
    assert float((noise_walk.at(0) - noise_walk.at(24)).abs().max()) > 1


class FakeFace:
    """Stands for StreamingPipeline: blocks of eight grey frames, with their audio."""

    config = SimpleNamespace(fps=16.0, width=32, height=32)

    def __init__(self) -> None:
        self.page_name: dict[str, Any] = {}
        self.prompts: list[str] = []
        self.is_stopped = False

    def stream(self, prompt: str, **conditions: Any) -> Any:
        self.page_name = {"prompt": prompt, **conditions}
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


def test_a_face_talks_until_it_is_stopped(queue: JobQueue, saved: Path) -> None:
    face, controls, feed = FakeFace(), StreamControls(), VideoFeed()
    workers: Any = SimpleNamespace(face_stream=lambda: face, setup=FakeWorkers(FakePipeline()).setup)
    pose = VideoFile.of(grey_video(saved.parent / "poses.mp4", frames=2, fps=10))
    options = TalkingFaceRequest(prompt="smile", audio=([0.0] * 16000, 16000), seed=3, pose=pose)
    seen = []

    def work(job: Job) -> Any:
        controls.set_prompt("frown")
        controls.is_stopped = True
        return TalkingFaceJob(workers, options, controls, feed, SavedVideo(saved)).run(job)

    view = over(queue.submit("A", "stream", work))
    seen.append(view)
    assert view.state == "done", view.error
    assert (view.result.images, face.prompts) == (8, ["frown"])
    assert (face.page_name["prompt"], face.page_name["seed"], face.page_name["audio"][1]) == ("smile", 3, 16000)
    assert face.page_name["pose"].read() == pose.path.read_bytes()
    assert feed.head is not None
    assert feed.head.data[4:8] == b"ftyp"
    assert feed._fragments
    assert feed.is_over
    assert view.result.video == saved
    with av.open(str(saved)) as container:
        assert len([*container.decode(container.streams.video[0])]) == 8
        assert container.streams.video[0].average_rate == face.config.fps
        assert len(container.streams.audio) == 1


def test_a_prompt_that_comes_too_late_loses_no_video(queue: JobQueue, saved: Path) -> None:
    """All blocks have been begun, and the last ones are not shown yet."""

    class OverFace(FakeFace):
        is_over = True

        def set_prompt(self, prompt: str) -> None:
            raise PlanError("this stream is finished: begin another one")

    controls, feed = StreamControls(), VideoFeed()
    workers: Any = SimpleNamespace(face_stream=OverFace, setup=FakeWorkers(FakePipeline()).setup)
    job = TalkingFaceJob(workers, TalkingFaceRequest(prompt="smile"), controls, feed, SavedVideo(saved))
    controls.set_prompt("frown")
    view = over(queue.submit("A", "stream", job.run))
    assert view.state == "done", view.error
    assert view.result.images == 800


def test_a_face_of_the_hub_that_does_not_exist_is_a_sentence(
    queue: JobQueue, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    workers = AppWorkers(AppConfig(devices=resolve_devices(["cpu"]), face="org/none"))
    job = TalkingFaceJob(workers, TalkingFaceRequest(), StreamControls(), VideoFeed(), SavedVideo(saved))
    view = over(queue.submit("A", "stream", job.run))
    assert view.state == "failed"
    assert "'org/none' is no folder here, and as a name it could not be downloaded" in view.error


def test_a_video_has_an_end() -> None:
    with pytest.raises(PlanError, match="500 seconds: the limit is more than 0 and at most 120"):
        TalkingFaceRequest(seconds=500)
