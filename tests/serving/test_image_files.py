"""Links to images: whoever has one may fetch its file, until it expires."""

from __future__ import annotations

import base64
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from patchpar.errors import PlanError
from patchpar.serving.api_keys import ApiKeys
from patchpar.serving.http.application import application
from patchpar.serving.image_files import MAX_IMAGES, ImageFiles
from patchpar.serving.request_error import RequestError
from patchpar.serving.service import ImageService
from patchpar.serving.settings import KeptResults, ServerSettings
from tests.serving.fakes import FakeGenerator
from tests.serving.requests import HOME, PATH, client_of, until
from tests.serving.test_http import error_of

KEY = "0123456789abcdef-key"
BODY = {"prompt": "a fox", "size": "64x64", "seed": 3, "response_format": "url"}


@pytest.fixture
def app(fake: FakeGenerator, tmp_path: Path) -> Iterator[Any]:
    settings = ServerSettings(keys=ApiKeys.of(KEY), kept=KeptResults(folder=tmp_path, seconds=60))
    service = ImageService(fake, settings)  # type: ignore[arg-type]
    service.load()
    yield application(service)
    service.close()


@pytest.mark.parametrize("output_format", ["png", "webp"])
def test_a_link_is_the_image_and_needs_no_key(app: Any, tmp_path: Path, output_format: str) -> None:
    client = client_of(app, KEY)
    body = {**BODY, "output_format": output_format, "n": 2}
    links = [each["url"] for each in client.post(PATH, json=body).json()["data"]]
    images = client.post(PATH, json={**body, "response_format": "b64_json"}).json()["data"]
    assert len(set(links)) == 2
    for link, image in zip(links, images, strict=True):
        assert link.startswith(f"{HOME}/v1/files/file_")
        response = client_of(app).get(link)
        assert response.content == base64.b64decode(image["b64_json"])
        assert response.headers["content-type"] == f"image/{output_format}"
    assert error_of(client_of(app).get("/v1/models"), 401)["code"] == "invalid_api_key"
    path = tmp_path / links[0].rpartition("/")[2]
    os.utime(path, (time.time() - 61,) * 2)
    assert error_of(client.get(links[0]), 404)["code"] == "not_found"
    client.post(PATH, json=body)
    assert not path.exists(), "it has expired"


def test_a_folder_that_takes_no_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the model is loaded, and not after the first video has been made."""
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # tests may run as root, who may all
    with pytest.raises(PlanError, match=r"--files .*: it cannot be written to: change its permissions"):
        KeptResults(folder=tmp_path)


@pytest.mark.parametrize(
    ("given", "prefix"),
    [
        ("/patchpar", "/patchpar"),
        ("images/2/", "/images/2"),
        ("/outer, /inner/", "/outer/inner"),
        ("//evil.example", "/evil.example"),
        ('/a b"<', "/a%20b%22%3C"),
        ("/", ""),
        (" , ", ""),
    ],
)
def test_links_begin_with_the_path_of_a_proxy(app: Any, given: str, prefix: str) -> None:
    """Which has removed it from the path that the server sees, so that nobody else knows it."""
    client, named = client_of(app, KEY), {"X-Forwarded-Prefix": given}
    link = client.post(PATH, json=BODY, headers=named).json()["data"][0]["url"]
    assert link.startswith(f"{HOME}{prefix}/v1/files/file_")
    job = client.post(f"{PATH}?async=true", json=BODY).json()["id"]
    until(lambda: client.get(f"/v1/jobs/{job}").json()["status"] == "completed", "the job")
    for headers, wanted in ((named, prefix), ({}, "")):
        result = client.get(f"/v1/jobs/{job}", headers=headers).json()["result"]
        assert result["data"][0]["url"].startswith(f"{HOME}{wanted}/v1/files/file_")


def test_one_server_at_a_time_uses_a_folder(tmp_path: Path) -> None:
    """Another one would delete its files by limits of its own. The folder of the journal may be the same."""
    settings, fake = ServerSettings(kept=KeptResults(folder=tmp_path)), FakeGenerator()
    first = ImageService(fake, settings)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"--files .*: another server uses it: end that one first, or use another"):
        ImageService(fake, settings)  # type: ignore[arg-type]
    first.close()
    ImageService(fake, replace(settings, journal=tmp_path)).close()  # type: ignore[arg-type]


def test_a_job_has_links_and_takes_its_files_with_it(app: Any, tmp_path: Path) -> None:
    client = client_of(app, KEY)
    name = client.post(f"{PATH}?async=true", json=BODY).json()["id"]
    until(lambda: client.get(f"/v1/jobs/{name}").json()["status"] == "completed", "the job")
    link = client.get(f"/v1/jobs/{name}").json()["result"]["data"][0]["url"]
    assert client.get(link).status_code == 200
    client.delete(f"/v1/jobs/{name}")
    assert client.get(link).status_code == 404
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["keys.txt", "..%2Fkeys.txt", "file_%s.png" % ("0" * 48), "file_%s.txt" % ("0" * 48)])
def test_nothing_else_of_the_folder_is_served(app: Any, tmp_path: Path, name: str) -> None:
    (tmp_path / "keys.txt").write_text(KEY)
    (tmp_path / f"file_{'0' * 48}.txt").write_text(KEY)
    assert client_of(app).get(f"/v1/files/{name}").status_code == 404


def test_without_a_folder_there_are_no_links(fake: Any) -> None:
    service = ImageService(fake, ServerSettings())
    service.load()
    error = error_of(client_of(application(service)).post(PATH, json=BODY), 400)
    assert (error["param"], error["code"]) == ("response_format", "unsupported_parameter")
    assert "--files" in error["message"]
    service.close()


def test_files_take_no_more_bytes_than_are_kept(tmp_path: Path) -> None:
    files = ImageFiles(KeptResults(folder=tmp_path, gigabytes=10e-9))
    links = [files.store(bytes(4), "png") for _ in range(2)]
    os.utime(tmp_path / links[0].rpartition("/")[2], (time.time() - 100,) * 2)
    files.store(bytes(6), "png")
    with pytest.raises(RequestError, match="expired"):
        files.find(links[0].rpartition("/")[2])
    assert files.find(links[1].rpartition("/")[2]).read_bytes() == bytes(4)


def test_the_oldest_files_go_first(tmp_path: Path) -> None:
    files = ImageFiles(KeptResults(folder=tmp_path, count=1))
    links = [files.store(bytes([number]), "png") for number in range(MAX_IMAGES)]
    for number, link in enumerate(links):
        os.utime(tmp_path / link.rpartition("/")[2], (time.time() - 100 + number,) * 2)
    files.store(b"one more", "png")
    with pytest.raises(RequestError, match="expired"):
        files.find(links[0].rpartition("/")[2])
    assert files.find(links[1].rpartition("/")[2]).read_bytes() == b"\x01"
