"""`patchpar fifo PROMPT`: video of any length from a model of short clips, saved while it is generated."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchpar.cli.console import friendly_errors, stdout_kept_clean
from patchpar.cli.flag_values import check_deadline, check_guidance, check_length, check_seed, refuse_torchrun
from patchpar.cli.flags import Deadline, Debug, Format, Json, LocalDevices, Variant, given
from patchpar.cli.folded_help import more
from patchpar.cli.stream.flags import is_streamed
from patchpar.cli.stream.ranks import StreamRanks
from patchpar.cli.stream.run import ProgressMeter, StreamReport, living_line, show_all
from patchpar.cli.stream.video import HOLD, parts_of
from patchpar.cli.video_file import check_video, video_at
from patchpar.errors import PlanError

if TYPE_CHECKING:
    from patchpar import FifoConfig

DEADLINE = 600.0
"""Seconds: the first frame of a stream comes after a whole short video on each rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FifoFlags:
    """The flags of `fifo`. None: the default of FifoConfig, FifoOptions or the pipeline."""

    prompt: Annotated[str, typer.Argument(help="What to generate.")]
    model: Annotated[str, typer.Option(help="A text-to-video model, Wan or LTX-Video: folder or hub id.")]
    devices: LocalDevices = "auto"
    seconds: Annotated[float | None, typer.Option(help="Length; default: until ctrl-C.")] = None
    height: Annotated[int | None, typer.Option(help="Pixels; default: 480, for Wan.")] = None
    width: Annotated[int | None, typer.Option(help="Pixels; default: 832, for Wan.")] = None
    fps: Annotated[float | None, typer.Option(help="Of the model; default: 16, for Wan.")] = None
    guidance_scale: Annotated[float | None, typer.Option(help="Default: 5; 1 for none and half the work.")] = None
    negative_prompt: Annotated[str | None, more("What the video should not show.")] = None
    window: Annotated[int | None, more("Latent frames the model sees; default: 20.")] = None
    partitions: Annotated[int | None, more("Windows in the queue; default: 4.")] = None
    first_steps: Annotated[int | None, more("Steps of the clip that fills it; default: 50.")] = None
    shift: Annotated[float | None, more("Of the noise levels; default: 3.")] = None
    text_tokens: Annotated[int | None, more("Most tokens of the prompt; default: 512.")] = None
    seed: Annotated[int, more("The same seed gives the same video.")] = 0
    output: Annotated[Path, typer.Option("--output", "-o", help="File: .mp4, .mkv or .webm.")] = Path("video.mp4")
    dtype: Format = None
    variant: Variant = None
    restarts: Annotated[int | None, more("Of dead workers within a minute; default: 3.")] = None
    deadline: Deadline = DEADLINE
    json: Json = False
    debug: Debug = False

    def check(self) -> None:
        """Raise PlanError for invalid flags, before anything is started."""
        refuse_torchrun("fifo")
        check_length(self.seconds)
        if self.restarts is not None and self.restarts < 0:
            raise PlanError(f"--restarts {self.restarts}: it must be at least 0")
        check_guidance(self.guidance_scale)
        check_deadline(self.deadline)
        check_seed(self.seed, least=0)
        check_video(self.output)

    @property
    def is_endless(self) -> bool:
        """Whether only a signal ends the stream."""
        return self.seconds is None

    def config(self) -> FifoConfig:
        """How the model is streamed. Raises PlanError."""
        from patchpar import FifoConfig, FifoOptions

        queue = given(window=self.window, partitions=self.partitions, first_steps=self.first_steps, shift=self.shift)
        form = given(fps=self.fps, height=self.height, width=self.width, text_tokens=self.text_tokens)
        return FifoConfig(queue=FifoOptions(**queue), **form)

    def for_loading(self) -> dict[str, Any]:
        """Keyword arguments of `from_pretrained`."""
        return given(devices=self.devices, torch_dtype=self.dtype, variant=self.variant, deadline=self.deadline)

    def for_stream(self) -> dict[str, Any]:
        """Keyword arguments of `stream`."""
        from patchpar import StreamDelivery

        return given(
            negative_prompt=self.negative_prompt,
            guidance_scale=self.guidance_scale,
            seed=self.seed,
            seconds=self.seconds,
            delivery=StreamDelivery(hold=HOLD, **given(restarts=self.restarts)),
        )


def fifo(request: FifoFlags) -> None:
    """Stream video of any length from a model of short clips."""
    with friendly_errors(request.debug):
        request.check()
        if is_streamed(request.model):
            raise PlanError("--model generates video block by block, of any length: use `patchpar stream`")
        config = request.config()
        with stdout_kept_clean(request.json), StreamRanks() as ranks, ExitStack() as stack:  # the file closes first
            report = _run(request, config, stack, ranks)
        report.write(request.json)
        report.finish(is_endless=request.is_endless)


def _run(request: FifoFlags, config: FifoConfig, stack: ExitStack, ranks: StreamRanks) -> StreamReport:
    print_line = stack.enter_context(living_line("starting"))  # before the imports, which take seconds
    from patchpar import FifoStreamingPipeline
    from patchpar.models.quiet_libraries import silence_libraries

    silence_libraries()
    opened = {"config": config, **request.for_loading()}
    pipe = ranks.load(lambda: FifoStreamingPipeline.from_pretrained(request.model, **opened))
    file = stack.enter_context(video_at(request.output, config.fps, None, is_endless=request.is_endless))
    meter, plan = ProgressMeter(), repr(pipe)
    session = pipe.stream(request.prompt, **request.for_stream())
    ending = show_all(parts_of(session, session), session, [file], meter, print_line, config.fps)
    ranks.has_signal = bool(ending.code)
    saved = [request.output] if file.full is None else []
    return StreamReport(plan=plan, ranks=ranks, meter=meter, ending=ending, dropped=session.dropped, outputs=saved)
