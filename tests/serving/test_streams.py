"""Streams over HTTP and WebSockets: video out, audio and controls in, limits, and a model that is none for them."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
import threading
import wave
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import fields, replace
from socket import SHUT_RDWR
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
import pytest
import websockets.sync.client
from PIL import Image
from starlette.websockets import WebSocketDisconnect
from typer.testing import CliRunner
from websockets.sync.client import ClientConnection, connect

from patchpar.cli import app as command
from patchpar.cli.serve import OF_IMAGES, OF_STREAMS, ServeFlags
from patchpar.serving.api_keys import ApiKeys
from patchpar.serving.http.application import stream_application
from patchpar.serving.http.stream_socket import applied
from patchpar.serving.request_error import RequestError
from patchpar.serving.settings import RequestLimits, ServedModel, ServerSettings
from patchpar.serving.streams import live_stream
from patchpar.serving.streams.stream_request import LiveStreamRequest, parse_control, reference_of
from patchpar.serving.streams.stream_service import StreamService, StreamSlots
from patchpar.stream.causal.pipeline import StreamingPipeline
from patchpar.web.server import HOME, WebServer
from tests.serving.requests import Connected, client_of, example_of_the_page, until
from tests.serving.test_http import KEY, error_of
from tests.stream.tiny import write_folder
from tests.web.test_pages import jpegs

STREAMS = "/v1/streams"
WS = "ws://127.0.0.1"
SHORT = {"seed": 3, "seconds": 0.5}


@pytest.fixture(scope="module")
def face(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StreamingPipeline]:
    with StreamingPipeline.from_pretrained(write_folder(tmp_path_factory.mktemp("face")), devices="cpu") as pipe:
        yield pipe


def service_with(pipe: StreamingPipeline, **settings: Any) -> StreamService:
    found = StreamService(ServedModel(model="face", devices=("cpu",)), ServerSettings(**settings))
    found.adopt([pipe])
    return found


@pytest.fixture
def streams(face: StreamingPipeline) -> Iterator[StreamService]:
    found = service_with(face, limits=RequestLimits(stream_seconds=30.0))
    yield found
    for stream in found._streams.values():
        stream.cancel()
        assert stream.over.wait(20)


@pytest.fixture
def client(streams: StreamService) -> Any:
    return client_of(stream_application(streams))


def frames_in(data: bytes) -> list[Any]:
    with av.open(io.BytesIO(data)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def received(socket: Any, until_type: str) -> tuple[list[dict[str, Any]], bytes]:
    """JSON messages and media of a WebSocket, up to a message of that type."""
    messages: list[dict[str, Any]] = []
    media = b""
    while not messages or messages[-1]["type"] != until_type:
        message = socket.receive()
        if message.get("bytes") is not None:
            media += message["bytes"]
        else:
            messages.append(json.loads(message["text"]))
    return messages, media


def made(pipe: StreamingPipeline, seed: int) -> list[Any]:
    with pipe.stream(seed=seed, seconds=SHORT["seconds"]) as session:
        return [frame.numpy() for chunk in session for frame in chunk.frames]


def off(found: list[Any], wanted: list[Any]) -> float:
    """Mean difference of brightness; colours have half the resolution in the video."""
    return float(np.abs(np.stack(found).mean(-1) - np.stack(wanted).mean(-1)).mean())


def test_the_video_of_a_stream_is_that_of_python(client: Any, face: StreamingPipeline) -> None:
    created = client.post(STREAMS, json=SHORT).json()
    with client.websocket_connect(f"{WS}{STREAMS}/{created['id']}") as socket:
        messages, media = received(socket, "media_end")
    assert {"media_init", "status"} <= {each["type"] for each in messages}
    found = frames_in(media)
    until(lambda: client.get(f"{STREAMS}/{created['id']}").json()["status"] == "finished", "its end")
    assert len(found) == len(made(face, 3))
    assert off(found, made(face, 3)) < 0.7 * off(found, made(face, 4)), "but for H.264; a control: another seed"
    view = client.get(f"{STREAMS}/{created['id']}").json()
    assert (view["status"], view["error"], view["object"]) == ("finished", None, "stream")
    assert client.get(STREAMS).json()["data"][0]["id"] == created["id"]


def test_the_example_of_the_page(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads to the end, and its prompt is taken."""
    created = client.post(STREAMS, json=SHORT).json()
    read: list[str | bytes] = []

    class Reading(Connected):
        def recv(self) -> str | bytes:
            read.append(super().recv())
            return read[-1]

    monkeypatch.setattr(websockets.sync.client, "connect", lambda url: Reading(client.websocket_connect(url)))
    exec(example_of_the_page("/v1/streams/"), {"created": created})
    kinds = [json.loads(message)["type"] for message in read if isinstance(message, str)]
    assert "effect" in kinds
    assert "error" not in kinds
    assert kinds[-1] == "media_end"
    assert any(isinstance(message, bytes) for message in read)


