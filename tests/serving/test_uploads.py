"""Images and masks that come with requests: what is no image, too large, of another site, or too much is refused."""

from __future__ import annotations

import gc
import io
import json
import struct
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from PIL import Image

from patchpar.models.task import PipelineTask
from patchpar.serving import uploaded_image
from patchpar.serving.http import images, request_body
from patchpar.serving.http.application import application
from patchpar.serving.http.request_body import MAX_FIELDS, MAX_FILES, MAX_TEXT, FormBody
from patchpar.serving.request_journal import JournaledRequest, RequestJournal
from patchpar.serving.service import ImageService
from patchpar.serving.settings import RequestLimits, ServerSettings
from patchpar.serving.uploaded_image import Uploads, check_mask, check_upload
from tests.serving.fakes import MODEL, FakeGenerator
from tests.serving.requests import PATH, client_of, is_busy, sent_in_parts, until
from tests.serving.test_http import error_of

EDITS = "/v1/images/edits"
FORM = {"prompt": "a fox"}


def png(size: tuple[int, int] = (100, 130), mode: str = "RGB", colour: Any = "red", kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.new(mode, size, colour).save(file, kind)
    return file.getvalue()


def bomb(side: int) -> bytes:
    """A PNG of a few hundred bytes that declares side x side pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 99)) + chunk(b"IEND", b"")
    )


def served(**parameters: Any) -> tuple[Any, FakeGenerator, ImageService]:
    """A client of a server whose pipeline takes these arguments in addition."""
    fake: Any = FakeGenerator()
    fake.description = replace(MODEL, parameters={**MODEL.parameters, **parameters})
    service = ImageService(fake, ServerSettings(limits=RequestLimits(form_bytes=1 << 20)))
    service.load()
    return client_of(application(service)), fake, service


@pytest.fixture(scope="module")
def begun() -> Any:
    """Image-to-image: strength, and no size of its own."""
    client, fake, service = served(image=None, strength=0.8)
    without = {name: value for name, value in fake.description.parameters.items() if name not in ("height", "width")}
    fake.description = replace(fake.description, parameters=without)
    service.prepare()
    yield client, fake
    service.close()


@pytest.fixture(scope="module")
def painted() -> Any:
    """Inpainting: a mask, and sides."""
    client, fake, service = served(image=None, mask_image=None, strength=0.8)
    yield client, fake
    service.close()


@pytest.fixture(scope="module")
def edited() -> Any:
    """A model that edits: images are references."""
    client, fake, service = served(image=None)
    fake.task = PipelineTask(pipeline="Fake", product="images", begins_with="image")
    service.prepare()
    yield client, fake
    service.close()


def test_the_image_decides_the_size(begun: Any) -> None:
    client, fake = begun
    response = client.post(EDITS, data={**FORM, "strength": "0.5", "seed": "7"}, files={"image": png()})
    assert response.status_code == 200, response.text
    call = fake.calls[-1]
    assert call.arguments["image"].size == (96, 128), "on the model's grid"
    assert (call.arguments["strength"], call.seed, call.size) == (0.5, 7, (96, 128))
    client.post(EDITS, data={**FORM, "size": "64x80"}, files={"image": png()})
    assert fake.calls[-1].arguments["image"].size == (64, 80)
    assert "height" not in fake.calls[-1].arguments


def test_a_mask_is_white_where_it_is_transparent(painted: Any) -> None:
    client, fake = painted
    alpha = Image.new("RGBA", (128, 64), (0, 0, 0, 255))
    alpha.paste((0, 0, 0, 0), (0, 0, 64, 64))
    file = io.BytesIO()
    alpha.save(file, "PNG")
    response = client.post(EDITS, data=FORM, files={"image": png((128, 64)), "mask": file.getvalue()})
    assert response.status_code == 200, response.text
    arguments = fake.calls[-1].arguments
    assert (arguments["height"], arguments["width"]) == (64, 128)
    assert [arguments["mask_image"].getpixel(at) for at in ((10, 10), (100, 10))] == [255, 0]


def test_models_that_edit_get_the_images_as_they_are(edited: Any) -> None:
    client, fake = edited
    two = [("image[]", png((100, 50))), ("image[]", png((70, 70)))]
    assert client.post(EDITS, data=FORM, files=two).status_code == 200
    assert [each.size for each in fake.calls[-1].arguments["image"]] == [(100, 50), (70, 70)]
    assert client.post(EDITS, data=FORM, files={"image": png()}).status_code == 200
    assert fake.calls[-1].arguments["image"].size == (100, 130)
    error = error_of(client.post(PATH, json={"prompt": "a fox"}), 400)
    assert (error["code"], error["param"]) == ("missing_parameter", "image")


def test_images_of_a_request_have_so_many_pixels_together(edited: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A form of flat images takes little space, and each is decoded to three bytes for each pixel."""
    for module in (images, uploaded_image):
        monkeypatch.setattr(module, "MAX_PIXELS", 100 * 100)
    client, _ = edited
    for sizes, status in (([100], 200), ([70, 70], 200), ([70, 80], 400), ([60, 60, 60], 400)):
        files = [("image[]", png((side, side))) for side in sizes]
        response = client.post(EDITS, data=FORM, files=files)
        assert response.status_code == status, sizes
    assert "all of a request" in error_of(response, 400)["message"]


def test_jobs_that_wait_keep_files_and_no_pixels(painted: Any) -> None:
    """A file of kilobytes may be 120 MB of pixels, and many requests may wait."""
    client, fake = painted
    before, size = len(fake.calls), (104, 136)
    files = {"image": png(size), "mask": png(size, "RGBA", (0, 0, 0, 0))}
    fake.gate.clear()
    try:
        for _ in range(4):
            assert client.post(f"{EDITS}?async=true", data=FORM, files=files).status_code == 202
        until(lambda: len(fake.calls) > before, "the first of them to run")
        assert len(images_of(size)) == 2, "image and mask of the one that runs"
    finally:
        fake.gate.set()
    until(lambda: len(fake.calls) == before + 4, "all of them")
    arguments = [call.arguments for call in fake.calls[before:]]
    assert {each["image"].getpixel((9, 9)) for each in arguments} == {(255, 0, 0)}
    assert {each["mask_image"].getpixel((9, 9)) for each in arguments} == {255}


def test_a_journal_keeps_the_pixels(tmp_path: Path) -> None:
    """Of the next server, whose requests keep files too."""
    size, clear = (30, 20), png((30, 20), "RGBA", (0, 0, 0, 0))
    given = Uploads(images=(check_upload(png(size), "image"),), mask=check_mask(clear, "mask", size))
    facts = {"id": f"job_{0:024x}", "model": "fake", "route": "edit", "owner": "", "seed": 1, "created_at": 1}
    journal = RequestJournal(tmp_path)
    journal.save(JournaledRequest(**facts, request={"prompt": "a fox"}, uploads=given))
    (entry,) = journal.entries("fake")
    journal.close()
    found = entry.uploads
    assert [each.size for each in found.images] == [size]
    assert found.images[0].decoded().tobytes() == given.images[0].decoded().tobytes()
    assert found.mask.resized((6, 4)).decoded().tobytes() == bytes([255] * 24)
    assert found.mask.decoded().mode == "L"


def images_of(size: tuple[int, int]) -> list[Image.Image]:
    """The images of a size that are in memory."""
    gc.collect()
    return [each for each in gc.get_objects() if isinstance(each, Image.Image) and each.size == size]


CASES: list[tuple[str, dict[str, str], dict[str, bytes], int, str, str | None]] = [
    ("begun", FORM, {}, 415, "unsupported_content_type", None),
    ("begun", {}, {"image": png()}, 400, "missing_parameter", "prompt"),
    ("begun", FORM, {"mask": png()}, 400, "missing_parameter", "image"),
    ("begun", FORM, {"image": b"no image"}, 400, "invalid_image", "image"),
    ("begun", FORM, {"image": b""}, 400, "invalid_image", "image"),
    ("begun", FORM, {"image": bomb(60_000)}, 400, "invalid_image", "image"),
    ("begun", FORM, {"image": bomb(9_000)}, 400, "invalid_image", "image"),
    ("begun", FORM, {"image": png()[:-30]}, 400, "invalid_image", "image"),
    ("begun", FORM, {"image": b"GIF89a" + bytes(30)}, 400, "invalid_image", "image"),
    ("begun", FORM, {"image": png(kind="TIFF")}, 400, "invalid_image", "image"),  # it could be read
    ("begun", {**FORM, "image": "/etc/passwd"}, {"mask": png()}, 400, "invalid_image", "image"),
    ("begun", {**FORM, "image": "http://example.org/a.png"}, {"mask": png()}, 400, "invalid_image", "image"),
    ("begun", FORM, {"image": png(), "file": png()}, 400, "unknown_parameter", "file"),
    ("begun", FORM, {"image": png(), "mask": png()}, 400, "invalid_image", "mask"),  # without transparency
    ("begun", FORM, {"image": png(), "mask": png(mode="RGBA")}, 400, "unsupported_parameter", "mask"),
    ("painted", FORM, {"image": png()}, 400, "missing_parameter", "mask"),
    ("painted", FORM, {"image": png(), "mask": png((64, 64), "RGBA")}, 400, "invalid_image", "mask"),
    ("begun", {**FORM, "strength": "0"}, {"image": png()}, 400, "invalid_value", "strength"),
    ("begun", {**FORM, "strength": "nan"}, {"image": png()}, 400, "invalid_value", "strength"),
    ("begun", {**FORM, "n": "two"}, {"image": png()}, 400, "invalid_value", "n"),
    ("begun", {**FORM, "promt": "a"}, {"image": png()}, 400, "unknown_parameter", "promt"),
    ("begun", {**FORM, "size": "100x130"}, {"image": png()}, 400, "invalid_size", "size"),
    ("begun", {**FORM, "num_inference_steps": "1000000"}, {"image": png()}, 400, "above_limit", "num_inference_steps"),
    ("begun", FORM, {"image": png(mode="RGB") + bytes(1 << 20)}, 413, "body_too_large", None),
]


def test_two_masks_are_refused(painted: Any) -> None:
    client, _ = painted
    files = [("image", png()), ("mask", png(mode="RGBA")), ("mask", png(mode="RGBA"))]
    error = error_of(client.post(EDITS, data=FORM, files=files), 400)
    assert (error["param"], "2 masks: send one" in error["message"]) == ("mask", True)


@pytest.mark.parametrize(("which", "form", "files", "status", "code", "param"), CASES, ids=range(len(CASES)))
def test_bad_uploads(
    which: str, form: Any, files: Any, status: int, code: str, param: str | None, request: pytest.FixtureRequest
) -> None:
    client, _ = request.getfixturevalue(which)
    error = error_of(client.post(EDITS, data=form, files=files), status)
    assert (error["code"], error["param"]) == (code, param), error["message"]


@pytest.mark.parametrize(
    ("form", "files"),
    [
        ({"prompt": "a" * (MAX_TEXT + 1)}, 1),
        (FORM, MAX_FILES + 1),
        ({**FORM, **{f"x{number}": "" for number in range(MAX_FIELDS)}}, 1),
    ],
    ids=["text", "files", "fields"],
)
def test_a_form_has_so_much_and_is_read_no_further(begun: Any, form: dict[str, str], files: int) -> None:
    client, _ = begun
    response = client.post(EDITS, data=form, files=[("image[]", b"")] * files)
    assert error_of(response, 400)["code"] == "invalid_form"


@pytest.mark.parametrize("lost", [1, 2, 9, 40], ids="{} bytes".format)
def test_a_form_that_was_cut_off_is_refused(begun: Any, lost: int) -> None:
    """Else the fields that were lost would count as left out, and the image be another one than was asked for."""
    client, _ = begun
    fields = {"n": "2", **FORM, "seed": "7"}
    parts = [f'--cut\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{fields[name]}\r\n' for name in fields]
    image = b'--cut\r\nContent-Disposition: form-data; name="image"; filename="a.png"\r\n\r\n' + png() + b"\r\n"
    whole, headers = image + "".join(parts).encode() + b"--cut--", {"Content-Type": "multipart/form-data; boundary=cut"}
    assert client.post(EDITS, content=whole, headers=headers).status_code == 200
    error = error_of(client.post(EDITS, content=whole[:-lost], headers=headers), 400)
    assert (error["code"], error["message"]) == (
        "invalid_form",
        "the body is no whole form: it ends before its last boundary: send all of it",
    )


def test_a_field_that_is_there_twice(begun: Any) -> None:
    client, _ = begun
    error = error_of(client.post(EDITS, data={"prompt": ["a fox", "a cat"]}, files={"image": png()}), 400)
    assert (error["param"], error["message"]) == ("prompt", "prompt is there twice: send it once")


def test_a_model_that_takes_no_image(client: Any) -> None:
    error = error_of(client.post(EDITS, data=FORM, files={"image": png()}), 400)
    assert (error["code"], error["param"]) == ("unsupported_parameter", "image")


def test_a_large_upload_is_refused_before_it_is_read(begun: Any) -> None:
    client, _ = begun
    headers = {"Content-Type": "multipart/form-data; boundary=x", "Content-Length": str(500 << 20)}
    assert error_of(client.post(EDITS, content=b"--x", headers=headers), 413)["code"] == "body_too_large"


def test_forms_of_other_sites(begun: Any) -> None:
    """A browser sends them without asking this server first, but says from where."""
    client, fake = begun
    before = len(fake.calls)
    for origin in ("http://evil.example", "null", "http://127.0.0.1:81"):
        response = client.post(EDITS, data=FORM, files={"image": png()}, headers={"Origin": origin})
        assert error_of(response, 403)["code"] == "foreign_origin"
    near = {"Origin": "http://127.0.0.1", "Sec-Fetch-Site": "same-site"}  # another server of this machine
    assert client.post(EDITS, data=FORM, files={"image": png()}, headers=near).status_code == 403
    assert len(fake.calls) == before
    behind = {"Origin": "https://studio.example", "Sec-Fetch-Site": "same-origin"}  # a proxy that gives it another name
    for headers in ({"Origin": "http://127.0.0.1"}, behind):
        assert client.post(EDITS, data=FORM, files={"image": png()}, headers=headers).status_code == 200


@pytest.mark.parametrize("count", [200, pytest.param(2000, marks=pytest.mark.breadth)])
def test_any_form_is_read_or_refused(begun: Any, count: int) -> None:
    """Random forms, whole and damaged: 4xx in the form of all errors, and never 5xx."""
    client, _ = begun
    random = Random(count)
    names = ["prompt", "image", "mask", "image[]", "n", "size", "seed", "strength", "stream", "x", ""]
    values: list[Any] = ["a fox", "", "1", "-1", "64x64", "true", "\x00", "é" * 9, png((64, 64)), b"\xff", b""]
    for _ in range(count):
        chosen = {name: random.choice(values) for name in random.sample(names, random.randint(1, 5))}
        parts = [
            f'--x\r\nContent-Disposition: form-data; name="{name}"'.encode()
            + (b'; filename="a"\r\n\r\n' + value if isinstance(value, bytes) else b"\r\n\r\n" + value.encode())
            for name, value in chosen.items()
        ]
        body = bytearray(b"\r\n".join([*parts, b"--x--\r\n"]))
        for _ in range(random.choice([0, 0, 1, 3])):
            body[random.randrange(len(body))] = random.randrange(256)
        response = client.post(EDITS, content=bytes(body), headers={"Content-Type": "multipart/form-data; boundary=x"})
        assert response.status_code < 500, (response.text, bytes(body)[:300])
        assert response.status_code == 200 or "error" in json.loads(response.text)


def test_a_form_with_another_field_or_file_is_another_request() -> None:
    """Else whoever uses an Idempotency-Key twice would get the images of the other one."""
    given = [
        ({"prompt": "a fox"}, {"image": (b"1", b"2")}),
        ({"prompt": "a cat"}, {"image": (b"1", b"2")}),
        ({"prompt": "a fox", "seed": "1"}, {"image": (b"1", b"2")}),
        ({"prompt": "a fox"}, {"image": (b"2", b"1")}),
        ({"prompt": "a fox"}, {"image": (b"1",), "mask": (b"2",)}),
        ({"prompt": "a fox"}, {"image": (b"12",)}),
    ]
    digests = {FormBody(values=values, files=files).digest() for values, files in given}
    assert len(digests) == len(given)
    one, other = ({"prompt": "a fox", "seed": "1"}, {"seed": "1", "prompt": "a fox"})
    assert FormBody(values=one, files={}).digest() == FormBody(values=other, files={}).digest()


def test_a_full_queue_refuses_uploads_before_they_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for a request that has been accepted, and is sent again."""
    client, fake, service = served(image=None)
    service._queue._most = 1
    later, keyed = f"{EDITS}?async=true", {"Idempotency-Key": "one"}
    decoded, check = list[int](), images.check_upload
    monkeypatch.setattr(images, "check_upload", lambda *args: decoded.append(1) or check(*args))
    fake.gate.clear()
    try:
        first = client.post(later, data=FORM, files={"image": png()}, headers=keyed).json()["id"]
        until(lambda: is_busy(service), "the first to run")
        assert client.post(later, data=FORM, files={"image": png()}).status_code == 202
        for path in (EDITS, later):
            error = error_of(client.post(path, data=FORM, files={"image": png()}), 503)
            assert error["code"] == "queue_full"
        assert error_of(client.post(EDITS, data={**FORM, "model": "x"}, files={"image": png()}), 404)
        assert len(decoded) == 2
        assert client.post(later, data=FORM, files={"image": png()}, headers=keyed).json()["id"] == first
    finally:
        fake.gate.set()
        service.close()


def test_uploads_of_two_requests_are_decoded_at_a_time(begun: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else many would take the memory of many decoded images before any of them is queued, or refused."""
    client, _ = begun
    inside, go, check = list[int](), threading.Event(), images.check_upload

    def watched(*args: Any) -> Any:
        inside.append(1)
        assert go.wait(20)
        return check(*args)

    monkeypatch.setattr(images, "check_upload", watched)
    with ThreadPoolExecutor(6) as pool:
        sent = [pool.submit(client.post, EDITS, data=FORM, files={"image": png()}) for _ in range(6)]
        try:
            until(lambda: uploaded_image.CHECKS._work_queue.qsize() == 4, "the others to wait")
            until(lambda: len(inside) == 2, "two to be decoded")
        finally:
            go.set()
        assert {each.result(20).status_code for each in sent} <= {200, 503}
    assert len(inside) == 6


MULTIPART = "multipart/form-data; boundary=x"
FIELD = b'--x\r\nContent-Disposition: form-data; name="prompt"\r\n\r\na fox'
JSON_BODY = b'{"prompt": "a fox", "size": "64x64"'


@pytest.mark.parametrize(("path", "kind", "body"), [(PATH, "application/json", JSON_BODY), (EDITS, MULTIPART, FIELD)])
def test_a_body_that_does_not_go_on_is_given_up(
    begun: Any, monkeypatch: pytest.MonkeyPatch, path: str, kind: str, body: bytes
) -> None:
    """Its connection is closed, since what may still come is not read."""
    client, fake = begun
    monkeypatch.setattr(request_body, "BODY_SECONDS", 0.01)
    calls = len(fake.calls)
    start, answer = sent_in_parts(client.app, path, kind, [body])
    error = json.loads(answer["body"])["error"]
    assert (start["status"], error["code"]) == (408, "upload_too_slow")
    assert f"{len(body)} bytes of the body have come in " in error["message"]
    assert {(b"connection", b"close"), (b"x-should-retry", b"false")} <= set(start["headers"])
    assert len(fake.calls) == calls


@pytest.mark.parametrize(("seconds", "status"), [(0.9, 200), (1.1, 408)])
def test_a_body_may_take_as_long_as_it_goes_on(
    app: Any, monkeypatch: pytest.MonkeyPatch, seconds: float, status: int
) -> None:
    """Each part of SLOWEST bytes gives it another second, whatever BODY_SECONDS are."""
    now, spaces = [0.0], b" " * request_body.SLOWEST
    monkeypatch.setattr(request_body, "monotonic", lambda: now[0])
    monkeypatch.setattr(request_body, "BODY_SECONDS", 2.0)

    def later() -> None:
        now[0] += seconds

    parts = [*[spaces] * 30, JSON_BODY + b"}"]
    start, _ = sent_in_parts(app, PATH, "application/json", parts, later, is_whole=True)
    assert start["status"] == status
