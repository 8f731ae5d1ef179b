"""The command line: one verb per file. Nothing heavy is imported before a verb runs."""

from __future__ import annotations

import logging
from typing import Annotated

import typer

from patchpar.cli.compare import Compare, compare
from patchpar.cli.doctor import Doctor, doctor
from patchpar.cli.flags import takes
from patchpar.cli.generate import Generate, generate
from patchpar.cli.page import App, serve_app
from patchpar.cli.stream import Stream, stream
from patchpar.cli.stream_replay import Replay, replay
from patchpar.cli.upscale import Upscale, enlarge
from patchpar.cli.video import Video, video

app = typer.Typer(
    name="patchpar",
    help="Run one diffusion model on several devices.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(takes(Generate, generate))
app.command("upscale")(takes(Upscale, enlarge))
app.command()(takes(Video, video))
app.command()(takes(Stream, stream))
app.command()(takes(Replay, replay))
app.command()(takes(Compare, compare))
app.command("app")(takes(App, serve_app))
app.command()(takes(Doctor, doctor))


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"patchpar {version('patchpar')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Run one diffusion model on several devices."""


def main() -> None:
    """Entry point of the `patchpar` command."""
    # Which library reads images is no news to somebody who wants a picture.
    logging.getLogger("transformers.utils.import_utils").setLevel(logging.ERROR)
    app()
