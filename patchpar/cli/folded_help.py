"""Help in two sizes: `--help` has what most people need and fits a screen, `--help-all` has every flag."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from patchpar.cli.plain_arguments import plain_arguments

MORE = "more"
"""Panel of flags that are in the help of `--help-all` only."""
ALL = "patchpar.help_all"


def more(text: str, *names: str, **options: Any) -> Any:
    """Return the option of a flag that is in the help of `--help-all` only. `text`: of the help."""
    return typer.Option(*names, rich_help_panel=MORE, help=text, **options)


class FoldedHelp(TyperCommand):
    """A verb whose `--help` leaves out flags with the panel MORE, and which refuses a flag of one value given twice."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line. Raises BadParameter: of two values click takes the last one without a word."""
        found, rest, order = self.make_parser(ctx).parse_args(args=list(args))
        for each in order:
            if isinstance(each, TyperOption) and _takes_one(each) and order.count(each) > 1:
                message = f"it is given {order.count(each)} times, but takes one value"
                raise typer.BadParameter(message, ctx=ctx, param=each)
        plain = None if rest else plain_arguments(self.params, found, getattr(self.callback, "__annotations__", {}))
        if plain is None:
            return super().parse_args(ctx, args)
        ctx.params.update(plain)
        return []

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the flags that belong into this help."""
        with self._hidden(() if ctx.meta.get(ALL) else self._more()):
            super().format_options(ctx, formatter)

    def _more(self) -> tuple[Any, ...]:
        return tuple(each for each in self.params if getattr(each, "rich_help_panel", None) == MORE)

    @contextmanager
    def _hidden(self, parameters: tuple[Any, ...]) -> Iterator[None]:
        for each in parameters:
            each.hidden = True
        try:
            yield
        finally:
            for each in parameters:
                each.hidden = False


class ScreenHelp(TyperGroup):
    """All verbs, in a help that fits a screen: `--help` itself is not in it."""

    def get_help_option(self, ctx: Any) -> Any:
        """Return click's own, hidden."""
        option = super().get_help_option(ctx)
        if option is not None:
            option.hidden = True
        return option


def _takes_one(option: Any) -> bool:
    return not (option.multiple or option.is_flag or option.count)


def show_all(ctx: typer.Context, wanted: bool) -> None:
    """Print the help with every flag and end, if it is wanted."""
    if wanted:
        ctx.meta[ALL] = True
        typer.echo(ctx.get_help())
        raise typer.Exit


HELP_ALL = "help_all"
HelpAll = Annotated[bool, typer.Option("--help-all", is_eager=True, callback=show_all, help="Show all flags.")]


def is_folded(hints: Mapping[str, Any]) -> bool:
    """Return whether a flag of a command, by the annotations of all, is left out of `--help`."""
    metadata = [getattr(each, "__metadata__", ()) for each in hints.values()]
    return any(getattr(option, "rich_help_panel", None) == MORE for options in metadata for option in options)
