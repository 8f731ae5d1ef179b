"""The command line: one verb per file. Nothing heavy is imported before a verb runs."""

import logging
from typing import Annotated

import typer

from patchpar.cli.app import AppFlags, serve_app
from patchpar.cli.compare import CompareFlags, compare
from patchpar.cli.convert import ConvertFlags, convert
from patchpar.cli.doctor import DoctorFlags, doctor
from patchpar.cli.flags import takes
from patchpar.cli.folded_help import FoldedHelp
from patchpar.cli.generate import GenerateFlags, generate
from patchpar.cli.plan import PlanFlags, plan
from patchpar.cli.serve import ServeFlags, serve_images
from patchpar.cli.simulate import SimulateFlags, simulate
from patchpar.cli.stream.command import stream as run_stream
from patchpar.cli.stream.flags import StreamFlags
from patchpar.cli.stream.replay import ReplayFlags, replay
from patchpar.cli.tune import TuneFlags, tune
from patchpar.cli.upscale import UpscaleFlags, enlarge
from patchpar.cli.video import VideoFlags, video

app = typer.Typer(
    name="patchpar",
    help="Run one diffusion model on several devices.",
    epilog='Try: patchpar generate "a red house" --devices 2',
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its boxes make the help of a verb twice as long as a screen
)
app.command(cls=FoldedHelp, epilog='Try: patchpar generate "a red house at night" --devices 2 -o house.png')(
    takes(GenerateFlags, generate)
)
app.command("upscale", cls=FoldedHelp, epilog="Try: patchpar upscale house.png --scale 2 --devices 2")(
    takes(UpscaleFlags, enlarge)
)
app.command(cls=FoldedHelp, epilog='Try: patchpar video "a fox runs" --model ./wan --devices 4 -o fox.mp4')(
    takes(VideoFlags, video)
)
app.command(cls=FoldedHelp, epilog="Try: patchpar stream happy --audio speech.wav --output talk.mp4")(
    takes(StreamFlags, run_stream)
)
app.command(cls=FoldedHelp, epilog="Try: patchpar replay session.jsonl --devices 2 --output again.mp4")(
    takes(ReplayFlags, replay)
)
app.command(cls=FoldedHelp, epilog="Try: patchpar convert self_forcing_dmd.pt --to self-forcing")(
    takes(ConvertFlags, convert)
)
app.command(cls=FoldedHelp, epilog='Try: patchpar compare "a red house" --devices 2 --plan patch=2')(
    takes(CompareFlags, compare)
)
app.command(cls=FoldedHelp, epilog="Try: patchpar simulate embedded --machine 4xRTX4090-pcie4 --plan patch=4")(
    takes(SimulateFlags, simulate)
)
app.command(cls=FoldedHelp, epilog="Try: patchpar plan embedded --machine 8xH100-nvlink --dtype float16")(
    takes(PlanFlags, plan)
)
app.command(cls=FoldedHelp, epilog="Try: patchpar tune --devices 2")(takes(TuneFlags, tune))
app.command("app", cls=FoldedHelp, epilog="Try: patchpar app --model ./sdxl --dtype float16 --devices 4")(
    takes(AppFlags, serve_app)
)
app.command("serve", cls=FoldedHelp, epilog="Try: patchpar serve embedded --devices 2 --port 8000")(
    takes(ServeFlags, serve_images)
)
app.command(cls=FoldedHelp, epilog="Try: patchpar doctor --devices 4 --model ./sdxl")(takes(DoctorFlags, doctor))


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
    # transformers warns about the image backend, which does not matter to this command's user.
    logging.getLogger("transformers.utils.import_utils").setLevel(logging.ERROR)
    app()
