"""Output of the command line: results on stdout, everything else on stderr, errors with an exit code."""

import contextlib
import json
import math
import os
import select
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import typer

from patchpar.errors import PatchparError, PlanError
from patchpar.launch.remote_errors import is_of_mixed_dtypes, is_out_of_memory

if TYPE_CHECKING:
    from rich.progress import Progress
BAD_USE = 2
FAILURE = 1
WAYS_OUT: tuple[tuple[Callable[[Exception], bool], str], ...] = (
    (is_out_of_memory, "There is too little memory: use a smaller image, more devices, or a plan with weights=hosted"),
    (is_of_mixed_dtypes, "Parts of the model are in different dtypes: load all in one, as with --dtype float32"),
)
"""Of errors that are torch's or Python's own."""


@contextlib.contextmanager
def friendly_errors(debug: bool) -> Iterator[None]:
    """Print errors on stderr and exit with 2 for invalid arguments, 1 for a failure; `debug` adds the traceback.

    Nothing is printed, and the code is 1, where the program that reads stdout has ended, as `head` does.
    """
    try:
        yield
    except (typer.Exit, typer.Abort, typer.BadParameter):
        raise
    except Exception as error:  # outermost handler: every error is printed
        if isinstance(error, BrokenPipeError) and _has_lost_its_reader(1):
            raise  # click ends quietly
        if debug:
            traceback.print_exc()
        typer.echo(f"error: {_printable(_text_of(error))}", err=True)
        raise typer.Exit(BAD_USE if isinstance(error, PlanError) else FAILURE) from None


def _has_lost_its_reader(descriptor: int) -> bool:
    """Whether it is a pipe that nobody reads any more."""
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return any(event & select.POLLERR for _, event in poll.poll(0))


@contextlib.contextmanager
def stdout_kept_clean(wanted: bool) -> Iterator[None]:
    """Redirect stdout of this process and its workers to stderr, so that `--json` prints nothing else on stdout."""
    if not wanted or sys.stdout is None:  # None: it was closed before the command
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


@contextlib.contextmanager
def progress(title: str, first: str = "starting") -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on stderr; yields a function to call with (step, number of steps). `first`: initial text.

    Under torchrun rank 0 shows it. Where the `with` block raises before the first step, nothing is left of the bar.
    """
    from rich.console import Console  # slow, and needed by the verbs that generate only
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from patchpar.launch.torchrun_variables import is_first_process

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    bar = Progress(*columns, console=Console(stderr=True), disable=not is_first_process())
    with _despite_full_log(bar):
        task = bar.add_task(first, total=None)

        def step(done: int, total: int) -> None:
            bar.update(task, description=title, completed=done, total=total)

        try:
            yield step
        except BaseException:
            if bar.tasks[0].total is None:
                bar.live.transient = True
                bar.console.quiet = not bar.console.is_terminal  # where an empty line would be left
            raise


@contextlib.contextmanager
def _despite_full_log(bar: "Progress") -> Iterator[None]:
    """Show the bar in the `with` block; that it cannot be written, as into a log on a full disk, fails no run."""
    with contextlib.suppress(OSError):
        bar.start()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            bar.stop()


def print_json(values: dict[str, Any]) -> None:
    """Print one JSON object on stdout. JSON has no infinity, so that it becomes null, at any depth."""
    typer.echo(json.dumps(_finite(values)))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _printable(text: str) -> str:
    """Return a text with escapes for signs by which names in a file, such as those of weights, command a terminal."""
    return "".join(sign if sign.isprintable() or sign in "\n\t" else repr(sign)[1:-1] for sign in text)


def _text_of(error: Exception) -> str:
    text, is_cut, _ = (str(error) or "no message").partition("\nTraceback")  # a worker's traceback
    text = text.rstrip()
    message = text if isinstance(error, PatchparError) else f"{type(error).__name__}: {text}"
    if message is not text:
        ways_out = [way_out for is_such, way_out in WAYS_OUT if is_such(error)]
        message = ". ".join((*ways_out, message))
    return f"{message} (--debug shows where)" if is_cut or message is not text else message