@pytest.mark.parametrize(
    ("wanted", "is_aside"), [({"type": "reference", "image": "AAAA"}, True), ({"type": "stop"}, False)]
)
def test_images_of_controls_are_decoded_as_those_of_requests(wanted: dict[str, str], is_aside: bool) -> None:
    """Two at a time: each may take hundreds of megabytes meanwhile."""
    threads: list[str] = []
    stream: Any = SimpleNamespace(control=lambda _: threads.append(threading.current_thread().name) or {})
    asyncio.run(applied(stream, parse_control(json.dumps(wanted))))
    assert threads[0].startswith("patchpar-uploads") is is_aside


@pytest.mark.parametrize(
    ("wanted", "param", "code", "message"),
    [
        ({}, "type", "missing_parameter", "type is missing"),
        ({"type": "prompt"}, "text", "missing_parameter", "prompt: text is missing"),
        ({"type": "param", "name": "audio_scale"}, "value", "missing_parameter", "param: value is missing"),
        ({"type": "stop", "at": 3}, "at", "unsupported_parameter", "at does not go with stop: leave it out"),
        ({"type": "prompt", "txt": "a"}, "txt", "unknown_parameter", "did you mean 'text'?"),
        ([], None, "invalid_json", 'the body is no JSON object: send {"type": ...}'),
    ],
)
def test_a_control_that_is_refused(wanted: Any, param: str | None, code: str, message: str) -> None:
    with pytest.raises(RequestError, match=re.escape(message)) as found:
        parse_control(json.dumps(wanted))
    assert (found.value.param, found.value.code) == (param, code)


@pytest.mark.parametrize("image", ["*", "AAAA"])
def test_an_image_of_a_control_that_is_none(image: str) -> None:
    with pytest.raises(RequestError, match="image"):
        reference_of(parse_control(json.dumps({"type": "reference", "image": image})))


def test_who_watches_images_gets_those_that_are_made_then(client: Any, streams: StreamService) -> None:
    """As MJPEG, until the stream ends."""
    created = client.post(STREAMS, json={"audio": "live", "audio_rate": 16000}).json()
    path, stream = f"{STREAMS}/{created['id']}", streams.get(created["id"], "")
    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(client.get, f"{path}/images")
        until(lambda: stream.images.watchers == 1, "who watches")
        for _ in range(3):
            stream.push(bytes(16000))
        until(lambda: stream.seconds > 0.5, "frames")
        assert client.post(f"{path}/controls", json={"type": "stop"}).json()["of"] == "stop"
        response = watching.result(60)
    assert response.headers["content-type"].startswith("multipart/x-mixed-replace")
    found = list(jpegs(io.BytesIO(response.content)))
    assert len(found) > 5
    assert stream.images.watchers == 0


def test_files_of_a_stream_that_do_not_go_together(client: Any) -> None:
    twice = client.post(STREAMS, data={"seed": "1"}, files=[("reference", b"a"), ("reference", b"b")])
    assert "2 files: send one" in error_of(twice, 400)["message"]
    both = client.post(STREAMS, data={"audio": "live"}, files={"audio_file": ("a.wav", wav_of(1))})
    assert "send one of them" in error_of(both, 400)["message"]
    assert client.post(STREAMS, json=SHORT).status_code == 200, "neither takes a slot"


