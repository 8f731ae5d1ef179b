"""The tab Stream: pictures one after another while they are drawn, and a face that talks."""

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import gradio as gr

from patchpar.models.files import EMBEDDED, embedded_model
from patchpar.stream.config import StreamConfig

from . import words
from .answers import answered
from .face import LONGEST, TalkingFaceJob, TalkingFaceRequest
from .fields import Fields, Forms, picture_fields, settles, uploaded
from .footage import MOST_RATE, VideoFile
from .image_tab import buttons
from .jobs import Job, JobView
from .keeping import NAME, SavedVideo
from .limits import picture_from, sound_from
from .live import ImageFeed, MediaFeed, VideoFeed
from .orders import LONGEST_PROMPT
from .streaming import ImageStreamJob, StreamControls, StreamRequest, StreamSummary
from .studio import AppState
from .watching import looked_at

KIND = "stream"
SOURCES = {"The prompt alone": "prompt", "A picture": "picture", "A film": "film", "The camera": "camera"}
HINT = "The stream will be here, picture after picture, until you stop it. Its prompt can be changed meanwhile."
NOTHING = "Stopped before the first picture had come: there is nothing to show or to save."
STREAM_STEPS = 8  # at the beginning, though a model may have more: a stream wants to move
NO_FACE = "No model of a face is loaded. Start the app with --face FOLDER to have one talk here."


def failed(sentence: str) -> tuple[Any, ...]:
    """What `_looked_at` fills, where something went wrong."""
    return gr.skip(), words.failure(sentence), gr.skip(), gr.skip(), *_buttons(None)


class StreamTab:
    """What the tab does."""

    def __init__(self, studio: AppState) -> None:
        self._studio = studio

    @answered(failed)
    async def draw(self, owner: str, source: str, *fields: Any) -> AsyncIterator[Any]:
        """The button of streams of pictures. `fields`: picture, film, rate, strength, then those of an order."""

        def begin() -> Job:
            workers = self._studio.workers
            wanted = stream_order(SOURCES.get(source, "prompt"), *fields)
            wanted.check_devices(workers.count)
            return self._submit(owner, ImageFeed(), partial(ImageStreamJob, workers, wanted))

        async for shown in self._begun(owner, begin):
            yield shown

    @answered(failed)
    async def talk(self, owner: str, sound: Any, reference: Any, prompt: str, seconds: Any) -> AsyncIterator[Any]:
        """The button of the face."""

        def begin() -> Job:
            looks = picture_from(reference) if reference is not None else None
            spoken = sound_from(sound) if sound is not None else None
            wanted = TalkingFaceRequest(prompt=prompt or "", reference=looks, sound=spoken, seconds=float(seconds or 0))
            return self._submit(owner, VideoFeed(), partial(TalkingFaceJob, self._studio.workers, wanted))

        async for shown in self._begun(owner, begin):
            yield shown

    @answered(words.failure)
    def say(self, owner: str, prompt: str) -> str:
        """Another prompt, while the stream runs."""
        job = self._studio.desk.job_of(owner, KIND)
        controls = self._studio.desk.kept(owner, "controls")
        if job is None or job.view.is_over or controls is None:
            return words.failure("no stream is running: start one first")
        controls.say(prompt or "")
        return words.notice(f"From the next picture on: {prompt}")

    @answered()
    def stop(self, owner: str) -> None:
        """Let come out what is under way; what waits in line is cancelled."""
        job, controls = self._studio.desk.job_of(owner, KIND), self._studio.desk.kept(owner, "controls")
        if controls is not None:
            controls.is_stopped = True
        if job is not None and job.view.state == "waiting":
            job.cancel()

    @answered()
    def see(self, owner: str, frame: Any) -> None:
        """A picture from the camera."""
        controls = self._studio.desk.kept(owner, "controls")
        if controls is not None and frame is not None:
            controls.frame = frame

    @answered(failed)
    async def resume(self, owner: str) -> AsyncIterator[Any]:
        """The page has been reloaded."""
        async for shown in self._looked_at(owner):
            yield shown

    def _submit(self, owner: str, feed: Any, stream: Callable[[StreamControls, Any, SavedVideo], Any]) -> Job:
        """Begin, and remember for the page what changes and shows its stream. Raises PlanError, and nothing changes."""
        studio, controls = self._studio, StreamControls()
        kept = SavedVideo(studio.folder_of(owner) / NAME)
        job = studio.desk.submit(owner, KIND, stream(controls, feed, kept).run)
        studio.desk.keep(owner, "controls", controls)
        studio.desk.keep(owner, "feed", studio.feeds.add(feed))
        return job

    async def _begun(self, owner: str, begin: Callable[[], Job]) -> AsyncIterator[Any]:
        await asyncio.to_thread(begin)  # which decodes pictures and sound, and other pages go on meanwhile
        async for shown in self._looked_at(owner):
            yield shown

    async def _looked_at(self, owner: str) -> AsyncIterator[Any]:
        feed, is_shown = self._studio.desk.kept(owner, "feed"), False
        async for view in looked_at(self._studio.desk.job_of(owner, KIND), lambda view: view):
            window = gr.skip() if is_shown or view is None or view.state == "waiting" else live(feed)
            is_shown = is_shown or (view is not None and view.state != "waiting")
            yield window, *show(view)


def stream_order(source: Any, picture: Any, film: Any, rate: Any, *rest: Any) -> StreamRequest:
    """What the fields of a page ask for. Raises PlanError."""
    strength, *fields = rest
    return StreamRequest(
        order=Fields.order(*fields),
        source=source,
        picture=picture_from(picture) if source == "picture" else None,
        film=VideoFile.of(film) if source == "film" else None,
        rate=float(rate or 0),
        strength=float(strength or 0),
    )


