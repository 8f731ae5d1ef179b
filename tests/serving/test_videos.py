"""Videos over HTTP: OpenAI's client creates, polls, downloads and deletes one, whose frames are the pipeline's."""

from __future__ import annotations

import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import av
import numpy as np
import openai
import pytest
import torch
from PIL import Image

from patchpar import ParallelPipeline
from patchpar.media.video_file import frames_of, write_video
from patchpar.serving.generation import ImageGenerator
from patchpar.serving.http.application import application
from patchpar.serving.service import ImageService
from patchpar.serving.settings import KeptResults, RequestLimits, ServedModel, ServerSettings
from tests.serving.requests import PATH, client_of, until
from tests.serving.test_http import error_of
from tests.serving.test_streamed_images import served_client
from tests.tiny import build

VIDEOS = "/v1/videos"
SMALL = {"prompt": "a boat", "size": "64x64", "num_frames": 5, "num_inference_steps": 2, "seed": 4, "fps": 8}


@pytest.fixture(scope="module")
def wan() -> Iterator[ParallelPipeline]:
    with ParallelPipeline(build("wan").pipe, devices="cpu") as found:
        yield found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("videos")


@pytest.fixture(scope="module")
def service(wan: ParallelPipeline, folder: Path) -> Iterator[ImageService]:
    """A service of a tiny video model. Its first call is left out: it would be of the pipeline's own, large size."""
    generator = ImageGenerator(ServedModel(model="wan", devices=("cpu",)))
    generator.open = lambda: generator.adopt(wan)  # type: ignore[method-assign]
    generator.warm_up = lambda job: None  # type: ignore[method-assign]
    generator.close = lambda: None  # type: ignore[method-assign]
    found = ImageService(generator, ServerSettings(kept=KeptResults(folder=folder), limits=RequestLimits(frames=9)))
    found.load()
    yield found
    found.close()


def test_a_full_queue_refuses_a_file_before_it_is_decoded(service: ImageService, client: Any) -> None:
    most, service._queue._most = service._queue._most, 0
    try:
        refused = client.post(VIDEOS, data={"prompt": "a boat"}, files={"input_reference": b"none"})
    finally:
        service._queue._most = most
    assert error_of(refused, 503)["code"] == "queue_full", "not that it is no image"


@pytest.fixture(scope="module")
def client(service: ImageService) -> Any:
    return client_of(application(service))


def frames_in(data: bytes) -> list[Any]:
    with av.open(io.BytesIO(data)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def expected(wan: ParallelPipeline, tmp_path: Path) -> list[Any]:
    arguments = {"height": 64, "width": 64, "num_frames": 5, "num_inference_steps": 2}
    output = wan(prompt="a boat", generator=torch.Generator().manual_seed(4), **arguments)
    write_video(frames_of(output), str(tmp_path / "a.mp4"), 8)
    return frames_in((tmp_path / "a.mp4").read_bytes())


@pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")
def test_the_client_of_openai(service: ImageService, wan: ParallelPipeline, tmp_path: Path, folder: Path) -> None:
    for client in served_client_of(service):
        video: Any = client.videos.create_and_poll(
            prompt="a boat",
            size="64x64",  # type: ignore[arg-type]
            poll_interval_ms=50,
            extra_body={"num_frames": 5, "num_inference_steps": 2, "seed": 4, "fps": 8},
        )
        assert (video.status, video.progress, video.size) == ("completed", 100, "64x64"), video
        assert float(video.seconds) == 5 / 8
        assert video.expires_at == video.completed_at + 3600
        data = client.videos.download_content(video.id).read()
        assert np.array_equal(frames_in(data), expected(wan, tmp_path))
        thumbnail = client.videos.download_content(video.id, variant="thumbnail").read()
        assert Image.open(io.BytesIO(thumbnail)).format == "WEBP"
        assert [each.id for each in client.videos.list(limit=1)] == [video.id]
        assert client.videos.retrieve(video.id).id == video.id
        assert client.videos.delete(video.id).deleted
        assert list(folder.iterdir()) == []
        with pytest.raises(openai.NotFoundError):
            client.videos.retrieve(video.id)


def served_client_of(service: ImageService) -> Iterator[openai.OpenAI]:
    """A client of a server whose service goes on after it."""
    closes, service.close = service.close, lambda: None  # type: ignore[method-assign]
    try:
        yield from served_client(service)
    finally:
        service.close = closes  # type: ignore[method-assign]


def test_waiting_for_the_file(client: Any, folder: Path) -> None:
    response = client.post(f"{VIDEOS}/sync", json=SMALL)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "video/mp4"
    assert len(frames_in(response.content)) == 5
    assert list(folder.iterdir()) == [], "nothing of it is kept"


def test_cancelled_and_not_ready(client: Any) -> None:
    running, waiting = (client.post(VIDEOS, json={**SMALL, "num_inference_steps": 150}).json() for _ in range(2))
    assert waiting["status"] == "queued"
    assert error_of(client.get(f"{VIDEOS}/{running['id']}/content"), 409)["code"] == "not_ready"
    for video in (waiting, running):
        assert client.post(f"{VIDEOS}/{video['id']}/cancel").status_code == 200
        until(lambda name=video["id"]: client.get(f"{VIDEOS}/{name}").json()["status"] == "failed", "it to end")
        assert client.get(f"{VIDEOS}/{video['id']}").json()["error"]["code"] == "cancelled"
        client.delete(f"{VIDEOS}/{video['id']}")
    poll = client.post(VIDEOS, json={**SMALL, "num_inference_steps": 150})
    assert poll.headers["openai-poll-after-ms"]
    assert client.delete(f"{VIDEOS}/{poll.json()['id']}").json()["object"] == "video.deleted"


@pytest.mark.parametrize("method", ["post", "delete"])
def test_another_request_cancels_one_that_waits_for_the_file(client: Any, method: str) -> None:
    """It is told so, and not that the server ends, after which clients would send it again."""
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.post, f"{VIDEOS}/sync", json={**SMALL, "num_inference_steps": 150})
        until(lambda: client.get(VIDEOS).json()["data"] != [], "it to be queued")
        (video,) = client.get(VIDEOS).json()["data"]
        getattr(client, method)(f"{VIDEOS}/{video['id']}" + ("/cancel" if method == "post" else ""))
        error = error_of(waiting.result(20), 410)
    assert (error["code"], error["type"]) == ("cancelled", "invalid_request_error")
    assert "retry-after" not in waiting.result().headers


