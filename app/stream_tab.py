"""The tab Stream: image streams, and a talking face."""

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import gradio as gr

from patchpar.models.files import EMBEDDED, embedded_model
from patchpar.models.streaming.config import StreamConfig

from . import html
from .feeds import ImageFeed, LiveFeed, MediaFeed, VideoFeed
from .fields import Fields, Forms, clears_error, image_fields, uploaded
from .handler_errors import reports_errors
from .image_stream import ImageStreamJob, StreamControls, StreamRequest, StreamSummary
from .job_queue import Job, JobView
from .job_tab import JobTab, buttons, reports_refusal
from .job_updates import updates_of
from .limits import read_audio_file, read_image
from .saved_video import NAME, SavedVideo
from .state import AppState
from .talking_face import MAX_SECONDS, TalkingFaceJob, TalkingFaceRequest
from .video_file import MAX_RATE, VideoFile

SOURCES = {"The prompt alone": "prompt", "An image": "image", "A video": "video", "The camera": "camera"}
HINT = "The stream is shown here until you stop it. The prompt can be changed while it runs."
NOTHING = "Stopped before the first image: there is nothing to show or to save."
STREAM_STEPS = 8  # initially, even if the model's default is higher: a stream needs a high frame rate
NO_FACE = "No talking-face model is loaded. Start the app with --face FOLDER."


def failed(message: str) -> tuple[Any, ...]:
    """Outputs of `_updates` for an error."""
    return gr.skip(), html.failure(message), gr.skip(), gr.skip(), *_buttons(None)


class StreamTab(JobTab):
    """Event handlers of the tab."""

    kind = "stream"

    def __init__(self, state: AppState) -> None:
        super().__init__(state, show, failed)

    @reports_refusal(failed)
    async def generate(self, owner: str, source: str, *fields: Any) -> AsyncIterator[Any]:
        """The button of image streams. `fields`: image, video, rate, strength, then those of a request."""

        def start() -> Job:
            workers = self._state.workers
            request = stream_request(SOURCES.get(source, "prompt"), *fields)
            return self._submit(owner, ImageFeed(), partial(ImageStreamJob, workers, request))

        async for update in self._started(owner, start):
            yield update

    @reports_refusal(failed)
    async def talk(self, owner: str, *fields: Any) -> AsyncIterator[Any]:
        """The button of the talking face. `fields`: those of `face_request`."""

        def start() -> Job:
            request = face_request(*fields)
            return self._submit(owner, request.new_feed(), partial(TalkingFaceJob, self._state.workers, request))

        async for update in self._started(owner, start):
            yield update

    @reports_errors(html.failure)
    def set_prompt(self, owner: str, prompt: str) -> str:
        """Change the prompt while the stream runs."""
        job = self._state.job_queue.job_of(owner, self.kind)
        controls = self._state.job_queue.stored(owner, "controls")
        if job is None or job.view.is_over or controls is None:
            return html.failure("no stream is running: start one first")
        controls.set_prompt(prompt or "")
        return html.notice(f"Prompt from the next image on: {prompt}")

    @reports_errors()
    def stop(self, owner: str) -> None:
        """Stop after the images in flight; a waiting job is cancelled."""
        job, controls = self._state.job_queue.job_of(owner, self.kind), self._state.job_queue.stored(owner, "controls")
        if controls is not None:
            controls.is_stopped = True
        if job is not None and job.view.state == "waiting":
            job.cancel()

    @reports_errors()
    def receive_frame(self, owner: str, frame: Any) -> None:
        """A frame from the camera."""
        controls = self._state.job_queue.stored(owner, "controls")
        if controls is not None and frame is not None:
            controls.frame = frame

    def _submit(self, owner: str, feed: Any, stream: Callable[[StreamControls, Any, SavedVideo], Any]) -> Job:
        """Queue the job, and store its controls and its feed for the page. Raises PlanError, without changes."""
        state, controls = self._state, StreamControls()
        saved = SavedVideo(state.folder_of(owner) / NAME)
        job = self._queue(owner, stream(controls, feed, saved).run)
        job.outcome.add_done_callback(lambda _: feed.close())  # also if it never runs, or browsers would wait for it
        state.job_queue.store(owner, "controls", controls)
        state.job_queue.store(owner, "feed", state.feeds.add(feed))
        return job

    async def _started(self, owner: str, start: Callable[[], Job]) -> AsyncIterator[Any]:
        job = await asyncio.to_thread(start)  # decodes images and audio, which must not block other pages
        async for update in self._updates(owner, job):
            yield update

    async def _updates(self, owner: str, job: Job | None) -> AsyncIterator[Any]:
        feed, is_visible = self._state.job_queue.stored(owner, "feed"), False
        async for view in updates_of(job, lambda view: view):
            window = gr.skip() if is_visible or view is None or view.state == "waiting" else live(feed)
            is_visible = is_visible or (view is not None and view.state != "waiting")
            yield window, *show(view)


