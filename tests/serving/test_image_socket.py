"""The WebSocket of images: one in, one out, in order; of those that come too fast the newest."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import websockets.sync.client
from PIL import Image
from starlette.websockets import WebSocketDisconnect

from patchpar.serving.api_keys import ApiKeys
from patchpar.serving.http import image_socket
from patchpar.serving.http.application import application
from patchpar.serving.http.image_socket import MAX_MESSAGE, PATH, ImageSocket
from patchpar.serving.http.job_outcome import submitted
from patchpar.serving.job import Job
from patchpar.serving.request_error import RequestError
from patchpar.serving.service import ImageService
from patchpar.serving.settings import ServedModel, ServerSettings
from patchpar.serving.uploaded_image import check_upload
from tests.serving.fakes import MODEL, FakeGenerator
from tests.serving.requests import Connected, client_of, example_of_the_page, is_busy, until

SETTINGS = {"prompt": "a fox", "strength": 0.5, "seed": 3}
KEY = "0123456789abcdef-key"
HOST = {"host": "127.0.0.1"}


def generator_of(**served: Any) -> Any:
    """Of a model that begins with an image."""
    fake = FakeGenerator(ServedModel(model="fake", **{"devices": ("cpu",), **served}))
    fake.description = replace(MODEL, parameters={**MODEL.parameters, "image": None, "strength": 0.8})
    return fake


@pytest.fixture
def editing() -> Iterator[tuple[Any, Any, ImageService]]:
    fake = generator_of()
    service = ImageService(fake, ServerSettings())
    service.load()
    yield client_of(application(service)), fake, service
    fake.gate.set()
    service.close()


def file_of(side: int = 64, kind: str = "JPEG") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (side, 64)).save(file, kind)
    return file.getvalue()


def received(socket: Any) -> tuple[dict[str, Any], Any]:
    """A message of an image, and the image."""
    message = socket.receive_json()
    assert message["type"] == "image", message
    image = Image.open(io.BytesIO(socket.receive_bytes()))
    return message, image


def test_an_image_for_each_with_the_settings_before_it(editing: Any) -> None:
    client, fake, service = editing
    with client.websocket_connect(PATH, headers=HOST) as socket:
        socket.send_json(SETTINGS)
        assert socket.receive_json() == {"type": "settings", "seed": 3}
        socket.send_bytes(file_of(64))
        message, image = received(socket)
        assert (message["number"], message["dropped"], image.format, image.size) == (0, 0, "JPEG", (64, 64))
        socket.send_json({"prompt": "a cat", "output_format": "webp"})
        seed = socket.receive_json()["seed"]
        socket.send_bytes(file_of(128, "PNG"))
        message, image = received(socket)
        assert (message["number"], image.format, image.size) == (1, "WEBP", (128, 64))
    first, second = fake.calls
    assert (first.arguments["prompt"], first.arguments["strength"], first.seed) == ("a fox", 0.5, 3)
    assert first.arguments["image"].size == (64, 64)
    assert (second.arguments["prompt"], second.seed) == ("a cat", seed)
    until(lambda: not is_busy(service), "nothing to be left")


def test_the_example_of_the_page(editing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    client, fake, _ = editing

    def connect(address: str) -> Connected:
        return Connected(client.websocket_connect(address, headers=HOST))

    monkeypatch.setattr(websockets.sync.client, "connect", connect)
    exec(example_of_the_page('/v1/images"'), names := {"frames": [file_of(64), file_of(128)]})
    assert names["image"].size == (128, 64)
    assert [call.arguments["prompt"] for call in fake.calls] == ["a watercolour"] * 2


def test_of_images_that_come_too_fast_the_newest_is_used(editing: Any) -> None:
    client, fake, _ = editing
    fake.gate.clear()
    with client.websocket_connect(PATH, headers=HOST) as socket:
        socket.send_json(SETTINGS)
        socket.receive_json()
        socket.send_bytes(file_of(64))
        assert fake.started.wait(20)
        for side in (72, 80, 88):
            socket.send_bytes(file_of(side))
        socket.send_json(SETTINGS)  # answered once the images before it have come
        assert socket.receive_json()["type"] == "settings"
        fake.gate.set()
        assert [received(socket)[1].size[0] for _ in range(2)] == [64, 88]
    assert len(fake.calls) == 2


def test_an_image_that_waits_keeps_the_settings_that_came_before_it(editing: Any) -> None:
    client, fake, _ = editing
    fake.gate.clear()
    with client.websocket_connect(PATH, headers=HOST) as socket:
        socket.send_json(SETTINGS)
        socket.receive_json()
        socket.send_bytes(file_of())
        assert fake.started.wait(20)
        socket.send_bytes(file_of())
        socket.send_json({**SETTINGS, "prompt": "a cat", "output_format": "webp"})
        assert socket.receive_json()["type"] == "settings"
        fake.gate.set()
        assert [received(socket)[1].format for _ in range(2)] == ["JPEG", "JPEG"]
    assert [call.arguments["prompt"] for call in fake.calls] == ["a fox", "a fox"]


def test_images_are_decoded_two_at_a_time_as_uploads_are(editing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message of some kilobytes may be 320 MB while it is checked, and there may be any number of clients."""
    used = list[str]()

    def noted(data: bytes, name: str) -> Any:
        used.append(threading.current_thread().name)
        return check_upload(data, name)

    monkeypatch.setattr(image_socket, "check_upload", noted)
    with editing[0].websocket_connect(PATH, headers=HOST) as socket:
        socket.send_json(SETTINGS)
        socket.receive_json()
        socket.send_bytes(file_of())
        received(socket)
    assert [name.rpartition("_")[0] for name in used] == ["patchpar-uploads"]


