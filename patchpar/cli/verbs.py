"""The verbs of the command line. The module of a verb is imported when the verb is asked for, or the help of all."""

from collections.abc import Iterator, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any, NamedTuple

import typer

from patchpar.cli.flags import takes
from patchpar.cli.folded_help import FoldedHelp, ScreenHelp


class Verb(NamedTuple):
    """A verb: its command, as the module of this package and the function in it, and the arguments of an example."""

    command: str
    example: str


VERBS: Mapping[str, Verb] = MappingProxyType(
    {
        "generate": Verb("generate:generate", '"a tree on the left" --devices 2 -o tree.png'),
        "upscale": Verb("upscale:enlarge", "house.png --scale 2 --devices 2"),
        "video": Verb("video:video", '"a fox runs" --model ./wan --devices 4 -o fox.mp4'),
        "stream": Verb("stream.command:stream", "happy --audio embedded --output talk.mp4"),
        "replay": Verb("stream.replay:replay", "session.jsonl --devices 2 --output again.mp4"),
        "fifo": Verb("fifo:fifo", '"a river" --model ./wan --devices 4 --seconds 60'),
        "convert": Verb("convert:convert", "self_forcing_dmd.pt --to self-forcing"),
        "compare": Verb("compare:compare", '"a tree on the left" --devices 2 --plan patch=2'),
        "bench": Verb("bench.command:bench", '"a tree on the left" --devices cpu:2 --strategy pcpp'),
        "simulate": Verb("simulate:simulate", "embedded --machine 4xRTX4090-pcie4 --plan patch=4"),
        "plan": Verb("plan:plan", "embedded --machine 8xH100-nvlink --dtype float16"),
        "tune": Verb("tune:tune", "--devices 2"),
        "app": Verb("demo:serve_app", "--model ./sdxl --dtype float16 --devices 4"),
        "serve": Verb("serve:serve_images", "embedded --devices 2 --port 8000"),
        "doctor": Verb("doctor:doctor", "--devices 4 --model ./sdxl"),
    }
)


class LazyVerbs(ScreenHelp):
    """A group whose commands are the verbs."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = _Commands()  # type: ignore[assignment]  # nothing is added to it


class _Commands(Mapping[str, Any]):
    """The command of each verb, made whenever it is asked for: typer keeps the values of the last call in it."""

    def __getitem__(self, name: str) -> Any:
        return command_of(name)

    def __iter__(self) -> Iterator[str]:
        return iter(VERBS)

    def __len__(self) -> int:
        return len(VERBS)


def command_of(name: str) -> Any:
    """Return typer's command of a verb, with a flag for each field of its dataclass. Raises KeyError for none."""
    module, _, function = VERBS[name].command.partition(":")
    command = takes(getattr(import_module(f"{__package__}.{module}"), function))
    only = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    only.command(name, cls=FoldedHelp, epilog=f"Try: patchpar {name} {VERBS[name].example}")(command)
    return typer.main.get_command(only)
