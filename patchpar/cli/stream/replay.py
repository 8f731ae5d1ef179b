"""`patchpar replay SESSION`: a recorded stream, generated again bit for bit, and compared with the recording."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchpar.cli.console import friendly_errors, stdout_kept_clean
from patchpar.cli.flag_values import check_deadline, refuse_torchrun
from patchpar.cli.flags import DEADLINE, Deadline, Debug, Json, LocalDevices
from patchpar.cli.stream.ranks import StreamRanks
from patchpar.cli.stream.run import ProgressMeter, StreamReport, living_line, show_all
from patchpar.cli.stream.video import parts_of
from patchpar.cli.video_file import check_video, video_at
from patchpar.errors import PatchparError, PlanError

if TYPE_CHECKING:
    from patchpar.stream.recording import StreamRecording


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayFlags:
    """The flags of `replay`."""

    session: Annotated[Path, typer.Argument(help="File written by `patchpar stream --record`.")]
    model: Annotated[str | None, typer.Option(help="Where the model is now; optional for embedded models.")] = None
    devices: LocalDevices = "auto"
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File with audio: .mp4, .mkv or .webm.")] = None
    deadline: Deadline = DEADLINE
    json: Json = False
    debug: Debug = False


def replay(request: ReplayFlags) -> None:
    """Generate a recorded stream again and compare it."""
    with friendly_errors(request.debug):
        refuse_torchrun("replay")
        check_deadline(request.deadline)
        if request.output is not None:
            check_video(request.output)
        from patchpar.stream.recording import StreamRecording

        recording, differing = StreamRecording.read(request.session), list[int]()
        model = _model(request, recording.origin.model)
        with stdout_kept_clean(request.json), StreamRanks() as ranks, ExitStack() as stack:
            report = _run(request, model, recording, differing, stack, ranks)
        report.write(request.json, differing=differing)
        report.finish(is_endless=False)
        if differing:
            made_with = ", ".join(f"{name} {number}" for name, number in recording.origin.versions.items())
            raise PatchparError(
                f"{len(differing)} of {len(recording.blocks)} blocks differ from the recording, from block "
                f"{differing[0]} on: another model, another version (it was recorded with {made_with}), or a "
                "changed recording"
            )
        if not request.json:
            typer.echo(f"{len(recording.blocks)} blocks, every frame equal to the recording")


def _model(request: ReplayFlags, recorded: str) -> str:
    """The model to load. A recording is untrusted and does not choose it without confirmation. Raises PlanError."""
    from patchpar.models.files import shipped_name

    known = request.model or shipped_name(recorded)
    if known is not None:
        return known
    asked = f"{request.session} was recorded with the model {recorded!r}."
    if _can_be_asked() and typer.confirm(f"{asked} Load that?", default=False, err=True):
        return recorded
    raise PlanError(f"{asked} A recording does not choose what is loaded: pass --model {recorded!r}, or another model")


def _can_be_asked() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()  # None: it was closed before the command


def _run(
    request: ReplayFlags,
    model: str,
    recording: StreamRecording,
    differing: list[int],
    stack: ExitStack,
    ranks: StreamRanks,
) -> StreamReport:
    print_line = stack.enter_context(living_line("starting"))  # before the imports, which take seconds
    from patchpar import StreamingPipeline
    from patchpar.models.quiet_libraries import silence_libraries

    silence_libraries()
    origin = recording.origin
    opened = {"devices": request.devices, "deadline": request.deadline, "config": origin.config, **origin.options}
    pipe = ranks.load(lambda: StreamingPipeline.from_pretrained(model, **opened))
    meter, plan = ProgressMeter(), str(pipe.plan)
    session = pipe.replay(recording)
    screens = [] if request.output is None else [stack.enter_context(video_at(request.output, origin.fps, pipe.rate))]
    parts = parts_of(_compared(session, recording, differing), session)
    ending = show_all(parts, session, screens, meter, print_line, origin.fps)
    ranks.has_signal = bool(ending.code)
    written = [] if request.output is None else [request.output]
    return StreamReport(plan=plan, ranks=ranks, meter=meter, ending=ending, dropped=0, outputs=written)


def _compared(session: Any, recording: StreamRecording, differing: list[int]) -> Iterator[Any]:
    for chunk in session:
        if not recording.is_as_it_was(chunk):
            differing.append(chunk.block)
        yield chunk
