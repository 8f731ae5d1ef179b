"""The page in a real browser, with real workers: what a person does, and what a person sees.

Screenshots are left in build/screenshots, to be looked at. Tabs whose handlers are tested without a browser (see
test_image_runner.py, test_image_stream.py and test_job_queue.py) are opened with `make test-all` only.
"""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import av
import httpx
import pytest
from PIL import Image
from playwright.sync_api import Page, expect

from tests.breadth import first_of

from .actions import TIMEOUT_MS, done, fill, press, retry_until, saved, screenshot, sees, small, status, tab
from .browser import ServedApp
from .looks import LOOKS, WINDOWS, check_looks, every_tab
from .videos import grey_video
from .waits import until


def saved_video(page: Page) -> tuple[int, float, tuple[int, int], int]:
    """What the button under a stream gives: images, images in a second, their size, tracks of audio."""
    download = saved(page, "stream-save")
    assert download.suggested_filename == "stream.mp4"
    with av.open(str(download.path())) as container:
        video = container.streams.video[0]
        images = len([*container.decode(video)])
        return images, float(video.average_rate or 0), (video.width, video.height), len(container.streams.audio)


def test_an_image_is_generated_with_its_figures_and_its_timeline(opened: Any) -> None:
    page = opened(viewport={"width": 1280, "height": 900})
    small(page, steps=3)
    press(page, "image-generate")
    done(page, "image")
    sees(page, "image-result", 128)
    expect(page.locator("#image-facts")).to_contain_text("cfg=2")
    expect(page.locator("#image-facts")).to_contain_text("3 steps")
    screenshot(page, "image")
    tab(page, "Timeline")
    expect(page.locator("#timeline-diagram svg path.wait")).to_have_count(2)
    assert "traceEvents" in saved(page, "timeline-save").path().read_text()
    screenshot(page, "timeline")


@pytest.mark.breadth  # as test_job_queue and test_image_runner hold it of handlers
def test_an_image_is_cancelled_and_the_workers_are_free(opened: Any) -> None:
    page = opened()
    small(page, steps=150)
    press(page, "image-generate")
    expect(status(page, "image")).to_contain_text(re.compile(r"step \d+ of 150"))
    expect(page.locator("#image-result img")).to_be_visible()  # the preview
    press(page, "image-cancel")
    expect(status(page, "image")).to_contain_text("Cancelled")
    fill(page, "Steps", 2)
    press(page, "image-generate")
    done(page, "image")


@pytest.mark.breadth
def test_two_browsers_wait_for_each_other_and_see_their_own(opened: Any) -> None:
    one, other = opened(), opened()
    small(one, steps=30)
    small(other, steps=3, side=192)
    press(one, "image-generate")
    expect(status(one, "image")).to_have_class(re.compile("running"))
    press(other, "image-generate")
    expect(status(other, "image")).to_contain_text("1 job ahead")
    for page, side in ((one, 128), (other, 192)):
        done(page, "image")
        sees(page, "image-result", side)


@pytest.mark.breadth
def test_many_quick_clicks_are_one_job(opened: Any) -> None:
    page = opened()
    small(page, steps=40)
    page.evaluate("for (let i = 0; i < 20; i++) document.querySelector('#image-generate').click()")
    expect(status(page, "image")).to_contain_text(re.compile(r"step \d+ of 40"))
    page.evaluate("for (let i = 0; i < 20; i++) document.querySelector('#image-cancel').click()")
    expect(status(page, "image")).to_contain_text("Cancelled")
    expect(page.locator("#image-generate")).to_be_enabled()
    expect(page.locator("#image-cancel")).to_be_disabled()
    fill(page, "Steps", 2)
    press(page, "image-generate")
    done(page, "image")
    page.wait_for_timeout(500)
    done(page, "image")  # nothing waited behind it


