"""The page is this machine's own unless somebody says otherwise, and says what is wrong when it cannot be served."""

from __future__ import annotations

import errno
import os
import signal
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from typer.testing import CliRunner

from app.feeds import VideoFeed
from app.image_runner import ImageJobRunner
from app.server import Address, read_users, serve
from app.state import AppState
from app.workers import AppConfig, devices_of
from patchpar import PlanError
from patchpar.cli import app as command
from patchpar.cli.shutdown import ended_by_signals
from patchpar.launch.shutdown import signals_unwind
from patchpar.media.mp4_fragments import Mp4Fragment, Mp4Header
from patchpar.models.files import embedded_model
from patchpar.web.server import WebServer
from tests.breadth import first_of
from tests.forked import compute_for_ever, forked

from .app_states import client_of, state_of


@pytest.fixture(scope="module")
def state() -> Iterator[AppState]:
    """Of one page for all tests here, which takes a second to build."""
    with closing(state_of()) as found:
        yield found


@pytest.fixture(scope="module")
def client(state: AppState) -> Iterator[TestClient]:
    with client_of(state) as found:
        yield found


def test_the_page_is_there_and_nothing_is_fetched_from_elsewhere(client: TestClient) -> None:
    response = client.get("/")
    assert response.status_code == 200
    assert "fonts.googleapis" not in response.text
    assert client.get("/docs").status_code == 404


def test_a_foreign_name_for_this_machine_is_refused(client: TestClient) -> None:
    """A page elsewhere that points its own name here (DNS rebinding) gets nothing."""
    assert client.get("/", headers={"host": "evil.example"}).status_code == 400
    for own in ("localhost:7860", "[::1]:7860"):
        assert client.get("/", headers={"host": own}).status_code == 200


@pytest.mark.parametrize("path", ["/gradio_api/file=/etc/passwd", "/gradio_api/file=../../etc/passwd", "/live/../x"])
def test_files_of_this_machine_are_not_served(client: TestClient, path: str) -> None:
    response = client.get(path)
    assert response.status_code in (403, 404)
    assert "root:" not in response.text


def test_a_stream_is_found_by_its_name_only(client: TestClient, state: AppState) -> None:
    feed = state.feeds.add(VideoFeed())
    feed.put(Mp4Header(mime="video/mp4", data=b"vi"), [Mp4Fragment(data=b"deo", is_key=True)])
    feed.close()
    response = client.get(f"/{feed.address}")
    assert (response.content, response.headers["content-type"]) == (b"video", "video/mp4")
    assert client.get("/live/another").status_code == 404


def test_uploads_are_limited(client: TestClient) -> None:
    high_res = {"files": ("a.png", b"x" * (21 * 2**20), "image/png")}
    assert client.post("/gradio_api/upload", files=high_res).status_code == 413
    assert client.post("/gradio_api/upload", files={"files": ("a.png", b"x" * 1000, "image/png")}).status_code == 200


FOREIGN = (
    {"origin": "https://evil.example"},
    {"origin": "null"},
    {"origin": "http://127.0.0.1:7861"},  # another server of this machine
    {"origin": "http://127.0.0.1:7860", "sec-fetch-site": "same-site"},
    {"sec-fetch-site": "cross-site"},
    {"origin": "http://["},  # no address at all
)
OWN = (
    {"origin": "http://127.0.0.1:7860"},
    {"origin": "https://name.outside", "sec-fetch-site": "same-origin"},  # through a server that has another name
    {"sec-fetch-site": "none"},
    {},  # no browser
)


@pytest.mark.parametrize("path", ["/gradio_api/upload", "/gradio_api/queue/join", "/gradio_api/run/predict", "/login"])
def test_what_another_page_has_a_browser_do_is_refused(client: TestClient, path: str, state: AppState) -> None:
    """A form needs no permission to send a file here: browsers ask for none."""
    before = list(state.uploads.rglob("*.png"))
    for headers in FOREIGN:
        response = client.post(path, files={"files": ("a.png", b"x", "image/png")}, headers=headers)
        assert (response.status_code, "made by another page" in response.text) == (403, True), headers
    assert list(state.uploads.rglob("*.png")) == before
    for headers in OWN:
        response = client.post(path, files={"files": ("a.png", b"x", "image/png")}, headers=headers)
        assert "made by another page" not in response.text, headers
        assert response.status_code == 200 or not path.endswith("upload")


def test_another_page_may_link_here(client: TestClient) -> None:
    assert client.get("/", headers={"sec-fetch-site": "cross-site"}).status_code == 200


def test_what_people_upload_is_for_nobody_else() -> None:
    """In a folder of this server, which goes with it, and not in one that every user of the machine shares."""
    with closing(state_of()) as state, client_of(state) as client:
        (path,) = client.post("/gradio_api/upload", files={"files": ("a.png", b"x", "image/png")}).json()
        assert Path(path).is_relative_to(state.uploads)
        assert stat.S_IMODE(Path(state.scratch.name).stat().st_mode) == 0o700
        assert client.get(f"/gradio_api/file={path}").content == b"x"
        state.close()
        assert not Path(path).exists()


def test_the_shipped_audio_is_served_from_where_it_is() -> None:
    speech = (embedded_model("embedded-face") / "speech.wav").resolve()
    with closing(state_of()) as state:
        state.workers.setup = AppConfig(face="embedded-face")
        client = client_of(state)
        assert client.get(f"/gradio_api/file={speech}").content == speech.read_bytes()
        assert client.get(f"/gradio_api/file={speech.with_name('model_index.json')}").status_code in (403, 404)


