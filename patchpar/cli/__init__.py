"""The command line: one verb per file, which is imported when the verb is asked for, and nothing heavy before it runs.

`verbs.VERBS` lists them.
"""

import gc
import logging
import sys
from typing import Annotated

import typer

from patchpar.cli.verbs import VERBS, LazyVerbs, command_of
from patchpar.launch.descriptors import open_standard_descriptors
from patchpar.models.absent_libraries import leave_out_libraries

RECORDING = ("plan", "simulate")
"""Verbs that record calls, and compute nothing."""

ABOUT = "Run one diffusion model on several devices; --version prints the version."
"""Options are no section of their own, so that all verbs fit a screen."""
app = typer.Typer(
    name="patchpar",
    cls=LazyVerbs,
    help=ABOUT,
    epilog='Try: patchpar generate "a tree on the left" --devices 2',
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its boxes make the help of a verb twice as long as a screen
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"patchpar {version('patchpar')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, hidden=True, help="Print the version.")
    ] = False,
) -> None:
    """Run one diffusion model on several devices."""


def main() -> None:
    """Run the verb that the command line names."""
    open_standard_descriptors()
    # transformers warns about the image backend, which does not matter to this command's user.
    logging.getLogger("transformers.utils.import_utils").setLevel(logging.ERROR)
    verb = next(iter(sys.argv[1:]), "")
    if verb in RECORDING:
        _record_only()
    if verb in VERBS:
        command_of(verb).main(args=sys.argv[2:], prog_name=f"{app.info.name} {verb}")  # the group reads nothing
    app()


def _record_only() -> None:
    """Spare this process, which ends after a recording, libraries and collections of garbage.

    The collector looks at all that was imported, again and again, and what it would free is small.
    """
    logging.getLogger("torch.utils.flop_counter").setLevel(logging.ERROR)  # it warns that triton is left out
    leave_out_libraries()
    gc.disable()
