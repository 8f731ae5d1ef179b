"""The page in a real browser, with real workers: what a person does, and what a person sees.

Screenshots are left in build/screenshots, to be looked at.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from playwright.sync_api import Page, expect

from .browser import installed, started
from .films import grey_film

REPOSITORY = Path(__file__).parent.parent.parent
SCREENSHOTS = REPOSITORY / "build" / "screenshots"
PATIENCE = 60_000  # milliseconds, on a busy machine
PHONE = {"width": 390, "height": 844}
CHROMIUM = installed()
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium, or make browser")


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The command itself, on any free port; its address. Ctrl-C ends it and everything that it has started."""
    command = [sys.executable, "-m", "patchpar", "app", "--port", "0", "--devices", "cpu:2"]
    process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.stdout is not None
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found is not None
        yield found[0]
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait(10)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    assert CHROMIUM is not None
    expect.set_options(timeout=PATIENCE)
    with started(CHROMIUM) as found:
        yield found


@pytest.fixture
def opened(server: str, browser: Any) -> Iterator[Any]:
    """Opens a page as a person of its own; what a page says in its console as an error fails the test."""
    contexts: list[Any] = []
    errors: list[str] = []

    def open_page(**options: Any) -> Page:
        context = browser.new_context(permissions=["camera", "microphone"], **options)
        contexts.append(context)
        page: Page = context.new_page()
        page.set_default_timeout(PATIENCE)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(server)
        expect(page.locator("#image-draw")).to_be_enabled()  # the page has been told what was under way
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert errors == []


def fill(page: Page, label: str, value: object) -> None:
    """A number field, or the number beside a slider, of the tab that is shown."""
    field = page.locator(
        f"input[aria-label*='{label}'][type=number]:visible, label:has-text('{label}') input:visible"
    ).first
    field.fill(str(value))
    field.first.press("Tab")


def small(page: Page, *, steps: int, side: int = 128) -> None:
    """A picture that is drawn soon."""
    fill(page, "Width", side)
    fill(page, "Height", side)
    fill(page, "Steps", steps)


def status(page: Page, name: str) -> Any:
    return page.locator(f"#{name}-status .state")


def tab(page: Page, name: str) -> None:
    page.get_by_role("tab", name=name, exact=True).click()


def keep(page: Page, name: str) -> None:
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=True)


def test_a_picture_is_drawn_with_its_figures_and_its_timeline(opened: Any) -> None:
    page = opened(viewport={"width": 1280, "height": 900})
    small(page, steps=6)
    page.click("#image-draw")
    expect(status(page, "image")).to_have_class(re.compile("done"))
    picture = page.locator("#image-picture img")
    expect(picture).to_be_visible()
    assert picture.evaluate("image => image.naturalWidth") == 128
    expect(page.locator("#image-facts")).to_contain_text("cfg=2")
    expect(page.locator("#image-facts")).to_contain_text("6 steps")
    keep(page, "image")
    tab(page, "Timeline")
    expect(page.locator("#timeline-drawing svg path.wait")).to_have_count(2)
    with page.expect_download() as download:
        page.click("#timeline-save")
    assert "traceEvents" in download.value.path().read_text()
    keep(page, "timeline")


def test_a_picture_is_cancelled_and_the_workers_are_free(opened: Any) -> None:
    page = opened()
    small(page, steps=150)
    page.click("#image-draw")
    expect(status(page, "image")).to_contain_text(re.compile(r"step \d+ of 150"))
    expect(page.locator("#image-picture img")).to_be_visible()  # the preview
    page.click("#image-cancel")
    expect(status(page, "image")).to_contain_text("Cancelled")
    fill(page, "Steps", 2)
    page.click("#image-draw")
    expect(status(page, "image")).to_have_class(re.compile("done"))


def test_two_browsers_wait_for_each_other_and_see_their_own(opened: Any) -> None:
    one, other = opened(), opened()
    small(one, steps=30)
    small(other, steps=3, side=192)
    one.click("#image-draw")
    expect(status(one, "image")).to_have_class(re.compile("running"))
    other.click("#image-draw")
    expect(status(other, "image")).to_contain_text("one job is before it")
    for page, side in ((one, 128), (other, 192)):
        expect(status(page, "image")).to_have_class(re.compile("done"))
        assert page.locator("#image-picture img").evaluate("image => image.naturalWidth") == side