@pytest.mark.breadth  # as test_preset_forecasts holds it of handlers and of the page's events
def test_a_forecast_comes_back_after_a_reload(opened: Any) -> None:
    page = opened()
    small(page, steps=2)
    press(page, "image-forecast")
    table = page.locator("#forecast-status table")
    expect(table).to_be_visible(timeout=4 * TIMEOUT_MS)
    text = table.inner_text()
    page.reload()
    expect(table).to_be_visible()
    assert table.inner_text() == text
    press(page, "image-generate")
    done(page, "image")


@pytest.mark.breadth  # as test_job_queue holds it of handlers; it computes for as long as the browser takes
def test_a_page_that_is_reloaded_goes_on_with_its_run_and_says_that_it_is_busy(opened: Any) -> None:
    page = opened()
    small(page, steps=60)
    press(page, "image-generate")
    expect(status(page, "image")).to_contain_text(re.compile(r"step \d+ of 60"))
    tab(page, "Compare")
    press(page, "compare-run")
    expect(status(page, "compare")).to_contain_text("this page already has a job: wait for it, or cancel it")
    for _ in range(2):
        page.reload()
        expect(status(page, "image")).to_contain_text("of 60")
    press(page, "image-cancel")
    expect(status(page, "image")).to_contain_text("Cancelled")
    fill(page, "Steps", 2)
    press(page, "image-generate")
    done(page, "image")  # the workers are free


@pytest.mark.breadth
def test_two_presets_are_compared(opened: Any) -> None:
    page = opened(viewport={"width": 1280, "height": 900})
    tab(page, "Compare")
    small(page, steps=4)
    press(page, "compare-run")
    expect(page.locator("#compare-table table")).to_be_visible(timeout=TIMEOUT_MS)
    expect(status(page, "compare")).to_contain_text("PSNR")
    expect(page.locator("#compare-difference img")).to_be_visible()
    assert page.locator("#compare-pair img").count() == 2
    screenshot(page, "compare")


@pytest.mark.breadth
def test_a_large_image_is_generated(opened: Any) -> None:
    page = opened(viewport={"width": 1280, "height": 900})
    tab(page, "High resolution")
    small(page, steps=2, side=512)
    press(page, "high-res-run")
    done(page, "high-res")
    expect(page.locator("#high-res-facts")).to_contain_text("structure")
    screenshot(page, "high-res")


@pytest.mark.breadth  # tests/web/test_browser sees a stream in every run
def test_a_stream_is_seen_while_it_runs_and_follows_a_new_prompt(opened: Any) -> None:
    page = opened(viewport={"width": 1280, "height": 900})
    tab(page, "Stream")
    small(page, steps=2)
    press(page, "stream-run")
    image = page.locator("#stream-window img")
    expect(image).to_be_visible(timeout=2 * TIMEOUT_MS)
    sees(page, "stream-window", 128)
    seen = set()
    for _ in range(40):
        seen.add(image.screenshot())
        if len(seen) > 2:
            break
        page.wait_for_timeout(250)
    assert len(seen) > 2  # it moves
    page.fill("#stream-prompt input, #stream-prompt textarea", "a blue balloon on the right, a calm lake at night")
    press(page, "stream-change")
    expect(page.get_by_text("Prompt from the next image on")).to_be_visible()
    screenshot(page, "stream")
    page.reload()
    tab(page, "Stream")
    sees(page, "stream-window", 128)  # it goes on
    press(page, "stream-stop")
    expect(page.locator("#stream-facts")).to_contain_text("per second")
    images, *rest = saved_video(page)
    assert rest == [8, (128, 128), 0]
    assert images > len(seen)


@pytest.mark.breadth  # a video that plays while it is made is in tests/web
def test_a_face_talks_as_a_video_with_audio(opened: Any) -> None:
    page = opened(viewport={"width": 1280, "height": 900})
    tab(page, "Stream")
    tab(page, "Talking face")
    text = "a person with a happy face is talking"
    prompt = page.get_by_label("Prompt", exact=True).locator("visible=true")
    retry_until(page.get_by_text(text).click, lambda soon: expect(prompt).to_have_value(text, timeout=soon))
    press(page, "stream-talk")
    page.wait_for_function(
        "document.querySelector('#stream-window video')?.videoWidth === 96", timeout=2 * TIMEOUT_MS
    )  # frames have come
    page.wait_for_function("document.querySelector('#stream-window video').currentTime > 0.4", timeout=2 * TIMEOUT_MS)
    screenshot(page, "face")
    expect(page.locator("#stream-facts")).to_contain_text("per second", timeout=2 * TIMEOUT_MS)
    assert saved_video(page)[1:] == (16, (96, 96), 1)


