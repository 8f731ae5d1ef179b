"""The tab Video: a video from a prompt, by a model of its own that generates videos."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import gradio as gr

from . import html
from .fields import GUIDANCE, clears_error, seed_field
from .job_queue import Job, JobView
from .job_tab import JobTab, buttons, connect_cancel, connect_start, reports_refusal
from .presets import Preset, preset_or_plan
from .state import AppState
from .video_generation import VideoJobRequest, VideoJobResult, generate_video

HINT = "Name a model that generates videos, such as one of Wan, LTX-Video or CogVideoX. 0: its own value."
NAMES = ("model", "prompt", "negative", "width", "height", "frames", "fps", "steps", "guidance", "seed")


def failed(message: str) -> tuple[Any, ...]:
    """Outputs of `show` for an error."""
    return gr.skip(), html.failure(message), gr.skip(), *buttons(None)


class VideoTab(JobTab):
    """Event handlers of the tab."""

    kind = "video"

    def __init__(self, state: AppState) -> None:
        super().__init__(state, show, failed)

    def submit(self, owner: str, request: VideoJobRequest, preset: Preset) -> Job:
        """Queue the job. Raises PlanError, also for what is no video model or does not fit into memory."""
        state = self._state
        state.workers.video_setup(request.model)

        def work(job: Job) -> VideoJobResult:
            found = generate_video(state.image_runner, job, request, preset, state.folder_of(owner))
            state.job_queue.store(owner, "run", found.run)
            return found

        return self._queue(owner, work)

    @reports_refusal(failed)
    async def generate(self, owner: str, plan: str, *fields: Any) -> AsyncIterator[Any]:
        """The button. `fields`: in the order of NAMES."""
        request = VideoJobRequest.of(**dict(zip(NAMES, fields, strict=True)))
        preset = preset_or_plan(plan, self._state.workers.count)
        # Reads the files of the model, which must not block other pages.
        job = await asyncio.to_thread(self.submit, owner, request, preset)
        async for update in self._updates(owner, job):
            yield update


def show(view: JobView | None) -> tuple[Any, ...]:
    """Video, status, statistics, both buttons."""
    if view is None or view.state != "done":
        return gr.skip(), html.status(view, HINT), "", *buttons(view)
    found: VideoJobResult = view.result
    video = str(found.path) if found.path.exists() else gr.skip()  # files go after an hour
    return video, html.notice(f"{found.frames} frames."), html.facts(found.run, found.why), *buttons(view)


def build(state: AppState, owner: gr.State) -> tuple[VideoTab, list[Any]]:
    """Build the tab. Returns it, and the outputs of `resume`."""
    tab = VideoTab(state)
    with gr.Row(equal_height=False):
        with gr.Column(scale=5, min_width=320):
            fields = _fields()
            presets = state.workers.presets
            plan = gr.Dropdown(
                [(each.title, each.label) for each in presets],
                value=presets[0].label,
                label="Speed and quality: a preset or a plan",
                allow_custom_value=True,
            )
            with gr.Row():
                start = gr.Button("Generate", variant="primary", interactive=False, elem_id="video-run")
                cancel = gr.Button("Cancel", interactive=False, elem_id="video-cancel")
        with gr.Column(scale=6, min_width=320):
            video = gr.Video(label="Video", interactive=False, height=420, elem_id="video-result")
            status = gr.HTML(html.notice(HINT), elem_id="video-status")
            facts = gr.HTML(elem_id="video-facts")
    filled = [video, status, facts, start, cancel]
    connect_start([start.click], tab.generate, [owner, plan, *fields], filled, status)
    clears_error(status, HINT, [plan, *fields])
    connect_cancel(cancel, state, owner)
    return tab, filled


def _fields() -> list[Any]:
    """Components in the order of NAMES."""
    model = gr.Textbox(label="Video model", placeholder="a folder, or org/name", max_lines=1, elem_id="video-model")
    prompt = gr.Textbox(label="Prompt", lines=2)
    negative = gr.Textbox(label="Negative prompt", max_lines=2)
    with gr.Row():
        width, height = (gr.Number(0, label=each, precision=0, min_width=120) for each in ("Width", "Height"))
    with gr.Row():
        frames = gr.Number(0, label="Frames", precision=0, min_width=120)
        fps = gr.Number(16, label="Frames per second", precision=0, min_width=120)
    with gr.Row():
        steps = gr.Number(0, label="Steps", precision=0, min_width=120)
        guidance = gr.Number(0, label=GUIDANCE, min_width=120)
    return [model, prompt, negative, width, height, frames, fps, steps, guidance, seed_field()]