def stream_request(source: Any, image: Any, video: Any, rate: Any, *rest: Any) -> StreamRequest:
    """The request that the fields describe. Raises PlanError."""
    strength, *fields = rest
    return StreamRequest(
        generate=Fields.request(*fields),
        source=source,
        image=read_image(image) if source == "image" else None,
        video=VideoFile.of(video) if source == "video" else None,
        rate=float(rate or 0),
        strength=float(strength or 0),
    )


def face_request(
    audio: Any, reference: Any, prompt: Any, seconds: Any, is_live: Any, pose: Any = None
) -> TalkingFaceRequest:
    """The request that the fields describe; a live one leaves the recording out. Raises PlanError."""
    return TalkingFaceRequest(
        prompt=prompt or "",
        reference=read_image(reference) if reference is not None else None,
        audio=read_audio_file(audio) if audio is not None and not is_live else None,
        seconds=float(seconds or 0),
        is_live=bool(is_live),
        pose=VideoFile.of(pose) if pose is not None else None,
    )


def live(feed: MediaFeed | None) -> Any:
    """The HTML element that plays a feed."""
    if feed is None:
        return gr.skip()
    if isinstance(feed, LiveFeed):
        frame = f'<iframe src="{feed.address}/" title="the stream, and its microphone" allow="microphone; autoplay">'
        return f'<div class="live">{frame}</iframe></div>'
    if isinstance(feed, VideoFeed):
        return f'<div class="live"><video src="{feed.address}" autoplay controls playsinline></video></div>'
    return f'<div class="live"><img src="{feed.address}" alt="the stream"></div>'


def show(view: JobView | None) -> tuple[Any, ...]:
    """Status, statistics, the video to save, buttons."""
    facts, video = gr.skip(), None
    if view is not None and view.state == "done":
        streamed: StreamSummary = view.result
        facts = html.pairs(streamed.rows()) if streamed.images else ""
        video = streamed.video if streamed.video is not None and streamed.video.exists() else None
    save = gr.update(value=None if video is None else str(video), visible=video is not None)
    is_empty = view is not None and view.state == "done" and not view.result.images
    return html.notice(NOTHING) if is_empty else html.status(view), facts, save, *_buttons(view)


def _buttons(view: JobView | None) -> tuple[Any, Any, Any]:
    start, stop = buttons(view)
    return start, start, stop


def build(state: AppState, owner: gr.State, forms: Forms) -> tuple[StreamTab, list[Any]]:
    """Build the tab. Returns it, and the outputs of `resume`."""
    tab = StreamTab(state)
    with gr.Row(equal_height=False):
        with gr.Column(scale=5, min_width=320), gr.Tabs():
            with gr.Tab("Images"):
                images = _ImageStreamFields(forms)
            with gr.Tab("Talking face"):
                face = _FaceFields(state)
        with gr.Column(scale=6, min_width=320):
            window = gr.HTML(html.notice(HINT), elem_id="stream-window")
            status = gr.HTML(elem_id="stream-status")
            with gr.Row(equal_height=True):
                prompt = gr.Textbox(label="New prompt", max_lines=1, elem_id="stream-prompt", scale=4)
                set_prompt = gr.Button("Change", scale=1, min_width=90, elem_id="stream-change")
            stop = gr.Button("Stop", interactive=False, elem_id="stream-stop")
            response, facts = gr.HTML(), gr.HTML(elem_id="stream-facts")
            save = gr.DownloadButton("Save the video", visible=False, elem_id="stream-save")
    filled = [window, status, facts, save, images.start, face.start, stop]
    images.start.click(tab.generate, [owner, *images.components], filled, show_progress="hidden")
    face.start.click(tab.talk, [owner, *face.components], filled, show_progress="hidden")
    gr.on([set_prompt.click, prompt.submit], tab.set_prompt, [owner, prompt], response, show_progress="hidden")
    stop.click(tab.stop, owner, None, show_progress="hidden")
    clears_error(status, "", [*images.components, *face.components])
    images.camera.stream(tab.receive_frame, [owner, images.camera], None, stream_every=0.2, show_progress="hidden")
    return tab, filled


