"""The page in a real browser, with real workers: what a person does, and what a person sees.

Screenshots are left in build/screenshots, to be looked at. Tabs whose handlers are tested without a browser (see
test_drawing.py, test_streaming.py and test_jobs.py) are opened with `make test-all` only.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import av
import pytest
from PIL import Image
from playwright.sync_api import Page, expect

from .films import grey_film
from .hands import PATIENCE, done, fill, keep, press, saved, sees, small, status, tab, until_answered


def saved_film(page: Page) -> tuple[int, float, tuple[int, int], int]:
    """What the button under a stream gives: pictures, pictures in a second, their size, tracks of sound."""
    download = saved(page, "stream-save")
    assert download.suggested_filename == "stream.mp4"
    with av.open(str(download.path())) as container:
        video = container.streams.video[0]
        pictures = len([*container.decode(video)])
        return pictures, float(video.average_rate or 0), (video.width, video.height), len(container.streams.audio)


def test_a_picture_is_drawn_with_its_figures_and_its_timeline(opened: Any) -> None:
    page = opened(viewport={"width": 1280, "height": 900})
    small(page, steps=6)
    press(page, "image-draw")
    done(page, "image")
    sees(page, "image-picture", 128)
    expect(page.locator("#image-facts")).to_contain_text("cfg=2")
    expect(page.locator("#image-facts")).to_contain_text("6 steps")
    keep(page, "image")
    tab(page, "Timeline")
    expect(page.locator("#timeline-drawing svg path.wait")).to_have_count(2)
    assert "traceEvents" in saved(page, "timeline-save").path().read_text()
    keep(page, "timeline")


def test_a_picture_is_cancelled_and_the_workers_are_free(opened: Any) -> None:
    page = opened()
    small(page, steps=150)
    press(page, "image-draw")
    expect(status(page, "image")).to_contain_text(re.compile(r"step \d+ of 150"))
    expect(page.locator("#image-picture img")).to_be_visible()  # the preview
    press(page, "image-cancel")
    expect(status(page, "image")).to_contain_text("Cancelled")
    fill(page, "Steps", 2)
    press(page, "image-draw")
    done(page, "image")


def test_two_browsers_wait_for_each_other_and_see_their_own(opened: Any) -> None:
    one, other = opened(), opened()
    small(one, steps=30)
    small(other, steps=3, side=192)
    press(one, "image-draw")
    expect(status(one, "image")).to_have_class(re.compile("running"))
    press(other, "image-draw")
    expect(status(other, "image")).to_contain_text("one job is before it")
    for page, side in ((one, 128), (other, 192)):
        done(page, "image")
        sees(page, "image-picture", side)


@pytest.mark.breadth
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
    press(page, "image-draw")
    done(page, "image")
    page.wait_for_timeout(500)
    done(page, "image")  # nothing waited behind it


def test_a_page_that_is_reloaded_goes_on_with_its_run_and_says_that_it_is_busy(opened: Any) -> None:
    page = opened()
    small(page, steps=60)
    press(page, "image-draw")
    expect(status(page, "image")).to_contain_text(re.compile(r"step \d+ of 60"))
    tab(page, "Compare")
    press(page, "compare-run")
    expect(status(page, "compare")).to_contain_text("this page has a job under way: wait for it, or cancel it")
    page.reload()
    expect(status(page, "image")).to_contain_text("of 60")
    page.reload()
    expect(status(page, "image")).to_contain_text("of 60")
    press(page, "image-cancel")
    expect(status(page, "image")).to_contain_text("Cancelled")


@pytest.mark.breadth
def test_two_ways_are_compared(opened: Any) -> None:
    page = opened(viewport={"width": 1280, "height": 900})
    tab(page, "Compare")
    small(page, steps=4)
    press(page, "compare-run")
    expect(page.locator("#compare-table table")).to_be_visible(timeout=PATIENCE)
    expect(status(page, "compare")).to_contain_text("PSNR")
    expect(page.locator("#compare-difference img")).to_be_visible()
    assert page.locator("#compare-pair img").count() == 2
    keep(page, "compare")


@pytest.mark.breadth
def test_a_large_picture_is_drawn(opened: Any) -> None:
    page = opened(viewport={"width": 1280, "height": 900})
    tab(page, "High resolution")
    small(page, steps=2, side=512)
    press(page, "large-run")
    done(page, "large")
    expect(page.locator("#large-facts")).to_contain_text("asg")
    keep(page, "large")


def test_a_stream_is_seen_while_it_runs_and_follows_a_new_prompt(opened: Any) -> None:
    page = opened(viewport={"width": 1280, "height": 900})
    tab(page, "Stream")
    small(page, steps=2)
    press(page, "stream-run")
    picture = page.locator("#stream-window img")
    expect(picture).to_be_visible(timeout=2 * PATIENCE)
    sees(page, "stream-window", 128)
    seen = set()
    for _ in range(40):
        seen.add(picture.screenshot())
        if len(seen) > 2:
            break
        page.wait_for_timeout(250)
    assert len(seen) > 2  # it moves
    page.fill("#stream-prompt input, #stream-prompt textarea", "a blue balloon on the right, a calm lake at night")
    press(page, "stream-say")
    expect(page.get_by_text("From the next picture on")).to_be_visible()
    keep(page, "stream")
    page.reload()
    tab(page, "Stream")
    sees(page, "stream-window", 128)  # it goes on
    press(page, "stream-stop")
    expect(page.locator("#stream-facts")).to_contain_text("per second")
    pictures, *rest = saved_film(page)
    assert rest == [8, (128, 128), 0]
    assert pictures > len(seen)


@pytest.mark.breadth  # a film that plays while it is made is in tests/live
def test_a_face_talks_as_a_film_with_sound(opened: Any) -> None:
    page = opened(viewport={"width": 1280, "height": 900})
    tab(page, "Stream")
    tab(page, "Face")
    wish = "a person with a happy face is talking"
    prompt = page.get_by_label("Prompt", exact=True).locator("visible=true")
    until_answered(page.get_by_text(wish).click, lambda soon: expect(prompt).to_have_value(wish, timeout=soon))
    press(page, "stream-talk")
    page.wait_for_function(
        "document.querySelector('#stream-window video')?.videoWidth === 96", timeout=2 * PATIENCE
    )  # frames have come
    page.wait_for_function("document.querySelector('#stream-window video').currentTime > 0.4", timeout=2 * PATIENCE)
    keep(page, "face")
    expect(page.locator("#stream-facts")).to_contain_text("per second", timeout=2 * PATIENCE)
    assert saved_film(page)[1:] == (16, (96, 96), 1)


@pytest.mark.breadth
def test_frames_of_a_film_are_drawn_anew(opened: Any, tmp_path: Path) -> None:
    page = opened(viewport={"width": 1280, "height": 900})
    tab(page, "Stream")
    small(page, steps=4)
    choose = page.get_by_label("A film", exact=True).check
    until_answered(choose, lambda soon: expect(page.locator("#stream-film")).to_be_visible(timeout=soon))
    press(page, "stream-run")
    expect(status(page, "stream")).to_contain_text("there is no film: choose one")
    film = grey_film(tmp_path / "film.mp4", frames=6, fps=4)
    page.locator("#stream-film input[type=file]").set_input_files(film)
    expect(page.locator("#stream-film video")).to_be_visible()
    fill(page, "Frames taken", 4)
    press(page, "stream-run")
    expect(page.locator("#stream-window img")).to_be_visible(timeout=2 * PATIENCE)
    done(page, "stream")
    expect(page.locator("#stream-facts")).to_contain_text("6 in")
    keep(page, "stream-film")
    assert saved_film(page) == (6, 4, (128, 128), 0)


@pytest.mark.breadth
def test_an_uploaded_picture_is_drawn_again_larger(opened: Any, tmp_path: Path) -> None:
    page = opened(viewport={"width": 1280, "height": 900})
    tab(page, "High resolution")
    tab(page, "Out of a picture")
    press(page, "again-run")
    expect(status(page, "large")).to_contain_text("there is no prompt: say what to draw")
    page.get_by_label("What it shows").fill("a red house on the left, green hills at sunset")
    press(page, "again-run")
    expect(status(page, "large")).to_contain_text("there is no picture: choose one")
    small_one = tmp_path / "small.png"
    Image.radial_gradient("L").resize((96, 80)).save(small_one)
    page.locator("#again-picture input[type=file]").set_input_files(small_one)
    expect(page.locator("#again-picture img")).to_be_visible()
    fill(page, "Steps", 8)
    press(page, "again-run")
    done(page, "large", patience=2 * PATIENCE)
    sees(page, "large-picture", 192, 160)
    expect(page.locator("#large-pair img").first).to_be_visible()
    keep(page, "large-again")


def test_a_wrong_wish_is_told_at_once(opened: Any) -> None:
    page = opened()
    page.get_by_label("Prompt", exact=True).first.fill("")
    press(page, "image-draw")
    expect(page.locator("#image-status [role=alert]")).to_contain_text("there is no prompt: say what to draw")
    page.get_by_label("Prompt", exact=True).first.fill("<b>x</b>")
    page.get_by_text("Your own plan").click()
    page.get_by_label("Plan", exact=True).first.fill("<i>patch</i>=2")
    press(page, "image-draw")
    alert = page.locator("#image-status [role=alert]")
    expect(alert).to_contain_text("unknown axis '<i>patch</i>'")
    assert alert.locator("i").count() == 0  # said, not obeyed


def test_a_plan_for_a_cluster_that_is_not_here(opened: Any) -> None:
    page = opened(viewport={"width": 1280, "height": 900})
    expect(page.locator("#ready")).to_be_hidden()
    tab(page, "Plan")
    press(page, "plan-run")
    expect(page.locator("#plan-table tr.marked, #plan-said dl")).not_to_have_count(0)
    expect(page.locator("#plan-drawing svg rect.place")).not_to_have_count(0)
    keep(page, "plan")