def test_audio_and_controls(client: Any, streams: StreamService) -> None:
    created = client.post(STREAMS, json={"audio": "live", "audio_rate": 16000}).json()
    path = f"{STREAMS}/{created['id']}"
    stream = streams.get(created["id"], "")
    with client.websocket_connect(WS + path) as socket:
        assert stream.seconds == 0, "it waits for audio"
        for _ in range(4):
            socket.send_bytes(bytes(16000))
        socket.send_json({"type": "param", "name": "audio_scale", "value": 0.5})
        messages, _ = received(socket, "effect")
        assert messages[-1]["of"] == "param"
        assert messages[-1]["block"] >= 0
        until(lambda: stream.seconds > 0, "frames")
        socket.send_json({"type": "parm"})
        assert received(socket, "error")[0][-1]["error"]["param"] == "type"
        socket.send_bytes(b"odd")
        assert "2 bytes each" in received(socket, "error")[0][-1]["error"]["message"]
        socket.send_bytes(bytes(2 << 19))
        socket.send_bytes(bytes(2 << 19))
        assert received(socket, "error")[0][-1]["error"]["code"] == "above_limit"
        assert client.post(f"{path}/controls", json={"type": "interrupt"}).json()["of"] == "interrupt"
        socket.send_json({"type": "stop"})
        messages, _ = received(socket, "media_end")
    assert client.get(path).json()["status"] in ("finished", "running")


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"promt": "a"}, "promt", "unknown_parameter"),
        ({"lora": []}, "lora", "unknown_parameter"),
        ({"audio": "file:///etc/passwd"}, "audio", "invalid_value"),
        ({"audio_rate": 16000}, "audio_rate", "unsupported_parameter"),
        ({"seconds": 31}, "seconds", "above_limit"),
        ({"seconds": 0}, "seconds", "invalid_value"),
        ({"fps": 1000}, "fps", "invalid_value"),
        ({"fps": 0.001}, "fps", "invalid_value"),
        ({"seed": -1}, "seed", "invalid_value"),
        ({"model": "other"}, "model", "model_not_found"),
    ],
)
def test_a_bad_stream_is_refused_and_takes_no_slot(client: Any, body: Any, param: str, code: str) -> None:
    error = error_of(client.post(STREAMS, json=body), 404 if code == "model_not_found" else 400)
    assert (error["param"], error["code"]) == (param, code)
    assert client.post(STREAMS, json=SHORT).status_code == 200


def test_slots_idle_streams_and_the_end(client: Any, streams: StreamService, monkeypatch: Any) -> None:
    """A second stream is refused while the first has the devices; one that nobody watches ends by itself."""
    first = client.post(STREAMS, json={"audio": "live"}).json()["id"]
    response = client.post(STREAMS, json=SHORT)
    assert error_of(response, 503)["code"] == "queue_full"
    assert response.headers["retry-after"]
    undecoded = client.post(STREAMS, files={"reference": ("a.png", b"none")}, data={"seed": "1"})
    assert error_of(undecoded, 503)["code"] == "queue_full", "not that it is no image"
    assert client.get(f"{STREAMS}/{first}").json()["status"] != "cancelled"
    monkeypatch.setattr(live_stream, "IDLE_SECONDS", 0.6)
    until(lambda: client.get(f"{STREAMS}/{first}").json()["status"] == "cancelled", "it to end")
    until(lambda: client.post(STREAMS, json=SHORT).status_code == 200, "the slot")
    assert client.get("/health/ready").status_code == 200
    assert streams.drain(20)
    assert error_of(client.post(STREAMS, json=SHORT), 503)["code"] == "draining"
    assert client.get("/health/ready").status_code == 503
    assert error_of(client.get(f"{STREAMS}/nothing"), 404)["code"] == "not_found"


