"""The page under a path that a proxy has for it, and takes off the requests that it passes on."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from playwright.sync_api import expect
from starlette.types import ASGIApp, Receive, Scope, Send

from app.server import Address, add_page
from patchpar.web.server import WebServer

from .actions import TIMEOUT_MS, done, press, sees, small
from .app_states import state_of

PREFIX = "/behind/proxy"


class Proxy:
    """Passes on what is below PREFIX as such a proxy does, with these headers; anything else is not found."""

    def __init__(self, app: ASGIApp, **headers: str) -> None:
        self._app = app
        self._headers = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if "path" in scope:
            path = scope["path"].removeprefix(PREFIX) if scope["path"].startswith(PREFIX) else "/nowhere"
            scope = {**scope, "path": path, "raw_path": path.encode(), "headers": [*scope["headers"], *self._headers]}
        await self._app(scope, receive, send)


@pytest.mark.parametrize("path", ["", "/app"])
def test_addresses_of_the_page_begin_with_what_the_proxy_names(path: str) -> None:
    host = "http://127.0.0.1:7860"
    named = {"X-Forwarded-Prefix": "/behind, proxy", "X-Forwarded-Host": "a.example"}
    with closing(state_of()) as state:
        client = TestClient(add_page(FastAPI(), state, Address(), path or "/"), base_url=host)
        for headers, root in (
            ({}, host),
            ({"X-Forwarded-Prefix": PREFIX}, f"{host}{PREFIX}"),
            (named, f"http://a.example{PREFIX}"),
        ):
            assert client.get(f"{path}/config", headers=headers).json()["root"] == f"{root}{path}"
            assert client.get(f"{path}/nothing", headers=headers).status_code == 404


@pytest.mark.breadth
@pytest.mark.parametrize("path", ["/", "/app"])
@pytest.mark.parametrize("names_host", [False, True])
def test_an_image_is_generated_below_it(browser: Any, path: str, names_host: bool) -> None:
    with closing(state_of()) as state, closing(WebServer("127.0.0.1", 0, "--port")) as server:
        host = {"x_forwarded_host": server.url.removeprefix("http://")} if names_host else {}
        server.serve(Proxy(add_page(FastAPI(), state, Address(), path), x_forwarded_prefix=PREFIX, **host))
        page = browser.new_page()
        page.set_default_timeout(TIMEOUT_MS)
        page.goto(f"{server.url}{PREFIX}{path.rstrip('/')}/")
        expect(page.locator("#image-generate")).to_be_enabled()
        small(page, steps=2)
        press(page, "image-generate")
        done(page, "image")
        sees(page, "image-result", 64)
        page.close()
        server.end()