def test_as_many_at_once_as_there_are_devices_for() -> None:
    fake = generator_of(devices=("cpu",) * 2, per_request=1)
    service = ImageService(fake, ServerSettings())
    service.load()
    fake.gate.clear()
    with client_of(application(service)).websocket_connect(PATH, headers=HOST) as socket:
        socket.send_json(SETTINGS)
        socket.receive_json()
        for number in range(2):
            socket.send_bytes(file_of(64 + 8 * number))
            until(lambda number=number: len(fake.calls) == number + 1, "it to begin")  # type: ignore[misc]
        fake.gate.set()
        assert [received(socket)[0]["number"] for _ in range(2)] == [0, 1]
    service.close()


def test_an_image_in_work_keeps_its_settings(editing: Any) -> None:
    client, fake, _ = editing
    fake.gate.clear()
    with client.websocket_connect(PATH, headers=HOST) as socket:
        socket.send_json(SETTINGS)
        socket.receive_json()
        socket.send_bytes(file_of())
        assert fake.started.wait(20)
        socket.send_json({**SETTINGS, "output_format": "webp"})
        assert socket.receive_json()["type"] == "settings"
        fake.gate.set()
        assert received(socket)[1].format == "JPEG"


def test_nothing_comes_between_an_image_and_what_is_said_of_it() -> None:
    """A client takes the next binary message for the file of the image that was announced."""
    sent: list[Any] = []

    class Slow:
        async def send_json(self, message: Any) -> None:
            sent.append(message["type"])
            await asyncio.sleep(0.01)

        async def send_bytes(self, data: bytes) -> None:
            sent.append(data)

    async def both() -> None:
        socket = ImageSocket(Slow(), None, "")  # type: ignore[arg-type]
        await asyncio.gather(socket._say({"type": "image"}, b"file"), socket._say({"type": "error"}))

    asyncio.run(both())
    assert sent == ["image", b"file", "error"]


@pytest.mark.parametrize("fails", [False, True])
def test_a_request_that_is_queued_for_nobody_is_cancelled(fails: bool) -> None:
    """The client has gone while its image was scaled."""
    job, gate = Job(lambda job: None), threading.Event()

    def submit() -> Job:
        assert gate.wait(20)
        if fails:
            raise RequestError("it is refused")
        return job

    async def cancelled() -> None:
        task = asyncio.create_task(submitted(submit))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.set()
        while not fails and not job.view.is_over:
            await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(cancelled(), 20))
    assert job.view.is_over != fails


