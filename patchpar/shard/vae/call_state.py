"""How far a call of the pipeline has come, as its VAE sees it, and who needs what the VAE gives."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


class OutputNeeded(Exception):
    """The pipeline goes on after it has decoded, so every rank needs the picture: draw again, `everywhere`."""


@dataclass(slots=True)
class VaeCallState:
    """`running`: inside a call, where every rank does the same. `everywhere`: all ranks get what is decoded.

    `dropped`: something has been decoded in this call, and only the first rank has it.
    """

    running: bool = False
    everywhere: bool = False
    dropped: bool = False

    @contextmanager
    def open(self) -> Iterator[None]:
        """One call of the pipeline."""
        self.running, self.dropped = True, False
        try:
            yield
        finally:
            self.running = False

    @contextmanager
    def interrupted(self) -> Iterator[None]:
        """The caller's own function runs, on one rank alone."""
        running, self.running = self.running, False
        try:
            yield
        finally:
            self.running = running

    def go_on(self) -> None:
        """The denoiser or the encoder is called. Raises OutputNeeded on all ranks where they may need the picture."""
        if self.running and self.dropped:
            raise OutputNeeded