def test_a_page_that_is_reloaded_goes_on_with_its_run(opened: Any) -> None:
    page = opened()
    small(page, steps=60)
    page.click("#image-draw")
    expect(status(page, "image")).to_contain_text(re.compile(r"step \d+ of 60"))
    page.reload()
    expect(status(page, "image")).to_contain_text("of 60")
    page.click("#image-cancel")
    expect(status(page, "image")).to_contain_text("Cancelled")


def test_many_quick_clicks_are_one_job(opened: Any) -> None:
    page = opened()
    small(page, steps=40)
    page.evaluate("for (let i = 0; i < 20; i++) document.querySelector('#image-draw').click()")
    expect(status(page, "image")).to_contain_text(re.compile(r"step \d+ of 40"))
    page.evaluate("for (let i = 0; i < 20; i++) document.querySelector('#image-cancel').click()")
    expect(status(page, "image")).to_contain_text("Cancelled")
    expect(page.locator("#image-draw")).to_be_enabled()
    expect(page.locator("#image-cancel")).to_be_disabled()
    fill(page, "Steps", 2)
    page.click("#image-draw")
    expect(status(page, "image")).to_have_class(re.compile("done"))
    page.wait_for_timeout(500)
    expect(status(page, "image")).to_have_class(re.compile("done"))  # nothing waited behind it


def test_another_tab_says_that_the_page_is_busy(opened: Any) -> None:
    page = opened()
    small(page, steps=60)
    page.click("#image-draw")
    expect(status(page, "image")).to_contain_text(re.compile(r"step \d+ of 60"))
    tab(page, "Compare")
    page.click("#compare-run")
    expect(status(page, "compare")).to_contain_text("this page has a job under way: wait for it, or cancel it")
    page.reload()
    expect(status(page, "image")).to_contain_text("of 60")
    page.reload()
    expect(status(page, "image")).to_contain_text("of 60")
    page.click("#image-cancel")
    expect(status(page, "image")).to_contain_text("Cancelled")


def test_two_ways_are_compared(opened: Any) -> None:
    page = opened(viewport={"width": 1280, "height": 900})
    tab(page, "Compare")
    small(page, steps=4)
    page.click("#compare-run")
    expect(page.locator("#compare-table table")).to_be_visible(timeout=PATIENCE)
    expect(status(page, "compare")).to_contain_text("PSNR")
    expect(page.locator("#compare-difference img")).to_be_visible()
    assert page.locator("#compare-pair img").count() == 2
    keep(page, "compare")


def test_a_large_picture_is_drawn(opened: Any) -> None:
    page = opened(viewport={"width": 1280, "height": 900})
    tab(page, "High resolution")
    small(page, steps=2, side=512)
    page.click("#large-run")
    expect(status(page, "large")).to_have_class(re.compile("done"))
    expect(page.locator("#large-facts")).to_contain_text("asg")
    keep(page, "large")


def test_a_stream_is_seen_while_it_runs_and_follows_a_new_prompt(opened: Any) -> None:
    page = opened(viewport={"width": 1280, "height": 900})
    tab(page, "Stream")
    small(page, steps=2)
    page.click("#stream-run")
    picture = page.locator("#stream-window img")
    expect(picture).to_be_visible(timeout=2 * PATIENCE)
    page.wait_for_function("document.querySelector('#stream-window img')?.naturalWidth === 128")
    seen = set()
    for _ in range(40):
        seen.add(picture.screenshot())
        if len(seen) > 2:
            break
        page.wait_for_timeout(250)
    assert len(seen) > 2  # it moves
    page.fill("#stream-prompt input, #stream-prompt textarea", "a blue balloon on the right, a calm lake at night")
    page.click("#stream-say")
    expect(page.get_by_text("From the next picture on")).to_be_visible()
    keep(page, "stream")
    page.click("#stream-stop")
    expect(page.locator("#stream-facts")).to_contain_text("per second")