def test_another_site_takes_no_tickets(editing: Any) -> None:
    """It could not read them, but those that are open at the same time are few."""
    client, _, _ = editing
    response = client.post(f"{PATH}/tickets", headers={"Origin": "http://other.example"})
    assert (response.status_code, response.json()["error"]["code"]) == (403, "foreign_origin")
    assert client.post(f"{PATH}/tickets").status_code == 200


def test_who_leaves_cancels_what_is_in_work(editing: Any) -> None:
    client, fake, service = editing
    fake.gate.clear()
    with client.websocket_connect(PATH, headers=HOST) as socket:
        socket.send_json(SETTINGS)
        socket.receive_json()
        socket.send_bytes(file_of())
        assert fake.started.wait(20)
    until(lambda: not is_busy(service), "it to be cancelled")


def test_bad_messages_end_nothing(editing: Any) -> None:
    client, _, _ = editing
    with client.websocket_connect(PATH, headers=HOST) as socket:
        socket.send_bytes(file_of())
        assert socket.receive_json()["error"]["param"] == "prompt"
        for text, param in (
            ("{", None),
            ('{"prompt": ""}', "prompt"),
            ('{"prompt": "a", "promt": 1}', "promt"),
            ('{"prompt": "a", "n": 2}', "n"),
            ('{"prompt": "a", "response_format": "url"}', "response_format"),
            ('{"prompt": "a", "image": "/etc/passwd"}', "image"),
        ):
            socket.send_text(text)
            message = socket.receive_json()
            assert (message["type"], message["error"]["param"]) == ("error", param)
        socket.send_json(SETTINGS)
        socket.receive_json()
        for data in (b"", b"no image", b"0" * (MAX_MESSAGE + 1)):
            socket.send_bytes(data)
            assert socket.receive_json()["error"]["code"] in ("invalid_image", "body_too_large")
        socket.send_bytes(file_of())
        assert received(socket)[1].size == (64, 64)


def test_a_full_queue_refuses_an_image_before_it_is_decoded(editing: Any) -> None:
    client, _, service = editing
    service._queue._most = 0
    with client.websocket_connect(PATH, headers=HOST) as socket:
        socket.send_json(SETTINGS)
        socket.receive_json()
        socket.send_bytes(b"no image")
        assert socket.receive_json()["error"]["code"] == "queue_full", "not that it is no image"


def test_a_model_that_takes_no_image(client: Any) -> None:
    with client.websocket_connect(PATH, headers=HOST) as socket:
        socket.send_json({"prompt": "a"})
        socket.receive_json()
        socket.send_bytes(file_of())
        assert "takes no image" in socket.receive_json()["error"]["message"]


def test_keys_tickets_and_other_sites() -> None:
    service = ImageService(generator_of(), ServerSettings(keys=ApiKeys.of(KEY)))
    service.load()
    app = application(service)
    authorized = {"Authorization": f"Bearer {KEY}"}
    for headers in ({}, {**authorized, "Origin": "http://other.example"}, {**authorized, "host": "other.example"}):
        with pytest.raises(WebSocketDisconnect), client_of(app).websocket_connect(PATH, headers={**HOST, **headers}):
            pass
    foreign = client_of(app, KEY).post(f"{PATH}/tickets", headers={"Origin": "http://other.example"})
    assert (foreign.status_code, foreign.json()["error"]["code"]) == (403, "foreign_origin")
    ticket = client_of(app, KEY).post(f"{PATH}/tickets").json()
    with client_of(app).websocket_connect(PATH, headers=HOST, subprotocols=ticket["protocols"]) as socket:
        socket.send_json(SETTINGS)
        assert socket.receive_json()["type"] == "settings"
    assert client_of(app).post(f"{PATH}/tickets").status_code == 401
    service.close()