def test_who_has_to_log_in_sees_nothing_before(state: AppState) -> None:
    address = Address(users=(("ann", "secret"),))
    with client_of(state, address) as client:
        assert client.get("/config").status_code == 401
        assert client.post("/gradio_api/upload", files={"files": ("a", b"x", "image/png")}).status_code == 401
        assert client.post("/login", data={"username": "ann", "password": "wrong"}).status_code == 400
        assert client.post("/login", data={"username": "ann", "password": "secret"}).status_code == 200
        assert client.get("/config").status_code == 200


def test_beyond_this_machine_somebody_has_to_log_in_or_to_say_so() -> None:
    for host in ("0.0.0.0", "192.168.1.2", "::", "example.org"):
        with pytest.raises(PlanError, match="add --auth NAME:PASSWORD, or --open"):
            Address(host=host)
        assert Address(host=host, is_open=True).names == ["*"]
        assert Address(host=host, users=(("a", "b"),)).port == 7860
    for host in ("127.0.0.1", "localhost", "::1"):
        assert Address(host=host).is_local
    with pytest.raises(PlanError, match="--port 70000: it must be a number from 1 to 65535, or 0 for any free port"):
        Address(port=70000)


def test_users_come_from_the_command_line_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "users"
    file.write_text("ann:one\n\nbob:two:three\n")
    assert read_users(None) == ()
    assert read_users("ann:one") == (("ann", "one"),)
    assert read_users(str(file)) == (("ann", "one"), ("bob", "two:three"))
    file.write_text("ann:one\n", encoding="utf-8-sig")  # with the mark that some editors begin a file with
    assert read_users(str(file)) == (("ann", "one"),)
    for bad in ("ann", ":x", "ann:"):
        with pytest.raises(PlanError, match="--auth"):
            read_users(bad)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(PlanError, match=f"--auth {file}: it is no text file"):
        read_users(str(file))


def test_a_busy_port_is_a_sentence() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(PlanError, match=f"127.0.0.1:{port} cannot be used: .*; choose another port with --port"):
            WebServer("127.0.0.1", port, "--port")


@pytest.mark.parametrize("host", ["192.0.2.1", "a..b"])
def test_an_address_that_is_none_of_this_machine(host: str) -> None:
    """Of which no other port helps."""
    with pytest.raises(PlanError, match=f"{host}:0 cannot be used: .*; choose an address of this machine with --host"):
        WebServer(host, 0, "--port")


def test_an_address_of_a_machine_without_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel refuses the socket already, before there is one to bind."""

    def refused(*_: object) -> socket.socket:
        raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))

    monkeypatch.setattr(socket, "socket", refused)
    with pytest.raises(PlanError, match=r"::1:0 cannot be used: Address family .*; choose an address of this machine"):
        WebServer("::1", 0, "--port")


def test_without_a_gpu_there_are_two_cpu_workers() -> None:
    names = devices_of("auto").names
    assert names == ("cpu", "cpu") or all(name.startswith("cuda") for name in names)
    assert devices_of("cpu:3").names == ("cpu",) * 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "0.0.0.0"], "everybody who reaches this machine"),
        (["--model", "nowhere"], "'nowhere' is no model"),
        (["--devices", "gpu"], "is not a device"),
        (["--face", "nowhere"], "--face nowhere: there is no such folder; give one, or a hub name such as org/model"),
        (["--auth", "ann"], "--auth ann: No such file or directory; give NAME:PASSWORD"),
    ],
)
def test_what_cannot_work_is_reported_before_anything_is_started(arguments: list[str], message: str) -> None:
    response = CliRunner().invoke(command, ["app", "--port", "0", *arguments])
    assert response.exit_code == 2
    assert message in response.output


def test_a_model_that_is_none_is_refused_early() -> None:
    with pytest.raises(PlanError, match="no model"):
        AppConfig(model="nowhere").check()


@pytest.mark.parametrize(
    ("number", "code"), first_of([(signal.SIGINT, 130), (signal.SIGTERM, 143)], (signal.SIGTERM, 143))
)
def test_a_first_call_in_its_own_process_is_abandoned(
    number: signal.Signals, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has no end, and in which Python handles no signal."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def work() -> None:
        ImageJobRunner.prepare = compute_for_ever  # type: ignore[method-assign]
        setup, address = AppConfig(devices=devices_of("cpu")), Address(port=0)
        with ended_by_signals():
            serve(setup, address, lambda url: os.write(1, b"served"), lambda: None)

    with forked(work, tmp_path / "errors") as child:
        child.wait_for(b"served")
        child.wait_for()
        assert list(tmp_path.glob("patchpar-app-*"))
        child.ends_by(number, code)
    assert list(tmp_path.glob("patchpar-app-*")) == []


def hung_up_then_terminated() -> None:
    with signals_unwind():
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGTERM)


def test_signals_that_are_ignored_stay_ignored_and_handlers_come_back() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    terminated = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as page_left:
            hung_up_then_terminated()
        assert page_left.value.code == 143
        assert signal.getsignal(signal.SIGTERM) == terminated
    finally:
        signal.signal(signal.SIGHUP, before)