def test_a_face_talks_as_a_film_with_sound(opened: Any) -> None:
    page = opened(viewport={"width": 1280, "height": 900})
    tab(page, "Stream")
    tab(page, "Face")
    wish = "a person with a happy face is talking"
    page.get_by_text(wish).click()
    expect(page.get_by_label("Prompt", exact=True).locator("visible=true")).to_have_value(wish)
    page.click("#stream-talk")
    page.wait_for_function(
        "document.querySelector('#stream-window video')?.videoWidth === 96", timeout=2 * PATIENCE
    )  # frames have come
    page.wait_for_function("document.querySelector('#stream-window video').currentTime > 0.4", timeout=2 * PATIENCE)
    keep(page, "face")
    expect(page.locator("#stream-facts")).to_contain_text("per second", timeout=2 * PATIENCE)


def test_frames_of_a_film_are_drawn_anew(opened: Any, tmp_path: Path) -> None:
    page = opened(viewport={"width": 1280, "height": 900})
    tab(page, "Stream")
    small(page, steps=4)
    page.get_by_label("A film", exact=True).check()
    expect(page.locator("#stream-film")).to_be_visible()  # nobody clicks before the field is there
    page.click("#stream-run")
    expect(status(page, "stream")).to_contain_text("there is no film: choose one")
    film = grey_film(tmp_path / "film.mp4", frames=6, fps=4)
    page.locator("#stream-film input[type=file]").set_input_files(film)
    expect(page.locator("#stream-film video")).to_be_visible()
    fill(page, "Frames taken", 4)
    page.click("#stream-run")
    expect(page.locator("#stream-window img")).to_be_visible(timeout=2 * PATIENCE)
    expect(status(page, "stream")).to_have_class(re.compile("done"))
    expect(page.locator("#stream-facts")).to_contain_text("6 in")
    keep(page, "stream-film")


def test_an_uploaded_picture_is_drawn_again_larger(opened: Any, tmp_path: Path) -> None:
    page = opened(viewport={"width": 1280, "height": 900})
    tab(page, "High resolution")
    tab(page, "Out of a picture")
    page.click("#again-run")
    expect(status(page, "large")).to_contain_text("there is no prompt: say what to draw")
    page.get_by_label("What it shows").fill("a red house on the left, green hills at sunset")
    page.click("#again-run")
    expect(status(page, "large")).to_contain_text("there is no picture: choose one")
    small_one = tmp_path / "small.png"
    Image.radial_gradient("L").resize((96, 80)).save(small_one)
    page.locator("#again-picture input[type=file]").set_input_files(small_one)
    expect(page.locator("#again-picture img")).to_be_visible()
    fill(page, "Steps", 8)
    page.click("#again-run")
    expect(status(page, "large")).to_have_class(re.compile("done"), timeout=2 * PATIENCE)
    assert page.locator("#large-picture img").evaluate("image => [image.naturalWidth, image.naturalHeight]") == [
        192,
        160,
    ]
    expect(page.locator("#large-pair img").first).to_be_visible()
    keep(page, "large-again")


def test_a_wrong_wish_is_told_at_once(opened: Any) -> None:
    page = opened()
    page.get_by_label("Prompt", exact=True).first.fill("")
    page.click("#image-draw")
    expect(page.locator("#image-status [role=alert]")).to_contain_text("there is no prompt: say what to draw")
    page.get_by_label("Prompt", exact=True).first.fill("<b>x</b>")
    page.get_by_text("Your own plan").click()
    page.get_by_label("Plan", exact=True).first.fill("<i>patch</i>=2")
    page.click("#image-draw")
    alert = page.locator("#image-status [role=alert]")
    expect(alert).to_contain_text("unknown axis '<i>patch</i>'")
    assert alert.locator("i").count() == 0  # said, not obeyed


def test_a_plan_for_a_cluster_that_is_not_here(opened: Any) -> None:
    page = opened(viewport={"width": 1280, "height": 900})
    expect(page.locator("#ready")).to_be_hidden()
    tab(page, "Plan")
    page.click("#plan-run")
    expect(page.locator("#plan-table tr.marked, #plan-said dl")).not_to_have_count(0)
    expect(page.locator("#plan-drawing svg rect.place")).not_to_have_count(0)
    keep(page, "plan")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_by_day_and_by_night(opened: Any, scheme: Any) -> None:
    page = opened(viewport=PHONE, color_scheme=scheme, has_touch=True, is_mobile=True)
    page.wait_for_timeout(300)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    dark = page.evaluate("document.body.classList.contains('dark')")
    assert dark == (scheme == "dark")
    keep(page, f"phone-{scheme}")