def test_images_video_and_a_reference(client: Any) -> None:
    file = io.BytesIO()
    Image.new("RGB", (40, 40), "red").save(file, "PNG")
    form = {"files": {"reference": ("a.png", file.getvalue())}, "data": {"seed": "1", "seconds": "0.5"}}
    created = client.post(STREAMS, **form).json()
    assert created["object"] == "stream", created
    video = client.get(f"{STREAMS}/{created['id']}/video")
    data = video.content
    assert len(frames_in(data)) > 1
    assert video.headers["x-accel-buffering"] == "no"
    events = client.get(f"{STREAMS}/{created['id']}/events").text
    assert "event: stream.ended" in events
    bad = client.post(STREAMS, files={"reference": ("a.png", b"none")}, data={"seed": "1"})
    assert error_of(bad, 400)["code"] == "invalid_image"
    for name, code in (("audio_file", "invalid_audio"), ("pose", "invalid_video")):
        error = error_of(client.post(STREAMS, files={name: ("a.mp4", b"none")}, data={"seed": "1"}), 400)
        assert (error["param"], error["code"]) == (name, code)
    error = error_of(client.post(STREAMS, files={"pose": ("a.mp4", data)}, data={"seed": "1"}), 400)
    assert "this model takes no pose video" in error["message"]


def test_a_socket_needs_the_key_of_its_stream(face: StreamingPipeline) -> None:
    service = service_with(face, keys=ApiKeys.of(KEY, "another-key-of-someone"))
    app = stream_application(service)
    owner, other = client_of(app, KEY), client_of(app, "another-key-of-someone")
    path = f"{STREAMS}/{owner.post(STREAMS, json=SHORT).json()['id']}"
    for refused in (client_of(app), other):
        with pytest.raises(WebSocketDisconnect), refused.websocket_connect(WS + path):
            pass
    for origin in ("http://evil.example", "null", "http://["):
        with pytest.raises(WebSocketDisconnect), owner.websocket_connect(WS + path, headers={"Origin": origin}):
            pass
    assert other.get(path).status_code == 404
    with owner.websocket_connect(WS + path) as socket:
        received(socket, "media_end")
    assert service.drain(20)


