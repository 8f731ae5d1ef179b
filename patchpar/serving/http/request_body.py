"""Bodies of requests: read up to a limit of bytes and time, as JSON or, where there are files, as a form."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from time import monotonic

from fastapi import Request
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import HTTPConnection

from patchpar.serving.request_error import TOO_SLOW, RequestError
from patchpar.web.http_page import is_own_origin

JSON, FORM = "application/json", "multipart/form-data"
MAX_FILES, MAX_FIELDS = 16, 64
MAX_KEY = 256
MAX_TEXT = 1 << 18
"""Bytes of a text field: a prompt of the longest kind, in any script."""
BODY_SECONDS, SLOWEST = 20.0, 16 << 10
"""A body may take so many seconds, and one more for each SLOWEST bytes that have come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FormBody:
    """The text fields of a form, and the bytes of its files by the name of their field."""

    values: Mapping[str, str]
    files: Mapping[str, tuple[bytes, ...]]

    def digest(self) -> bytes:
        """Return a digest of all fields and files."""
        found = sha256(repr(sorted(self.values.items())).encode())
        for name, data in ((name, data) for name, files in sorted(self.files.items()) for data in files):
            found.update(sha256(name.encode()).digest() + sha256(data).digest())
        return found.digest()

    def check_files(self, *names: str) -> None:
        """Raise RequestError for a file whose field has another name than these, and for such a field with text."""
        for name in self.files:
            if name not in names:
                wanted = ", ".join(names)
                raise RequestError(
                    f"{name[:64]!r} is no field for a file: there are {wanted}",
                    param=name[:64],
                    code="unknown_parameter",
                )
        for name in (each for each in names if each in self.values):
            raise RequestError(
                f"{name} is text: send it as a file; a path or a URL is not opened", param=name, code="invalid_image"
            )


def kind_of(request: Request) -> str:
    """Return the declared type of a body, without parameters."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def read_body(request: Request, most: int) -> bytes:
    """Return the body. Raises RequestError: 413 beyond `most` bytes, before they are read where the length is declared.

    And 408 for one that comes too slowly, since it could be waited for without end. Another type than JSON is refused
    with 415: a page of another site can make a browser send forms and plain text without asking this server first, but
    not JSON.
    """
    _check_kind(request, JSON)
    _check_length(request, most)
    found = bytearray()
    async for part in _limited(request, most):
        found += part
    return bytes(found)


async def read_form(request: Request, most: int) -> FormBody:
    """Return a form. Raises RequestError as `read_body` does, and 403 for a form that a page of another site sends."""
    _check_kind(request, FORM)
    check_origin(request)
    _check_length(request, most)
    parser = _FormParser(
        request.headers, _limited(request, most), max_files=MAX_FILES, max_fields=MAX_FIELDS, max_part_size=MAX_TEXT
    )
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise RequestError(f"the body is no form: {error.message}", code="invalid_form") from None
    except (ValueError, KeyError, TypeError) as error:  # of python-multipart's readers of headers
        raise RequestError(f"the body is no form: {type(error).__name__}", code="invalid_form") from None
    values: dict[str, str] = {}
    files: dict[str, tuple[bytes, ...]] = {}
    try:
        if not parser.is_whole:
            raise RequestError(
                "the body is no whole form: it ends before its last boundary: send all of it", code="invalid_form"
            )
        for name, value in form.multi_items():
            if isinstance(value, UploadFile):
                files[name] = (*files.get(name, ()), await value.read())
            elif name in values:
                raise RequestError(f"{name[:64]} is there twice: send it once", param=name[:64])
            else:
                values[name] = value
    finally:
        await form.close()
    return FormBody(values=values, files=files)


def idempotency_key_of(request: Request) -> str:
    """Return the header by which a request may be sent again, "" without it. Raises RequestError for a long one."""
    found = request.headers.get("idempotency-key", "")
    if len(found) > MAX_KEY:
        raise RequestError(
            f"Idempotency-Key: {len(found)} characters, and at most {MAX_KEY} are read: use a shorter one"
        )
    return found


def check_origin(request: HTTPConnection) -> None:
    """Raise RequestError, 403, if a browser says that a page of another site sends this."""
    if not is_own_origin(request):
        raise RequestError("a page of another site may not do this", status=403, code="foreign_origin")


class _FormParser(MultiPartParser):
    """Knows whether the last boundary has come: a form that is cut off lacks fields, which would count as left out."""

    is_whole = False

    def on_end(self) -> None:
        self.is_whole = True


def _check_kind(request: Request, wanted: str) -> None:
    kind = kind_of(request)
    if kind != wanted:
        raise RequestError(
            f"Content-Type {kind[:80] or 'missing'}: send {wanted}", status=415, code="unsupported_content_type"
        )


def _check_length(request: Request, most: int) -> None:
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared[:20]) > most:
        raise _too_large(most)


async def _limited(request: Request, most: int) -> AsyncGenerator[bytes, None]:
    length, begun, parts = 0, monotonic(), request.stream()
    while True:
        seconds = BODY_SECONDS + length / SLOWEST
        try:
            part = await asyncio.wait_for(anext(parts), begun + seconds - monotonic())
        except StopAsyncIteration:
            return
        except (TimeoutError, asyncio.TimeoutError):  # two classes in Python 3.10
            raise RequestError(
                f"{length} bytes of the body have come in {seconds:.0f} s, and it goes on: send it at more than "
                f"{SLOWEST} bytes a second, or a smaller one",
                status=TOO_SLOW,
                code="upload_too_slow",
                is_final=True,
            ) from None
        length += len(part)
        if length > most:
            raise _too_large(most)
        yield part


def _too_large(most: int) -> RequestError:
    return RequestError(f"the body is larger than {most} bytes, the limit", status=413, code="body_too_large")
