"""`patchpar convert`: make a released checkpoint of a block-causal model a folder that `stream` takes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchpar.cli.console import friendly_errors, print_json, stdout_kept_clean
from patchpar.cli.flags import Debug, Json
from patchpar.cli.stream.run import living_line

if TYPE_CHECKING:
    from patchpar.models.streaming.convert import ConvertedModel

FOR_FIFO = "it is not block-causal: use patchpar video, or patchpar fifo"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertFlags:
    """The flags of `convert`."""

    checkpoint: Annotated[Path, typer.Argument(help="Weights of the transformer: .safetensors, .pt, or their folder.")]
    to: Annotated[Path, typer.Option(help="The folder to write; it must not exist.")]
    base: Annotated[str | None, typer.Option(help="WanPipeline of the other parts; default: the family's.")] = None
    family: Annotated[str | None, typer.Option(help="Whose checkpoint it is; default: found from the file.")] = None
    lora: Annotated[str | None, typer.Option(help="A LoRA to merge: PATH, or PATH:SCALE.")] = None
    json: Json = False
    debug: Debug = False


def convert(request: ConvertFlags) -> None:
    """Make a published checkpoint a folder that can be streamed."""
    with friendly_errors(request.debug):
        with stdout_kept_clean(request.json), living_line(f"converting {request.checkpoint}"):
            found = _converted(request)
        if request.json:
            print_json(as_dict(found))
            return
        entry = f" ({found.entry})" if found.entry else ""
        typer.echo(f"{found.family}{entry}: {found.num_weights / 1e6:.1f} million weights, other parts of {found.base}")
        if found.num_merged:
            typer.echo(f"merged {request.lora} into {found.num_merged} layers")
        takes = "--audio a.wav --reference face.png " if found.hears_speech else ""
        use = f"patchpar stream PROMPT {takes}--model {found.folder} --output video.mp4"
        typer.echo(f"saved {found.folder}: {use if found.config is not None else FOR_FIFO}")


def _converted(request: ConvertFlags) -> ConvertedModel:
    from patchpar.models.quiet_libraries import silence_libraries

    silence_libraries()
    from patchpar.models.streaming.convert import convert_checkpoint

    return convert_checkpoint(
        request.checkpoint, request.to, base=request.base, family=request.family, lora=request.lora
    )


def as_dict(found: ConvertedModel) -> dict[str, Any]:
    """Return what `--json` prints."""
    return {
        "folder": str(found.folder),
        "family": found.family,
        "entry": found.entry,
        "base": str(found.base),
        "num_weights": found.num_weights,
        "num_merged": found.num_merged,
    }