def _static_path(folder: Path, name: str) -> str:
    """Path of a file of the package, served in place: Gradio deletes what it has copied."""
    path = (folder / name).resolve()
    gr.set_static_paths([path])
    return str(path)


class _ImageStreamFields:
    """Fields of an image stream."""

    def __init__(self, forms: Forms) -> None:
        fields = image_fields(forms, max_steps=STREAM_STEPS)
        source = gr.Radio(list(SOURCES), value=next(iter(SOURCES)), label="Source", elem_id="stream-source")
        image = uploaded("Image", sources=["upload", "clipboard"], visible=False, height=240, elem_id="stream-image")
        self.camera = uploaded("Camera", sources=["webcam"], streaming=True, visible=False, elem_id="stream-camera")
        video = gr.Video(label="Video", sources=["upload"], visible=False, height=240, elem_id="stream-video")
        rate = gr.Slider(1, MAX_RATE, 8, step=1, label="Frames per second of video", visible=False)
        strength = gr.Slider(0.05, 1, 0.6, step=0.05, label="Strength (1: ignore the input)", visible=False)
        with gr.Row():
            self.start = gr.Button("Stream", variant="primary", interactive=False, elem_id="stream-run")
        self.components = [source, image, video, rate, strength, *fields.components]
        source.change(_fields_of, source, [image, video, rate, self.camera, strength], show_progress="hidden")


class _FaceFields:
    """Fields of the talking face."""

    def __init__(self, state: AppState) -> None:
        face = state.workers.setup.face
        has_face = face is not None
        gr.HTML(html.notice(NO_FACE), visible=not has_face)
        with gr.Column(visible=has_face):
            prompt = gr.Textbox(label="Prompt", max_lines=2)
            is_live = gr.Checkbox(label="Talk to it: a microphone, while the face talks", elem_id="stream-listen")
            audio = gr.Audio(label="Audio", sources=["upload", "microphone"], type="filepath")
            if face in EMBEDDED:
                folder = embedded_model(str(face))
                speech = _static_path(folder, "speech.wav")
                update = [[text, speech] for text in StreamConfig.load(folder).prompts]
                gr.Examples(update, [prompt, audio], label="Examples for the embedded model")
            reference = uploaded("Reference face", sources=["upload", "webcam"], height=240)
            seconds = gr.Slider(1, MAX_SECONDS, 5, step=1, label="Seconds (without audio)")
            takes_poses = has_face and face not in EMBEDDED
            pose = gr.Video(
                label="Video of poses (Wan-S2V, Live Avatar)",
                sources=["upload"],
                visible=takes_poses,
                height=240,
                elem_id="stream-pose",
            )
            with gr.Row():
                self.start = gr.Button("Talk", variant="primary", interactive=False, elem_id="stream-talk")
        self.components = [audio, reference, prompt, seconds, is_live, pose]
        is_live.change(_fields_unless, is_live, [audio, seconds], show_progress="hidden")


@reports_errors()
def _fields_unless(is_live: bool) -> tuple[Any, ...]:
    """Visibility of the fields that a live microphone replaces."""
    return (gr.update(visible=not is_live),) * 2


@reports_errors()
def _fields_of(source: str) -> tuple[Any, ...]:
    """Visibility of the fields for a source."""
    kind = SOURCES.get(source)
    update = (kind == "image", kind == "video", kind == "video", kind == "camera", kind != "prompt")
    return tuple(gr.update(visible=each) for each in update)
