"""The state of a pipeline call for its VAE: whether one is running, and which ranks need the decoded image."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


class OutputNeeded(Exception):
    """The pipeline uses the decoded image, so every rank needs it: run the call again with `everywhere`."""


@dataclass(slots=True)
class VaeCallState:
    """`running`: inside a call, where all ranks do the same. `everywhere`: all ranks get decoded images.

    `dropped`: an image has been decoded in this call, and only the first rank has it.
    """

    running: bool = False
    everywhere: bool = False
    dropped: bool = False

    @contextmanager
    def open(self) -> Iterator[None]:
        """Run one call of the pipeline."""
        self.running, self.dropped = True, False
        try:
            yield
        finally:
            self.running = False

    @contextmanager
    def interrupted(self) -> Iterator[None]:
        """Run a function of the caller, on one rank alone."""
        running, self.running = self.running, False
        try:
            yield
        finally:
            self.running = running

    def go_on(self) -> None:
        """Report a call of the denoiser or the encoder. Raises OutputNeeded on all ranks if they may need the image."""
        if self.running and self.dropped:
            raise OutputNeeded
