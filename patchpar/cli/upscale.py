"""`patchpar upscale IMAGE`: upscale an image and save it."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from patchpar.cli.console import friendly_errors, stdout_kept_clean
from patchpar.cli.flag_values import check_seed
from patchpar.cli.flags import HostFlags, given
from patchpar.cli.input_images import check_file
from patchpar.cli.output_files import check_apart, check_writable, save
from patchpar.cli.run_pipeline import report_run, returned_by
from patchpar.media.image_file import check_enlargement, enlarged_size, read_image_file
from patchpar.models.task import RequestedTask


@dataclass(frozen=True, slots=True, kw_only=True)
class UpscaleFlags(HostFlags):
    """The flags of `upscale`."""

    image: Annotated[Path, typer.Argument(help="The image to enlarge.")]
    scale: Annotated[float, typer.Option(help="Enlargement of both sides.")] = 2.0
    strength: Annotated[float, typer.Option(help="How much is generated anew.")] = 0.35
    prompt: Annotated[str, typer.Option(show_default=False, help="What the image shows.")] = ""
    seed: Annotated[int, typer.Option(help="Of the noise.")] = 0
    output: Annotated[Path, typer.Option("--output", "-o", help="File of the larger image.")] = Path("upscaled.png")

    def check(self) -> None:
        """Raise PlanError for invalid flags."""
        self.check_counts()
        check_enlargement(self.scale, self.strength, "--scale ", "--strength ")
        check_seed(self.seed)
        check_file(self.image, str(self.image))
        check_writable(self.output)
        check_apart(self.output, self.trace)

    def for_images(self) -> dict[str, Any]:
        """Return keyword arguments of `patchpar.upscale`."""
        from torch import Generator

        return given(
            scale=self.scale,
            strength=self.strength,
            prompt=self.prompt,
            negative_prompt=self.negative_prompt,
            generator=Generator("cpu").manual_seed(self.seed),
            **self.for_sampling(),
        )


def enlarge(request: UpscaleFlags) -> None:
    """Upscale an image on several devices."""
    with friendly_errors(request.debug):
        request.check()
        image = read_image_file(request.image, str(request.image))
        label = f"{request.image} at --scale {request.scale:g}"
        enlarged_size(image.width, image.height, request.scale, label)  # before the model is loaded
        with stdout_kept_clean(request.json):
            keep = partial(_saved, request.output)
            requested_task = RequestedTask(verb="upscale", has_image=None)
            work = partial(_upscaled, image=image, request=request)
            run, size = returned_by(request, requested_task, work, keep, task="image-to-image")
        if size is None:
            return  # under torchrun, a rank other than 0, which saves and reports
        saved = f"saved {request.output}: {size[0]} x {size[1]} pixels"
        report_run(request, run, [request.output], [saved], size=list(size))


def _upscaled(pipe: Any, image: Any, request: UpscaleFlags) -> Any:
    from patchpar import upscale

    return upscale(pipe, image, **request.for_images())


def _saved(path: Path, larger: Any) -> tuple[int, int] | None:
    """Save the image; return its width and height in pixels, None on a rank without a result."""
    if larger is None:
        return None
    save(larger, path)
    return larger.width, larger.height
