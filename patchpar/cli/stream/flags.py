"""Flags of `patchpar stream`, and which of them go together."""

import stat
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from patchpar.cli.flag_values import (
    check_deadline,
    check_guidance,
    check_length,
    check_seed,
    check_strength,
    refuse_torchrun,
)
from patchpar.cli.flags import DEADLINE, FACE, Deadline, Debug, Format, Json, LocalDevices, Variant, given
from patchpar.cli.folded_help import more
from patchpar.cli.input_images import check_file
from patchpar.cli.output_files import check_apart, check_can_write
from patchpar.cli.video_file import check_video
from patchpar.errors import PlanError
from patchpar.models.files import path_of
from patchpar.models.streaming.video_folder import is_block_causal
from patchpar.web.server import check_port

Late = Literal["block", "drop_oldest", "skip_to_live"]
"""The policies for a slow consumer of `stream.delivery`, which imports torch."""
PAGE = "page"
"""Audio or images of the browser that watches."""
SPEECH = "embedded"
"""Audio that comes with the package."""
FPS = (1e-3, 1000.0)
"""Frames per second that a video can have; the limits of `models.streaming.config`, which imports torch."""
OF_VIDEO = (
    "audio",
    "audio_rate",
    "audio_channels",
    "reference",
    "seconds",
    "pose",
    "speaker",
    "record",
    "lora",
    "inner",
    "late",
)
OF_IMAGES = ("steps", "guidance_scale", "negative_prompt", "height", "width")


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamFlags:
    """The flags of `stream`."""

    prompt: Annotated[str, typer.Argument(help="What to generate, for models with a text encoder.")] = ""
    model: Annotated[str | None, typer.Option(help="Default: embedded-face; with --input, embedded.")] = None
    devices: LocalDevices = "auto"
    audio: Annotated[str | None, typer.Option(help="A file; embedded; live: mic, page, - or a pipe.")] = None
    reference: Annotated[Path | None, typer.Option(help="An image whose appearance the stream keeps.")] = None
    seconds: Annotated[float | None, typer.Option(help="Length; default: of --audio, or until ctrl-C.")] = None
    input: Annotated[str | None, typer.Option(help="Video, folder, camera or page, to generate anew.")] = None
    seed: Annotated[int, more("The same seed gives the same video.")] = 0
    fps: Annotated[float | None, typer.Option(help="Frames per second; default: the model's or input's.")] = None
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File with audio: .mp4, .mkv or .webm.")] = None
    mjpeg: Annotated[int | None, typer.Option(help="Port of a page with images; 0: any free port.")] = None
    ws: Annotated[int | None, typer.Option(help="Port of a page with video and audio; 0: any.")] = None
    webrtc: Annotated[bool, more("Let the page of --ws play by WebRTC.", "--webrtc")] = False
    host: Annotated[str | None, more("Address of these pages; default: this machine's.")] = None
    audio_rate: Annotated[int | None, more("Of raw 16-bit audio in a pipe; default: the model's.")] = None
    audio_channels: Annotated[int | None, more("Of raw 16-bit audio in a pipe; default: 1.")] = None
    pose: Annotated[Path | None, more("A video of poses, for Wan-S2V and Live Avatar.")] = None
    speaker: Annotated[list[str] | None, more("AUDIO:MASK, for each of several speakers.")] = None
    record: Annotated[Path | None, more("Record the stream for `patchpar replay`.")] = None
    steps: Annotated[int | None, more("With --input and an image model: denoising steps.")] = None
    strength: Annotated[float | None, typer.Option(help="With --input: amount of noise, from 0 to 1.")] = None
    guidance_scale: Annotated[float | None, more("With --input; default: the pipeline's own.")] = None
    negative_prompt: Annotated[str | None, more("With --input: what not to show.")] = None
    height: Annotated[int | None, more("With --input: frames are cropped and scaled.")] = None
    width: Annotated[int | None, more("With --input: frames are cropped and scaled.")] = None
    lora: Annotated[str | None, typer.Option(help="A LoRA for the model: PATH, or PATH:SCALE.")] = None
    dtype: Format = None
    variant: Variant = None
    inner: Annotated[int | None, more("Ranks that share each step; default: 1.")] = None
    dry_run: Annotated[bool, more("Only print the assignment of steps to ranks.", "--dry-run")] = False
    costs: Annotated[str | None, more("With --dry-run, seconds: step=0.265,decode=0.15.")] = None
    late: Annotated[Late | None, more("With a page, of late blocks; default: block.")] = None
    restarts: Annotated[int | None, more("Of dead workers within a minute; default: 3.")] = None
    deadline: Deadline = DEADLINE
    json: Json = False
    debug: Debug = False

    def check(self) -> None:
        """Raise PlanError for invalid flags, before anything is started."""
        if not self.dry_run:
            refuse_torchrun("stream")
        self._check_kind()
        self._check_speech()
        check_length(self.seconds)
        check_strength(self.strength)
        for name in ("fps", "steps", "height", "width", "audio_rate", "audio_channels", "inner"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise PlanError(f"--{name.replace('_', '-')} {value}: it must be above 0")
        if self.fps is not None and not FPS[0] <= self.fps <= FPS[1]:
            raise PlanError(f"--fps {self.fps:g}: it must be from {FPS[0]:g} to {FPS[1]:g}")
        if self.restarts is not None and self.restarts < 0:
            raise PlanError(f"--restarts {self.restarts}: it must be at least 0")
        check_guidance(self.guidance_scale)
        check_deadline(self.deadline)
        check_seed(self.seed, least=0, most=2 ** (64 if self.is_video else 63) - 1)
        if (self.height is None) != (self.width is None):
            raise PlanError("--height and --width: give both or none")
        if not self.dry_run:
            self._check_inputs()
            self._check_outputs()

    def _check_kind(self) -> None:
        takes_frames = self.input is not None
        others = (*OF_IMAGES, *([] if takes_frames else ["strength"])) if self.is_video else OF_VIDEO
        for name in others:
            if getattr(self, name) is not None:
                kind = "not for" if takes_frames and not self.is_video else "for"
                of = " of images" if takes_frames and self.is_video else ""
                raise PlanError(f"--{name.replace('_', '-')} is {kind} streams{of} with --input")
        if self.input is not None and self.is_video and not self.has_camera and not path_of(self.input).is_file():
            raise PlanError(f"--input {self.input}: {self.model} generates video, and there is no such file")
        if self.input is not None and self.is_video and self.record is not None:
            raise PlanError("--record does not hold the frames of --input: leave one of them out")
        if self.dry_run and takes_frames:
            raise PlanError("--dry-run forecasts streams of a video model: leave out --input")
        if self.costs is not None and not self.dry_run:
            raise PlanError("--costs goes with --dry-run only: add --dry-run, or leave out --costs")

    def _check_speech(self) -> None:
        for each in self.speaker or ():
            audio, _, mask = each.rpartition(":")
            for file in (audio, mask):
                if not path_of(file).is_file():
                    raise PlanError(f"--speaker {each}: it has to be AUDIO:MASK, and there is no file {file!r}")
        if self.speaker and self.audio is not None:
            raise PlanError("--audio is of one speaker: leave it out, or leave out --speaker")
        if self.pose is not None:
            check_file(self.pose, f"--pose {self.pose}")
        if self.record is not None and (self.pose or self.speaker):
            raise PlanError("--record holds neither --pose nor --speaker: leave it out")

    def _check_inputs(self) -> None:
        for flag, value in (("--audio", self.audio), ("--input", self.input)):
            if value == PAGE and self.ws is None:
                raise PlanError(f"{flag} {PAGE}: the page that sends it is that of --ws: add --ws 8000")
        if self.webrtc and self.ws is None:
            raise PlanError("--webrtc: it is the page of --ws that plays so: add --ws 8000")
        if (self.audio_rate or self.audio_channels) and not self.has_pipe:
            raise PlanError("--audio-rate and --audio-channels are of raw samples: add --audio -, or a named pipe")

    def _check_outputs(self) -> None:
        if self.output is None and not self.is_live:
            raise PlanError("the frames have no output: add --output talk.mp4, --mjpeg 8000 or --ws 8000")
        if self.late is not None and not self.is_live:
            raise PlanError(f"--late {self.late}: it goes with --mjpeg or --ws, which show blocks at their times")
        if self.host is not None and not self.is_live:
            raise PlanError(f"--host {self.host}: it goes with --mjpeg or --ws")
        for flag, port in (("--mjpeg", self.mjpeg), ("--ws", self.ws)):
            check_port(port or 0, flag)
        if self.output is not None:
            check_video(self.output)
        if self.record is not None:
            check_can_write(self.record, "--record", "session.jsonl")
        check_apart(self.output, self.record)

    @property
    def weights(self) -> str:
        """The model; by default the embedded one for this kind of stream."""
        return self.model or (FACE if self.input is None else "embedded")

    @property
    def is_video(self) -> bool:
        """Whether a block-causal model generates the stream: its folder says how, in stream.json."""
        return self.input is None or (self.model is not None and is_streamed(self.model))

    @property
    def has_camera(self) -> bool:
        """Whether --input is a camera."""
        return self.input is not None and (self.input == PAGE or kind_of(self.input) == "camera")

    @property
    def has_pipe(self) -> bool:
        """Whether --audio is standard input or another pipe."""
        return self.audio is not None and (self.audio == "-" or is_pipe(Path(self.audio)))

    @property
    def has_live_audio(self) -> bool:
        """Whether --audio comes while the stream runs."""
        return self.audio is not None and (self.audio == PAGE or kind_of(self.audio) == "mic" or self.has_pipe)

    @property
    def is_endless(self) -> bool:
        """Whether only a signal ends the stream, or what is live."""
        has_file = bool(self.speaker) or (self.audio is not None and not self.has_live_audio)
        return self.seconds is None and not has_file and (self.input is None or self.has_camera)

    @property
    def is_live(self) -> bool:
        """Whether there is a live page, with frames at their timestamps."""
        return self.mjpeg is not None or self.ws is not None

    def for_loading(self) -> dict[str, Any]:
        """Keyword arguments of `from_pretrained`."""
        return given(devices=self.devices, torch_dtype=self.dtype, variant=self.variant, deadline=self.deadline)


def is_pipe(path: Path) -> bool:
    """Whether `path` is a named pipe, a descriptor such as /dev/fd/63, or a device: nothing with a length."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)


def kind_of(text: str) -> str:
    """Return the kind of a device: "mic" of "mic" and of "mic:hw:1"."""
    return text.partition(":")[0]


def device_of(text: str) -> str | None:
    """Return the name of a device, None for the default one."""
    return text.partition(":")[2] or None


def is_streamed(model: str) -> bool:
    """Whether a model generates video block by block, by facts of its folder or repository. Raises PlanError."""
    return model == FACE or (is_block_causal(model) if path_of(model).exists() else _is_streamed_of_hub(model))


@cache
def _is_streamed_of_hub(model: str) -> bool:
    return is_block_causal(model)
