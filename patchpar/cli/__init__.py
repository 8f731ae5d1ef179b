"""The command line: one verb per file. Nothing heavy is imported before a verb runs."""

import logging
from collections.abc import Callable
from typing import Annotated, Any

import typer

from patchpar.cli.app import AppFlags, serve_app
from patchpar.cli.bench.command import bench
from patchpar.cli.bench.flags import BenchFlags
from patchpar.cli.compare import CompareFlags, compare
from patchpar.cli.convert import ConvertFlags, convert
from patchpar.cli.doctor import DoctorFlags, doctor
from patchpar.cli.flags import takes
from patchpar.cli.folded_help import FoldedHelp, ScreenHelp
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
    cls=ScreenHelp,
    help="Run one diffusion model on several devices.",
    epilog='Try: patchpar generate "a red house" --devices 2',
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its boxes make the help of a verb twice as long as a screen
)


def _add(flags: type[Any], command: Callable[[Any], None], example: str, *, name: str | None = None) -> None:
    """Add a verb with a flag for each field of a dataclass; by default its name is that of the function."""
    app.command(name, cls=FoldedHelp, epilog=f"Try: patchpar {example}")(takes(flags, command))


_add(GenerateFlags, generate, 'generate "a red house at night" --devices 2 -o house.png')
_add(UpscaleFlags, enlarge, "upscale house.png --scale 2 --devices 2", name="upscale")
_add(VideoFlags, video, 'video "a fox runs" --model ./wan --devices 4 -o fox.mp4')
_add(StreamFlags, run_stream, "stream happy --audio speech.wav --output talk.mp4")
_add(ReplayFlags, replay, "replay session.jsonl --devices 2 --output again.mp4")
_add(ConvertFlags, convert, "convert self_forcing_dmd.pt --to self-forcing")
_add(CompareFlags, compare, 'compare "a red house" --devices 2 --plan patch=2')
_add(BenchFlags, bench, 'bench "a red house" --devices cpu:2 --strategy pcpp --steps 8')
_add(SimulateFlags, simulate, "simulate embedded --machine 4xRTX4090-pcie4 --plan patch=4")
_add(PlanFlags, plan, "plan embedded --machine 8xH100-nvlink --dtype float16")
_add(TuneFlags, tune, "tune --devices 2")
_add(AppFlags, serve_app, "app --model ./sdxl --dtype float16 --devices 4", name="app")
_add(ServeFlags, serve_images, "serve embedded --devices 2 --port 8000", name="serve")
_add(DoctorFlags, doctor, "doctor --devices 4 --model ./sdxl")


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