def live(feed: MediaFeed | None) -> Any:
    """Where a browser looks at a feed."""
    if feed is None:
        return gr.skip()
    if isinstance(feed, VideoFeed):
        return f'<div class="live"><video src="{feed.address}" autoplay controls playsinline></video></div>'
    return f'<div class="live"><img src="{feed.address}" alt="the stream"></div>'


def show(view: JobView | None) -> tuple[Any, ...]:
    """Status, figures, the film to save, buttons."""
    facts, film = gr.skip(), None
    if view is not None and view.state == "done":
        streamed: StreamSummary = view.result
        facts = words.pairs(streamed.rows()) if streamed.pictures else ""
        film = streamed.film if streamed.film is not None and streamed.film.exists() else None
    save = gr.update(value=None if film is None else str(film), visible=film is not None)
    is_empty = view is not None and view.state == "done" and not view.result.pictures
    return words.notice(NOTHING) if is_empty else words.status(view), facts, save, *_buttons(view)


def _buttons(view: JobView | None) -> tuple[Any, Any, Any]:
    begin, stop = buttons(view)
    return begin, begin, stop


def build(studio: AppState, owner: gr.State, forms: Forms) -> tuple[StreamTab, list[Any]]:
    """Lay the tab out. Returns it, and what `resume` fills."""
    tab = StreamTab(studio)
    with gr.Row(equal_height=False):
        with gr.Column(scale=5, min_width=320), gr.Tabs():
            with gr.Tab("Pictures"):
                pictures = _PictureFields(forms)
            with gr.Tab("Face"):
                face = _FaceFields(studio)
        with gr.Column(scale=6, min_width=320):
            window = gr.HTML(words.notice(HINT), elem_id="stream-window")
            status = gr.HTML(elem_id="stream-status")
            with gr.Row(equal_height=True):
                prompt = gr.Textbox(label="Another prompt, from now on", max_lines=1, elem_id="stream-prompt", scale=4)
                say = gr.Button("Change", scale=1, min_width=90, elem_id="stream-say")
            stop = gr.Button("Stop", interactive=False, elem_id="stream-stop")
            said, facts = gr.HTML(), gr.HTML(elem_id="stream-facts")
            save = gr.DownloadButton("Save the film", visible=False, elem_id="stream-save")
    filled = [window, status, facts, save, pictures.begin, face.begin, stop]
    pictures.begin.click(tab.draw, [owner, *pictures.components], filled, show_progress="hidden")
    face.begin.click(tab.talk, [owner, *face.components], filled, show_progress="hidden")
    gr.on([say.click, prompt.submit], tab.say, [owner, prompt], said, show_progress="hidden")
    stop.click(tab.stop, owner, None, show_progress="hidden")
    settles(status, "", [*pictures.components, *face.components])
    pictures.camera.stream(tab.see, [owner, pictures.camera], None, stream_every=0.2, show_progress="hidden")
    return tab, filled


def _shipped(folder: Path, name: str) -> str:
    """The path of a file that comes with the package, served from where it is: what Gradio copies it later deletes."""
    path = (folder / name).resolve()
    gr.set_static_paths([path])
    return str(path)


class _PictureFields:
    """What a stream of pictures is told."""

    def __init__(self, forms: Forms) -> None:
        fields = picture_fields(forms, most_steps=STREAM_STEPS)
        source = gr.Radio(list(SOURCES), value=next(iter(SOURCES)), label="Begin with", elem_id="stream-source")
        picture = uploaded(
            "Picture", sources=["upload", "clipboard"], visible=False, height=240, elem_id="stream-picture"
        )
        self.camera = uploaded("Camera", sources=["webcam"], streaming=True, visible=False, elem_id="stream-camera")
        film = gr.Video(label="Film", sources=["upload"], visible=False, height=240, elem_id="stream-film")
        rate = gr.Slider(1, MOST_RATE, 8, step=1, label="Frames taken from a second of film", visible=False)
        strength = gr.Slider(0.05, 1, 0.6, step=0.05, label="Strength: how much is drawn anew", visible=False)
        self.begin = gr.Button("Stream", variant="primary", interactive=False, elem_id="stream-run")
        self.components = [source, picture, film, rate, strength, *fields.components]
        source.change(_fields_of, source, [picture, film, rate, self.camera, strength], show_progress="hidden")


class _FaceFields:
    """What a face is told."""

    def __init__(self, studio: AppState) -> None:
        face = studio.workers.setup.face
        has_face = face is not None
        gr.HTML(words.notice(NO_FACE), visible=not has_face)
        with gr.Column(visible=has_face):
            prompt = gr.Textbox(label="Prompt", max_lines=2, max_length=LONGEST_PROMPT)
            sound = gr.Audio(label="What it says", sources=["upload", "microphone"], type="filepath")
            if face in EMBEDDED:
                folder = embedded_model(str(face))
                speech = _shipped(folder, "speech.wav")
                shown = [[text, speech] for text in StreamConfig.load(folder).prompts]
                gr.Examples(shown, [prompt, sound], label="What the embedded face can do")
            reference = uploaded("Whose looks it has", sources=["upload", "webcam"], height=240)
            seconds = gr.Slider(1, LONGEST, 5, step=1, label="Seconds, without sound")
            self.begin = gr.Button("Talk", variant="primary", interactive=False, elem_id="stream-talk")
        self.components = [sound, reference, prompt, seconds]


@answered()
def _fields_of(source: str) -> tuple[Any, ...]:
    """The fields that a source needs."""
    kind = SOURCES.get(source)
    shown = (kind == "picture", kind == "film", kind == "film", kind == "camera", kind != "prompt")
    return tuple(gr.update(visible=each) for each in shown)
