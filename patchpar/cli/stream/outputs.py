"""Where `patchpar stream` shows its frames: in a file, on live pages, or both."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from patchpar.cli.stream.video_file import StreamFilm, film_at
from patchpar.stream.web.server import HOME, is_local

if TYPE_CHECKING:
    from patchpar.cli.stream.flags import Stream
    from patchpar.cli.stream.run import Screen
    from patchpar.stream.web.viewer import FilmScreen, PictureScreen


@dataclass(frozen=True, slots=True, kw_only=True)
class Screens:
    """Live pages, which are served from the beginning, and a file, which is whole at the end."""

    live: tuple[PictureScreen | FilmScreen, ...]
    films: tuple[StreamFilm, ...]

    @classmethod
    def opened(cls, request: Stream, fps: float, rate: int | None, stack: ExitStack) -> Screens:
        """Those that were asked for, until `stack` is left. Raises PlanError for a port that is not free."""
        live = _live(request, fps, rate, stack) if request.is_live else ()
        films = () if request.output is None else (stack.enter_context(film_at(request.output, fps, rate)),)
        return cls(live=live, films=films)

    @property
    def all(self) -> list[Screen]:
        """Each is shown every frame."""
        return [*self.live, *self.films]

    def heard_by(self, say: Callable[[str], None]) -> Callable[[str], None]:
        """Who is told how the stream is getting on: `say`, and the pages."""

        def tell(line: str) -> None:
            say(line)
            for screen in self.live:
                screen.page.status = line

        return tell


def _live(request: Stream, fps: float, rate: int | None, stack: ExitStack) -> tuple[PictureScreen | FilmScreen, ...]:
    from patchpar.stream.web.viewer import FilmScreen, PictureScreen

    host = request.host or HOME
    screens: list[PictureScreen | FilmScreen] = []
    if request.mjpeg is not None:
        screens.append(stack.enter_context(closing(PictureScreen(host, request.mjpeg, fps))))
    if request.ws is not None:
        screens.append(stack.enter_context(closing(FilmScreen(host, request.ws, fps, rate))))
    for screen in screens:
        screen.open()
        typer.echo(f"watch at {screen.page.url}", err=True)
    if not is_local(host):
        typer.echo(f"{host}: everybody who reaches this machine can watch", err=True)
    return tuple(screens)
