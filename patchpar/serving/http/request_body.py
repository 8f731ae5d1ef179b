"""Bodies of requests: read up to a limit, and only as JSON."""

from fastapi import Request

from patchpar.serving.request_error import RequestError

JSON = "application/json"


async def read_body(request: Request, most: int) -> bytes:
    """Return the body. Raises RequestError: 413 beyond `most` bytes, before they are read where the length is declared.

    Another type than JSON is refused with 415: a page of another site can make a browser send forms and plain text
    without asking this server first, but not JSON.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != JSON:
        raise RequestError(
            f"Content-Type {kind[:80] or 'missing'}: send {JSON}", status=415, code="unsupported_content_type"
        )
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared[:20]) > most:
        raise _too_large(most)
    found = bytearray()
    async for part in request.stream():
        found += part
        if len(found) > most:
            raise _too_large(most)
    return bytes(found)


def _too_large(most: int) -> RequestError:
    return RequestError(f"the body is larger than {most} bytes, the limit", status=413, code="body_too_large")
