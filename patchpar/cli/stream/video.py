"""`patchpar stream` with a block-causal model: audio, reference image and prompt in, frames and audio out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from patchpar.cli.console import stdout_kept_clean
from patchpar.cli.flags import FACE
from patchpar.cli.flags import given as given_flags
from patchpar.cli.output_files import removed_after_error
from patchpar.cli.stream.flags import SPEECH
from patchpar.cli.stream.forecast import plan_of
from patchpar.cli.stream.live_inputs import LiveInputs
from patchpar.cli.stream.ranks import StreamRanks
from patchpar.cli.stream.run import FrameOutputs, ProgressMeter, StreamReport, TimedFrames, living_line, show_all
from patchpar.errors import PlanError
from patchpar.models.files import embedded_model, path_of

if TYPE_CHECKING:
    from patchpar.cli.stream.flags import StreamFlags
    from patchpar.models.streaming.stream_folder import StreamFolder
    from patchpar.plan.stream_plan import StreamPlan
    from patchpar.stream.delivery import Pacing

HOLD = 0.5
"""Seconds after which the status line shows that a stream is being resumed."""


def stream_video(request: StreamFlags) -> None:
    """Run the stream and report. Raises PlanError and the errors of the ranks."""
    from patchpar.models.streaming.stream_folder import StreamFolder
    from patchpar.stream.video_source import load_reference_image

    folder = StreamFolder.read(request.weights)
    config, reference = folder.config, None
    _check_start(request, folder)
    live = LiveInputs.of(request, folder.rate)
    if request.reference is not None:
        reference = load_reference_image(request.reference, config.height, config.width)
    given = {"reference": reference, "audio": _audio(request, folder)} | _of_speech(request, folder)
    with stdout_kept_clean(request.json), StreamRanks() as ranks, ExitStack() as stack:  # videos close before ranks
        report = _run(request, folder, given | {"live": live}, stack, ranks)
    report.write(request.json)
    report.finish(is_endless=request.is_endless)


def _check_start(request: StreamFlags, folder: StreamFolder) -> None:
    """Raise PlanError, before anything is loaded, for a stream that lacks what its model starts from."""
    level = folder.config.schedule.begun_at(request.strength).sigmas[0]
    if request.input is not None and level == 1:
        raise PlanError("--input at noise level 1, where nothing of it is left: add --strength, such as 0.7")
    if request.input is None and level < 1:
        raise PlanError(f"this model starts at noise level {level:g}: add --input, a video or camera to start from")
    if request.reference is None and folder.config.reference is None and folder.starts_from_image:
        raise PlanError("this model starts from an image: add --reference face.png")


def _of_speech(request: StreamFlags, folder: StreamFolder) -> dict[str, Any]:
    """What only Wan-S2V takes: poses, and several speakers in place of --audio. Looked at before ranks are started."""
    from patchpar.stream.video_source import pose_frames

    if (request.pose or request.speaker) and not folder.hears_speech:
        raise PlanError(f"--pose, --speaker: {request.weights} takes neither, which Wan-S2V and Live Avatar do")
    given: dict[str, Any] = {}
    if request.pose is not None:
        given["pose"] = request.pose
        next(pose_frames(request.pose, folder.config.fps, folder.config.height, folder.config.width))
    if request.speaker:
        pairs = [each.rpartition(":") for each in request.speaker]
        given["audio"], given["masks"] = [audio for audio, _, _ in pairs], [mask for _, _, mask in pairs]
    return given


def _audio(request: StreamFlags, folder: StreamFolder) -> Any:
    """Read the audio before the ranks are started, so that a broken file is refused at once."""
    if request.audio is None:
        return None
    if request.has_live_audio:
        return "live"
    if folder.rate is None:
        raise PlanError(f"--audio {request.audio}: this model takes no audio; leave it out")
    from patchpar.media.audio_file import read_audio

    path = embedded_model(FACE) / "speech.wav" if request.audio == SPEECH else path_of(request.audio)
    audio = read_audio(path, folder.rate)
    typer.echo(f"{request.audio}: {audio.facts}", err=True)
    return audio


def _run(
    request: StreamFlags, folder: StreamFolder, given: dict[str, Any], stack: ExitStack, ranks: StreamRanks
) -> StreamReport:
    show_line = stack.enter_context(living_line("starting"))  # before the imports, which take seconds
    from patchpar import StreamDelivery, StreamingPipeline
    from patchpar.models.quiet_libraries import silence_libraries

    silence_libraries()
    fps, live = request.fps or folder.config.fps, given.pop("live")
    screens = FrameOutputs.pages(request, fps, folder.rate, stack, live.page)
    print_line = screens.status_line(show_line)
    loading = {"lora": request.lora, "plan": _plan(request, folder), **request.for_loading()}
    pipe = ranks.load(lambda: StreamingPipeline.from_pretrained(request.weights, **loading))
    screens = screens.with_file(stack)
    pace: Pacing = "realtime" if request.is_live else "fast"
    keep_alive = live.audio is not None and (request.is_live or not live.audio.ends)
    delivery = StreamDelivery(hold=HOLD, fps=fps, record=request.record, pace=pace, keep_alive=keep_alive)
    delivery = replace(delivery, **given_flags(restarts=request.restarts, output=request.late))
    meter, plan = ProgressMeter(), str(pipe.plan)
    arguments = {"seed": request.seed, "seconds": request.seconds, "delivery": delivery, **given}
    if request.input is not None:
        arguments |= {"video": "live" if request.has_camera else Path(request.input), "strength": request.strength}
    session = pipe.stream(request.prompt, **arguments)
    note = live.begin(session, folder.config, fps)
    with removed_after_error(request.record):  # without a block there is nothing to replay
        ending = show_all(parts_of(session, session, note), session, screens.all, meter, print_line, fps)
    ranks.has_signal = bool(ending.code)
    written = screens.saved
    if session.record_error is not None:
        ending = replace(ending, error=ending.error or session.record_error)
    elif request.record is not None:
        written.append(request.record)
    return StreamReport(plan=plan, ranks=ranks, meter=meter, ending=ending, dropped=session.dropped, outputs=written)


def _plan(request: StreamFlags, folder: StreamFolder) -> StreamPlan | None:
    """With ranks that share each step, if the flags say so. Raises PlanError."""
    if request.inner is None:
        return None
    from patchpar.launch.slurm import resolve_devices_of_task

    return plan_of(folder, len(resolve_devices_of_task(request.devices).names), request.inner)


def parts_of(chunks: Iterable[Any], session: Any, note: Callable[[], str] = str) -> Iterator[TimedFrames]:
    """Convert the chunks of a session to TimedFrames. `note`: what is wrong with its live inputs, if anything is."""
    for chunk in chunks:
        frames = None if chunk.is_held else chunk.frames
        yield TimedFrames(frames=frames, pts=chunk.pts, audio=chunk.audio, status=note() or session.status)
