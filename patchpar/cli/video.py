"""`patchpar video PROMPT`: generate a video and save it as a file, or as frames."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchpar.cli.console import friendly_errors, stdout_kept_clean
from patchpar.cli.flag_values import check_seed
from patchpar.cli.flags import HostFlags, SizedFlags, given
from patchpar.cli.folded_help import more
from patchpar.cli.input_images import InputImages
from patchpar.cli.output_files import check_apart
from patchpar.cli.run_pipeline import report_run, returned_by
from patchpar.cli.video_file import check_folder, check_video, save_frames, save_video
from patchpar.errors import PlanError
from patchpar.media.image_file import read_image_file
from patchpar.media.video_file import frames_of
from patchpar.models.task import RequestedTask

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MOST_FPS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoFlags(HostFlags, SizedFlags):
    """The flags of `video`."""

    prompt: Annotated[str | None, typer.Argument(help="What to generate.")] = None
    model: Annotated[str, typer.Option(help="A folder or a hub id.")]
    image: Annotated[Path | None, typer.Option(help="First frame, for image-to-video models.")] = None
    num_frames: Annotated[int | None, typer.Option(help="Default: the pipeline's own.")] = None
    fps: Annotated[int, typer.Option(help="Frames per second of the file.")] = 16
    seed: Annotated[int, more("Of the noise.")] = 0
    output: Annotated[Path, typer.Option("--output", "-o", help="File: .mp4, .mkv or .webm.")] = Path("video.mp4")
    frames: Annotated[Path | None, more("Also write each frame as PNG into this folder.")] = None

    def check(self) -> None:
        """Raise PlanError for invalid flags."""
        self.check_counts("num_frames", "fps")
        if self.fps > MOST_FPS:
            raise PlanError(f"--fps {self.fps}: it must be at most {MOST_FPS}")
        check_seed(self.seed)
        if self.prompt is None and self.image is None:
            raise PlanError("nothing to generate: give a prompt, or --image for a model that starts from an image")
        InputImages.check(image=self.image, mask=None, strength=None)
        check_video(self.output)
        check_apart(self.output, self.trace)
        if self.frames is not None:
            check_folder(self.frames)

    def for_images(self, loaded_image: Any) -> dict[str, Any]:
        """Return keyword arguments of the pipeline's call by diffusers' names."""
        from torch import Generator

        return given(
            prompt=self.prompt,
            negative_prompt=self.negative_prompt,
            image=loaded_image,
            num_frames=self.num_frames,
            generator=Generator("cpu").manual_seed(self.seed),
            **self.for_sampling(),
        )

    def opened_image(self) -> Any:
        """Return the first frame, None without --image. Raises PlanError."""
        return None if self.image is None else read_image_file(self.image, f"--image {self.image}")


def video(request: VideoFlags) -> None:
    """Generate a video on several devices."""
    with friendly_errors(request.debug):
        request.check()
        loaded_image = request.opened_image()
        with stdout_kept_clean(request.json):
            requested_task = RequestedTask(verb="video", product="video", has_image=loaded_image is not None)
            run, frames = returned_by(
                request, requested_task, lambda pipe: pipe(**request.for_images(loaded_image)), frames_of
            )
        if frames is None:
            return  # under torchrun, a rank other than 0, which saves and reports
        paths = saved(request, frames)
        lines = [f"saved {request.output}: {len(frames)} frames, {len(frames) / request.fps:.1f} s"]
        if request.frames is not None:
            lines.append(f"saved {len(frames)} frames in {request.frames}")
        report_run(request, run, paths, lines, frames=len(frames), fps=request.fps)


def saved(request: VideoFlags, frames: "NDArray[np.uint8]") -> list[Path]:
    """Save frames [F, H, W, 3]; return the paths. The PNGs are there also if there can be no video, which raises."""
    images = [] if request.frames is None else save_frames(frames, request.frames)
    save_video(frames, request.output, request.fps)
    return [request.output, *images]
