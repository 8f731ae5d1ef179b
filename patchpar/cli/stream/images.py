"""`patchpar stream --input`: image-to-image on the frames of a folder or a video."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from patchpar.cli.console import stdout_kept_clean
from patchpar.cli.flags import given
from patchpar.cli.output_files import SUFFIXES
from patchpar.cli.stream.live_inputs import LiveInputs, notes_of
from patchpar.cli.stream.ranks import StreamRanks
from patchpar.cli.stream.run import FrameOutputs, ProgressMeter, StreamReport, TimedFrames, living_line, paced, show_all
from patchpar.errors import PlanError
from patchpar.media.image_file import check_pixels, read_image_file
from patchpar.models.files import path_of
from patchpar.models.task import RequestedTask

if TYPE_CHECKING:
    from PIL.Image import Image

    from patchpar.cli.stream.flags import StreamFlags

FPS = 16.0
"""Frames per second of a folder of images without --fps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFrames:
    """Iterates over the images of `source`, a folder or a video, at `fps` frames per second."""

    source: Path
    fps: float

    @classmethod
    def of(cls, source: Path, fps: float | None) -> ImageFrames:
        """Check that `source` has images. `fps`: None for the video's own rate. Raises PlanError."""
        source = path_of(source)
        if source.is_dir():
            if not _images_in(source):
                raise PlanError(f"--input {source}: this folder has no images ({', '.join(SUFFIXES)})")
            return cls(source=source, fps=fps or FPS)
        if not source.is_file():
            raise PlanError(f"--input {source}: there is no such folder or video")
        rate = _rate_of(source)
        return cls(source=source, fps=fps or rate)

    def __iter__(self) -> Iterator[Image]:
        if not self.source.is_dir():
            return self._from_video()
        return (read_image_file(path, f"--input {path}") for path in _images_in(self.source))

    def _from_video(self) -> Iterator[Image]:
        import av

        from patchpar.media.media_file import displayed_image, open_media

        try:
            with open_media(self.source) as container:
                track = container.streams.video[0]
                for frame in container.decode(track):
                    yield displayed_image(frame, track, f"a frame of --input {self.source}")
        except av.FFmpegError as error:
            raise PlanError(f"--input {self.source} is broken: {error.strerror}") from error


def stream_images(request: StreamFlags) -> None:
    """Run the stream and report. Raises PlanError and the errors of the ranks."""
    assert request.input is not None
    frames = None if request.has_camera else ImageFrames.of(Path(request.input), request.fps)
    live = LiveInputs.of(request, None)
    RequestedTask(verb="stream", has_image=None).check_model(request.weights, request.for_loading())
    with stdout_kept_clean(request.json), StreamRanks() as ranks, ExitStack() as stack:  # videos close before ranks
        report = _run(request, frames, live, stack, ranks)
    report.write(request.json)
    report.finish(is_endless=request.is_endless)


def _run(
    request: StreamFlags, frames: ImageFrames | None, live: LiveInputs, stack: ExitStack, ranks: StreamRanks
) -> StreamReport:
    show_line = stack.enter_context(living_line("starting"))  # before the imports, which take seconds
    from patchpar import ImageStreamingPipeline
    from patchpar.models.quiet_libraries import silence_libraries

    silence_libraries()
    fps = request.fps or FPS if frames is None else frames.fps
    screens = FrameOutputs.pages(request, fps, None, stack, live.page)
    print_line = screens.status_line(show_line)
    opened = {"takes_image": True, **request.for_loading()}
    pipe = ranks.load(lambda: ImageStreamingPipeline.from_pretrained(request.weights, **opened))
    screens = screens.with_file(stack)
    arguments = given(
        prompt=request.prompt,
        negative_prompt=request.negative_prompt,
        num_inference_steps=request.steps,
        strength=request.strength,
        guidance_scale=request.guidance_scale,
        restarts=request.restarts,
    )
    meter = ProgressMeter()
    session = pipe.stream(seed=request.seed, **arguments)
    note: Callable[[], str] = str
    inputs: Iterable[Image]
    if frames is None:
        camera, inputs = live.camera(stack)
        note = notes_of(camera)
    else:
        inputs = frames
    results = session.map({"image": _sized(frame, request)} for frame in inputs)
    parts = _parts(results, fps, note)
    ending = show_all(paced(parts) if request.is_live else parts, session, screens.all, meter, print_line, fps)
    ranks.has_signal = bool(ending.code)
    return StreamReport(
        plan=repr(pipe), ranks=ranks, meter=meter, ending=ending, dropped=session.dropped, outputs=screens.saved
    )


def _sized(frame: Image, request: StreamFlags) -> Image:
    if request.height is None or request.width is None:
        return frame
    from PIL import ImageOps

    return ImageOps.fit(frame, (request.width, request.height))


def _parts(results: Iterator[Any], fps: float, note: Callable[[], str]) -> Iterator[TimedFrames]:
    import numpy as np
    import torch

    for result in results:
        image = torch.from_numpy(np.array(result.image.convert("RGB")))
        yield TimedFrames(frames=image[None], pts=result.number / fps, audio=None, status=note() or "running")


def _images_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)


def _rate_of(video: Path) -> float:
    import av

    from patchpar.media.media_file import open_media, rate_of

    try:
        with open_media(video) as container:
            if not container.streams.video:
                raise PlanError(f"--input {video} has no video track: {container.format.name}")
            stream = container.streams.video[0]
            check_pixels(stream.codec_context.width, stream.codec_context.height, f"a frame of --input {video}")
            return rate_of(stream) or FPS
    except av.FFmpegError as error:
        why = f"{error.strerror}; use .mp4, for example"
        raise PlanError(f"--input {video} cannot be read as a video: {why}") from error
