"""The search of the site works where its pages are read from a folder: what runs it is ours, and nothing is fetched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.app.browser import installed, started
from tests.breadth import first_of
from tests.test_site import DOCS, MENU

CHROMIUM = installed()
WORKER = "addEventListener('message', async event => { await importScripts('more.js'); postMessage(more(event.data)) })"
PAGE = """<body><script src="iframe-worker.js"></script><script>
const worker = new Worker(new URL("worker.js", location))
worker.addEventListener("message", event => { document.body.dataset.answer = event.data })
worker.postMessage("halo")
</script></body>"""


def test_it_is_there_for_pages_in_a_folder() -> None:
    """Plugin `offline` puts the index beside the pages, and would fetch a script unless one of that name is here."""
    assert "\n  - search\n  - offline\n" in MENU
    assert "\n  polyfills: [iframe-worker.js]" in MENU
    assert "use_directory_urls: false" in MENU
    assert "http" not in (DOCS / "iframe-worker.js").read_text()


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium, or make browser")
@pytest.mark.parametrize("has_ours", first_of([True, False], True))
def test_its_worker_runs_from_a_folder(has_ours: bool, tmp_path: Path) -> None:
    """And without ours it would not: browsers start no worker from a file."""
    files = {"page.html": PAGE, "worker.js": WORKER, "more.js": "const more = text => text + ' found'"}
    for name, text in (
        files | ({"iframe-worker.js": (DOCS / "iframe-worker.js").read_text()} if has_ours else {})
    ).items():
        (tmp_path / name).write_text(text)
    fetched: list[str] = []
    with started(str(CHROMIUM)) as browser:
        page: Any = browser.new_page()
        page.on("request", lambda request: fetched.append(request.url))
        page.goto((tmp_path / "page.html").as_uri())
        if has_ours:
            page.wait_for_selector("body[data-answer='halo found']", timeout=60_000)
        else:
            page.wait_for_timeout(1000)
            assert page.get_attribute("body", "data-answer") is None
    assert all(url.startswith("file:") for url in fetched)