def test_who_polls_while_the_workers_end_is_answered(wan: ParallelPipeline) -> None:
    """Which takes seconds: the port ends after them."""
    generator = ImageGenerator(ServedModel(model="wan", devices=("cpu",)))
    generator.open = lambda: generator.adopt(wan)  # type: ignore[method-assign]
    generator.warm_up = lambda job: None  # type: ignore[method-assign]
    service = ImageService(generator, ServerSettings())
    service.load()
    client = client_of(application(service))
    name = client.post(VIDEOS, json=SMALL).json()["id"]
    until(lambda: client.get(f"{VIDEOS}/{name}").json()["status"] == "completed", "the video")
    with patch.object(ParallelPipeline, "close", lambda pipe: None):  # other tests use it
        service.close()
    assert client.get(f"{VIDEOS}/{name}").json()["status"] == "completed"


BAD: list[tuple[dict[str, Any], str | None, str]] = [
    ({"num_frames": 10}, "num_frames", "above_limit"),
    ({"seconds": 4}, "seconds", "invalid_value"),  # and num_frames
    ({"seconds": "long", "num_frames": None}, "seconds", "invalid_value"),
    *(({"seconds": each, "num_frames": None}, "seconds", "invalid_value") for each in ("-1", -1, 0, -0.5, [1])),
    *(({"seconds": each, "num_frames": None}, "seconds", "invalid_value") for each in ("1e308", "nan", 1e308, 10**400)),
    ({"seconds": "4", "num_frames": None}, "seconds", "above_limit"),
    ({"size": "60x60"}, "size", "invalid_size"),
    ({"fps": 0}, "fps", "invalid_value"),
    ({"n": 2}, "n", "unknown_parameter"),
    ({"input_reference": {"image_url": "file:///etc/passwd"}}, "input_reference", "unsupported_parameter"),
    ({"prompt": ""}, "prompt", "invalid_value"),
]


@pytest.mark.parametrize(("fields", "param", "code"), BAD, ids=range(len(BAD)))
def test_bad_fields(client: Any, fields: dict[str, Any], param: str, code: str) -> None:
    error = error_of(client.post(VIDEOS, json={**SMALL, **fields}), 400)
    assert (error["param"], error["code"]) == (param, code), error["message"]


def test_an_image_for_a_model_that_takes_none(client: Any) -> None:
    file = io.BytesIO()
    Image.new("RGB", (64, 64)).save(file, "PNG")
    form = {name: str(value) for name, value in SMALL.items()}
    error = error_of(client.post(VIDEOS, data=form, files={"input_reference": file.getvalue()}), 400)
    assert (error["param"], error["code"]) == ("image", "unsupported_parameter")
    twice = error_of(client.post(VIDEOS, data=form, files=[("input_reference", file.getvalue())] * 2), 400)
    assert (twice["param"], "2 files: send one" in twice["message"]) == ("input_reference", True)


def test_images_and_videos_are_of_their_own_routes(client: Any, request: pytest.FixtureRequest) -> None:
    assert error_of(client.post(PATH, json={"prompt": "a boat", "size": "64x64"}), 400)["code"] == "unsupported_model"
    assert error_of(client.get(f"{VIDEOS}/nothing"), 404)["code"] == "not_found"
    assert error_of(client.get(f"{VIDEOS}/nothing/content?variant=spritesheet"), 400)["param"] == "variant"


def test_a_folder_of_its_own_ends_with_the_server(tmp_path: Path) -> None:
    from patchpar.serving.video_files import VideoFiles

    files = VideoFiles(None)
    made = files.folder
    assert made.stat().st_mode & 0o077 == 0, "no other user reads it"
    files.close()
    assert not made.exists()