@pytest.mark.breadth
def test_frames_of_a_video_are_generated_anew(opened: Any, tmp_path: Path) -> None:
    page = opened(viewport={"width": 1280, "height": 900})
    tab(page, "Stream")
    small(page, steps=4)
    choose = page.get_by_label("A video", exact=True).check
    retry_until(choose, lambda soon: expect(page.locator("#stream-video")).to_be_visible(timeout=soon))
    press(page, "stream-run")
    expect(status(page, "stream")).to_contain_text("there is no video: choose one")
    video = grey_video(tmp_path / "video.mp4", frames=6, fps=4)
    page.locator("#stream-video input[type=file]").set_input_files(video)
    expect(page.locator("#stream-video video")).to_be_visible()
    fill(page, "Frames per second", 4)
    press(page, "stream-run")
    expect(page.locator("#stream-window img")).to_be_visible(timeout=2 * TIMEOUT_MS)
    done(page, "stream")
    expect(page.locator("#stream-facts")).to_contain_text("6 in")
    screenshot(page, "stream-video")
    assert saved_video(page) == (6, 4, (128, 128), 0)


@pytest.mark.breadth
def test_an_uploaded_image_is_generated_again_larger(opened: Any, tmp_path: Path) -> None:
    page = opened(viewport={"width": 1280, "height": 900})
    tab(page, "High resolution")
    tab(page, "From an image")
    press(page, "upscale-run")
    expect(status(page, "high-res")).to_contain_text("there is no prompt: describe the image")
    page.get_by_label("Prompt", exact=True).locator("visible=true").fill(
        "a red house on the left, green hills at sunset"
    )
    press(page, "upscale-run")
    expect(status(page, "high-res")).to_contain_text("there is no image: choose one")
    small_one = tmp_path / "small.png"
    Image.radial_gradient("L").resize((96, 80)).save(small_one)
    page.locator("#upscale-image input[type=file]").set_input_files(small_one)
    expect(page.locator("#upscale-image img")).to_be_visible()
    fill(page, "Steps", 8)
    press(page, "upscale-run")
    done(page, "high-res", timeout_ms=2 * TIMEOUT_MS)
    sees(page, "high-res-result", 192, 160)
    expect(page.locator("#high-res-pair img").first).to_be_visible()
    screenshot(page, "high-res-again")


@pytest.mark.breadth
def test_a_wrong_request_is_reported_at_once(opened: Any) -> None:
    page = opened()
    page.get_by_label("Prompt", exact=True).first.fill("")
    press(page, "image-generate")
    expect(page.locator("#image-status [role=alert]")).to_contain_text("there is no prompt: describe the image")
    page.get_by_label("Prompt", exact=True).first.fill("<b>x</b>")
    page.get_by_text("Custom plan").click()
    page.get_by_label("Plan", exact=True).first.fill("<i>patch</i>=2")
    press(page, "image-generate")
    alert = page.locator("#image-status [role=alert]")
    expect(alert).to_contain_text("unknown axis '<i>patch</i>'")
    assert alert.locator("i").count() == 0  # said, not obeyed
    field, message = page.get_by_label("Plan", exact=True).first, page.locator("#image-status")
    retry_until(lambda: field.press("x"), lambda ms: expect(message).not_to_contain_text("unknown axis", timeout=ms))
    tab(page, "Stream")
    source = page.locator("#stream-source")
    image, prompt = (source.get_by_label(label, exact=True) for label in ("An image", "The prompt alone"))
    image.check()
    page.get_by_label("Prompt", exact=True).locator("visible=true").fill("a red house")
    press(page, "stream-run")
    expect(status(page, "stream")).to_contain_text("there is no image: choose one")
    message = page.locator("#stream-status")  # of what is no longer asked for
    retry_until(
        lambda: (image.check(), prompt.check()),
        lambda ms: expect(message).not_to_contain_text("there is no image", timeout=ms),
    )


