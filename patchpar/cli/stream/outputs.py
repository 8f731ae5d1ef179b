"""Outputs of `patchpar stream`: a file, live pages, or both."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from patchpar.cli.video_file import StreamVideoFile, video_at
from patchpar.stream.web.server import HOME, is_local

if TYPE_CHECKING:
    from patchpar.cli.stream.flags import StreamFlags
    from patchpar.cli.stream.run import FrameOutput
    from patchpar.stream.web.viewer import ImageScreen, VideoScreen


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameOutputs:
    """Live pages, served from the beginning, and a file, complete at the end."""

    live: tuple[ImageScreen | VideoScreen, ...]
    videos: tuple[StreamVideoFile, ...]

    @classmethod
    def opened(cls, request: StreamFlags, fps: float, rate: int | None, stack: ExitStack) -> FrameOutputs:
        """Open the requested outputs until `stack` is closed. Raises PlanError for a port that is not free."""
        live = _live(request, fps, rate, stack) if request.is_live else ()
        videos = () if request.output is None else (stack.enter_context(video_at(request.output, fps, rate)),)
        return cls(live=live, videos=videos)

    @property
    def all(self) -> list[FrameOutput]:
        """All outputs. Each gets every frame."""
        return [*self.live, *self.videos]

    def heard_by(self, say: Callable[[str], None]) -> Callable[[str], None]:
        """Return a function that reports a status line to `say` and to the pages."""

        def tell(line: str) -> None:
            say(line)
            for screen in self.live:
                screen.page.status = line

        return tell


def _live(
    request: StreamFlags, fps: float, rate: int | None, stack: ExitStack
) -> tuple[ImageScreen | VideoScreen, ...]:
    from patchpar.stream.web.viewer import ImageScreen, VideoScreen

    host = request.host or HOME
    screens: list[ImageScreen | VideoScreen] = []
    if request.mjpeg is not None:
        screens.append(stack.enter_context(closing(ImageScreen(host, request.mjpeg, fps))))
    if request.ws is not None:
        screens.append(stack.enter_context(closing(VideoScreen(host, request.ws, fps, rate))))
    for screen in screens:
        screen.open()
        typer.echo(f"watch at {screen.page.url}", err=True)
    if not is_local(host):
        typer.echo(f"{host}: everyone who can reach this machine can watch", err=True)
    return tuple(screens)
