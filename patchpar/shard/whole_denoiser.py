"""A denoiser that this rank computes alone, whose steady steps are captured as graphs of the device and replayed."""

from collections.abc import Callable
from typing import Any, ClassVar

from patchpar.shard.denoiser import SharedDenoiser


class WholeDenoiser(SharedDenoiser):
    """A denoiser on a mesh of one rank. Nothing is divided or exchanged; without graphs its calls run as they are."""

    _learns: ClassVar[str] = "error"

    def denoise(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run one denoiser call; `forward` is the denoiser's own. Returns its output."""
        self._make_sure()
        if self.watched.latest is None:
            self.watched.record(self.watched.now())
        return self._steady(self._exact_kind, forward, (args, kwargs))

    def prepare(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
        """Do nothing: there is nothing to verify."""

    def exactly(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Return the output of a call."""
        return forward(*args, **kwargs)

    def restore(self) -> None:
        """Do nothing: the denoiser has no hooks of this object."""

    def _unlearn(self) -> None:
        pass