SLOW_TO_CLOSE = """
const plain = window.fetch, marker = 'data: {"msg":"close_stream"';
window.fetch = async (input, options) => {
  const response = await plain(input, options);
  if (!new URL(input.url ?? input, window.location).pathname.endsWith("/queue/data")) return response;
  const [reads, writes] = [new TextDecoder(), new TextEncoder()];
  const slow = new TransformStream({async transform(chunk, out) {
    const text = reads.decode(chunk, {stream: true}), start = text.indexOf(marker);
    if (start < 0) return out.enqueue(writes.encode(text));
    out.enqueue(writes.encode(text.slice(0, start)));
    await new Promise((resume) => setTimeout(resume, 2000));
    out.enqueue(writes.encode(text.slice(start)));
  }});
  return new Response(response.body.pipeThrough(slow), response);
};
"""
"""In the browser, before the page's own scripts: the client reads late that the server has ended its messages."""


def test_an_event_that_joins_while_the_stream_is_closed_is_answered(opened: Any) -> None:
    """Its job would never show a step otherwise, and the button could not be clicked again."""
    page = opened(script=SLOW_TO_CLOSE)
    expect(page.locator("#ready")).to_be_hidden()  # until then the page has an event under way
    prompt, alert = page.get_by_label("Prompt", exact=True).first, page.locator("#image-status [role=alert]")
    prompt.fill("")
    press(page, "image-generate")
    expect(alert).to_contain_text("there is no prompt")
    prompt.fill("a red house")
    small(page, steps=2)
    press(page, "image-generate")
    done(page, "image")


@pytest.mark.breadth
def test_a_plan_for_a_cluster_that_is_not_here(opened: Any) -> None:
    page = opened(viewport={"width": 1280, "height": 900})
    expect(page.locator("#ready")).to_be_hidden()
    tab(page, "Plan")
    press(page, "plan-run")
    expect(page.locator("#plan-table tr.marked, #plan-summary dl")).not_to_have_count(0)
    expect(page.locator("#plan-diagram svg rect.place")).not_to_have_count(0)
    screenshot(page, "plan")


@pytest.mark.parametrize(("position", "scheme"), first_of(LOOKS, ("phone", "dark")))
def test_every_tab_can_be_read(opened: Any, position: str, scheme: Any) -> None:
    page = opened(color_scheme=scheme, **WINDOWS[position])
    assert page.evaluate("document.body.classList.contains('dark')") == (scheme == "dark")
    expect(page.locator("#ready")).to_be_hidden()  # until then there is nothing to plan for
    for name, button in every_tab(page):
        if button is not None:
            page.evaluate("scrollTo(0, 0)")
            expect(page.locator(f"#{button}")).to_be_in_viewport(ratio=1)  # however many fields are above it
        if name == "Plan":
            expect(page.locator("#plan-table table")).to_be_visible()
        check_looks(page, f"{position}-{scheme}-{name.lower().replace(' ', '-')}")


def test_sigterm_leaves_nothing_behind(server: ServedApp, scratch: Path) -> None:
    """As `docker stop` ends it: videos and uploads are gone, workers too. The last test, since the page is gone."""
    response = httpx.post(f"{server.address}/gradio_api/upload", files={"files": ("a.png", b"x" * 1000, "image/png")})
    (uploaded,) = map(Path, response.json())
    assert uploaded.is_relative_to(scratch)
    assert uploaded.exists()
    assert server.end(signal.SIGTERM) == 128 + signal.SIGTERM
    assert list(scratch.rglob("patchpar-app-*")) == []
    assert not uploaded.exists()
    until(lambda: not server.is_there, "the workers, which are of its session, to be gone")
