"""End a command by ctrl-C or a signal, without leaving workers running or files incomplete."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from patchpar.stream.web.shutdown import ENDING, ended_at_once, ended_by, exit_code, signals_unwind

__all__ = ["ended_at_once", "ended_by_signals"]


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let termination signals unwind the main thread, as ctrl-C does. The exit code is 128 + signal number."""
    with signals_unwind():
        try:
            yield
        except KeyboardInterrupt as ending:
            code = exit_code(ending)
            typer.echo(ended_by(code - 128), err=True)
            raise typer.Exit(code) from None
        except SystemExit as ending:
            if exit_code(ending) - 128 in ENDING:
                typer.echo(ended_by(exit_code(ending) - 128), err=True)
            raise