def test_a_client_that_leaves_is_no_error_of_the_server(
    streams: StreamService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The terminal hears nothing of one that closes its WebSocket, nor of one whose connection is gone."""
    logged = list[str]()
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: logged.append(record.getMessage()))
    stream = streams.create(LiveStreamRequest(audio="live"), "")
    with closing(WebServer(HOME, 0, "--port")) as server:
        server.serve(stream_application(streams))  # which sets handlers of its own
        monkeypatch.setattr(logging.getLogger("uvicorn.error"), "handlers", [handler])
        for leave in (ClientConnection.close, lambda socket: socket.socket.shutdown(SHUT_RDWR)):
            address = f"{server.url.replace('http', 'ws')}{STREAMS}/{stream.id}"
            with connect(address, close_timeout=0.5) as socket:
                assert json.loads(socket.recv(20))["type"] == "status"
                leave(socket)
                until(lambda: stream.watchers == 0, "that nobody watches")
    assert logged == []


def test_a_browser_gets_in_with_a_ticket(face: StreamingPipeline) -> None:
    """It cannot send a key with a WebSocket. A ticket opens the WebSocket of one stream, once; no URL has a secret."""
    service = service_with(face, keys=ApiKeys.of(KEY, "another-key-of-someone"))
    app = stream_application(service)
    owner, other, browser = client_of(app, KEY), client_of(app, "another-key-of-someone"), client_of(app)
    path = f"{STREAMS}/{owner.post(STREAMS, json=SHORT).json()['id']}"
    assert error_of(browser.post(f"{path}/tickets"), 401)["code"] == "invalid_api_key"
    assert error_of(other.post(f"{path}/tickets"), 404)["code"] == "not_found"
    foreign = owner.post(f"{path}/tickets", headers={"Origin": "http://evil.example"})
    assert error_of(foreign, 403)["code"] == "foreign_origin"
    made = owner.post(f"{path}/tickets")
    protocols = made.json()["protocols"]
    assert made.headers["cache-control"] == "no-store"
    wrong = [protocols[0], protocols[1][:-1]]
    for refused, query in ((wrong, ""), (protocols[:1], ""), ([], f"?key={KEY}"), ([KEY], "")):
        with pytest.raises(WebSocketDisconnect), browser.websocket_connect(WS + path + query, subprotocols=refused):
            pass
    with browser.websocket_connect(WS + path, subprotocols=protocols) as socket:
        assert socket.accepted_subprotocol == protocols[0] == "patchpar.stream"
        with pytest.raises(WebSocketDisconnect), browser.websocket_connect(WS + path, subprotocols=protocols):
            pass
        received(socket, "media_end")
    assert service.drain(20)


def wav_of(seconds: float) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as audio:
        audio.setparams((1, 2, 8000, 0, "NONE", ""))
        audio.writeframes(bytes(2 * round(8000 * seconds)))
    return file.getvalue()


def test_audio_longer_than_a_stream_is_refused(face: StreamingPipeline) -> None:
    """A small file can hold days of silence: no more of it is decoded."""
    client = client_of(stream_application(service_with(face, limits=RequestLimits(stream_seconds=1.0))))
    error = error_of(client.post(STREAMS, files={"audio_file": ("a.wav", wav_of(2))}, data={"seed": "1"}), 400)
    assert error["code"] == "invalid_audio"
    assert "audio_file (pcm_s16le, 8000 samples/s, 1 channel) is longer than 1 s" in error["message"]


def test_a_file_of_audio_is_decoded_as_it_is_played(client: Any, streams: StreamService) -> None:
    """An hour of it would take hundreds of megabytes otherwise."""
    created = client.post(STREAMS, files={"audio_file": ("a.wav", wav_of(20))}, data={"seed": "1"}).json()
    source: Any = streams.get(created["id"], "").session._track
    held = source._samples.end - source._samples.start
    assert held < 5 * source._config.rate, "of 20 s"
    assert client.delete(f"{STREAMS}/{created['id']}").status_code == 200


def test_a_model_without_audio_takes_no_file_of_it(
    client: Any, face: StreamingPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(face, "_facts", replace(face._facts, audio=None))
    error = error_of(client.post(STREAMS, files={"audio_file": ("a.wav", wav_of(1))}, data={"seed": "1"}), 400)
    assert (error["param"], error["code"]) == ("audio_file", "unsupported_parameter")
    assert "this model takes no audio" in error["message"]


def test_a_model_that_is_none_for_streams(app: Any) -> None:
    error = error_of(client_of(app).post(STREAMS, json={}), 400)
    assert (error["code"], "embedded-face" in error["message"]) == ("unsupported_model", True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["embedded", "--stream-slots", "1"], "no streaming model"),
        (["embedded", "--max-seconds", "60"], "leave --max-seconds out, or serve a streaming model"),
        (["embedded-face", "--devices", "cpu:2", "--stream-slots", "3"], "use 1 to that many"),
        (["embedded-face", "--lora", "a=b"], "without --lora"),
        (["embedded-face", "--journal", "."], "without --journal"),
        (["embedded-face", "--files", "."], "without --files"),
        (["embedded-face", "--max-queue", "4"], "without --max-queue"),
        (["embedded-face", "--max-seconds", "0"], "--max-seconds"),
        (["embedded-face", "--admin-key-file", "keys.txt"], "without --admin-key-file"),
        (["embedded-face", "--recover", "off"], "without --recover"),
    ],
)
def test_flags(arguments: list[str], message: str) -> None:
    response = CliRunner().invoke(command, ["serve", *arguments])
    assert response.exit_code == 2
    assert message in " ".join(response.output.replace("│", " ").split())


def test_each_flag_is_of_one_kind_of_server_or_of_both() -> None:
    """A flag that is read and not used would be one that people rely on."""
    of_both = {"model", "devices", "dtype", "variant", "host", "port", "api_key_file", "app", "app_auth", "grace"}
    of_both |= {"deadline", "debug"}
    assert not set(OF_IMAGES) & set(OF_STREAMS)
    assert of_both | {*OF_IMAGES, *OF_STREAMS} == {each.name for each in fields(ServeFlags)}


def test_devices_of_slots() -> None:
    slots = StreamSlots(count=2, devices=("a", "b", "c", "d", "e"))
    assert slots.parts == (("a", "b"), ("c", "d", "e"))
