"""Files of images that responses link to. A link is the key to its file, so that a browser can show it."""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse

from patchpar.serving.image_files import ROUTE, ImageFiles
from patchpar.web.server import PREFIX, prefix_of

HEADERS = {"Cache-Control": "private", "X-Content-Type-Options": "nosniff"}


def add_files(app: FastAPI, files: ImageFiles) -> None:
    """Add the route."""

    @app.get(ROUTE + "{name}")
    async def file(name: str) -> FileResponse:
        """Return the file of a link."""
        path = files.find(name)
        return FileResponse(path, media_type=f"image/{path.suffix[1:]}", headers=HEADERS)


def with_whole_links(response: Mapping[str, Any], request: Request) -> dict[str, Any]:
    """Return the response to a request for images with links that begin with the address of this server.

    Behind a proxy that serves it under a path of its own, also with that path, as the proxy names it.
    """
    base = str(request.base_url).rstrip("/") + prefix_of(request.headers.get(PREFIX, ""))
    data = [each if "url" not in each else {**each, "url": base + each["url"]} for each in response["data"]]
    return {**response, "data": data}
