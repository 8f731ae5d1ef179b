"""End a command by ctrl-C or a signal, without leaving workers running or files incomplete."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import typer

from patchpar.launch.shutdown import ENDING, ended_at_once, ended_by, exit_code, signals_unwind

__all__ = ["ended_at_once", "ended_by_signals"]


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let termination signals unwind the main thread, as ctrl-C does. The exit code is 128 + signal number."""
    with signals_unwind():
        try:
            yield
        except KeyboardInterrupt as ending:
            code = exit_code(ending)
            _say(code - 128)
            raise typer.Exit(code) from None
        except SystemExit as ending:
            if exit_code(ending) - 128 in ENDING:
                _say(exit_code(ending) - 128)
            raise


def _say(number: int) -> None:
    """Say which signal has ended the command, unless its terminal has gone, which SIGHUP may be about."""
    with suppress(OSError):
        typer.echo(ended_by(number), err=True)
