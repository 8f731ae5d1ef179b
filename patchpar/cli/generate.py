"""`patchpar generate PROMPT`: generate images and save them."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from patchpar.cli.console import friendly_errors, stdout_kept_clean
from patchpar.cli.flags import HostFlags, ImageFlags
from patchpar.cli.input_images import InputImages
from patchpar.cli.output_files import check_apart, check_writable, names_for, save
from patchpar.cli.run_pipeline import parameters_of, report_run, returned_by
from patchpar.errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateFlags(HostFlags, ImageFlags):
    """The flags of `generate`."""

    output: Annotated[Path, typer.Option("--output", "-o", help="File of the image.")] = Path("image.png")


def generate(request: GenerateFlags) -> None:
    """Generate images from a prompt on several devices."""
    with friendly_errors(request.debug):
        request.check()
        paths = names_for(request.output, request.images)
        for path in paths:
            check_writable(path)
        check_apart(*paths, request.trace)
        with stdout_kept_clean(request.json):
            inputs, keep = request.inputs(), partial(_saved, paths)
            run, saved = returned_by(request, request.task("generate"), partial(_generated, request, inputs), keep)
        if not saved:
            return  # under torchrun, a rank other than 0, which saves and reports
        report_run(request, run, paths, [f"saved {path}" for path in paths])


def _generated(request: GenerateFlags, inputs: InputImages, pipe: Any) -> Any:
    return pipe(**inputs.arguments(request.for_images(), parameters_of(pipe)))


def _saved(paths: list[Path], output: Any) -> bool:
    """Save the images if this rank has them; return whether it has."""
    images = images_of(output)
    for image, path in zip(images or (), paths if images else (), strict=True):
        save(image, path)
    return images is not None


def images_of(output: Any) -> list[Any] | None:
    """Return the images of an output; None on a rank without a result. Raises PlanError for another kind of output."""
    if not hasattr(output, "images"):
        raise PlanError(
            f"this model returns {type(output).__name__}, which has no images; "
            "this command generates images only: use ParallelPipeline in Python for it"
        )
    return None if output.images is None else list(output.images)
