"""The verbs of the command line. The module of a verb is imported when the verb is asked for, or the help of all."""

from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import Any

import typer

from patchpar.cli.flags import takes
from patchpar.cli.folded_help import FoldedHelp, ScreenHelp


@dataclass(frozen=True, slots=True, kw_only=True)
class Verb:
    """A verb in a module of this package: its `flags`, a dataclass, its `command`, and the arguments of an example."""

    module: str
    flags: str
    command: str
    example: str


VERBS: Mapping[str, Verb] = MappingProxyType(
    {
        "generate": Verb(
            module="generate",
            flags="GenerateFlags",
            command="generate",
            example='"a tree on the left" --devices 2 -o tree.png',
        ),
        "upscale": Verb(
            module="upscale", flags="UpscaleFlags", command="enlarge", example="house.png --scale 2 --devices 2"
        ),
        "video": Verb(
            module="video",
            flags="VideoFlags",
            command="video",
            example='"a fox runs" --model ./wan --devices 4 -o fox.mp4',
        ),
        "stream": Verb(
            module="stream.command",
            flags="StreamFlags",
            command="stream",
            example="happy --audio embedded --output talk.mp4",
        ),
        "replay": Verb(
            module="stream.replay",
            flags="ReplayFlags",
            command="replay",
            example="session.jsonl --devices 2 --output again.mp4",
        ),
        "fifo": Verb(
            module="fifo",
            flags="FifoFlags",
            command="fifo",
            example='"a river" --model ./wan --devices 4 --seconds 60',
        ),
        "convert": Verb(
            module="convert",
            flags="ConvertFlags",
            command="convert",
            example="self_forcing_dmd.pt --to self-forcing",
        ),
        "compare": Verb(
            module="compare",
            flags="CompareFlags",
            command="compare",
            example='"a tree on the left" --devices 2 --plan patch=2',
        ),
        "bench": Verb(
            module="bench.command",
            flags="BenchFlags",
            command="bench",
            example='"a tree on the left" --devices cpu:2 --strategy pcpp',
        ),
        "simulate": Verb(
            module="simulate",
            flags="SimulateFlags",
            command="simulate",
            example="embedded --machine 4xRTX4090-pcie4 --plan patch=4",
        ),
        "plan": Verb(
            module="plan", flags="PlanFlags", command="plan", example="embedded --machine 8xH100-nvlink --dtype float16"
        ),
        "tune": Verb(module="tune", flags="TuneFlags", command="tune", example="--devices 2"),
        "app": Verb(
            module="demo",
            flags="AppFlags",
            command="serve_app",
            example="--model ./sdxl --dtype float16 --devices 4",
        ),
        "serve": Verb(
            module="serve", flags="ServeFlags", command="serve_images", example="embedded --devices 2 --port 8000"
        ),
        "doctor": Verb(module="doctor", flags="DoctorFlags", command="doctor", example="--devices 4 --model ./sdxl"),
    }
)


class LazyVerbs(ScreenHelp):
    """A group whose commands are the verbs."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = _Commands()


class _Commands(MutableMapping[str, Any]):
    """The command of each verb, made at its first use."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            self._made[name] = command_of(name)
        return self._made[name]

    def __setitem__(self, name: str, command: Any) -> None:
        self._made[name] = command

    def __delitem__(self, name: str) -> None:
        del self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(VERBS)

    def __len__(self) -> int:
        return len(VERBS)


def command_of(name: str) -> Any:
    """Return typer's command of a verb, with a flag for each field of its dataclass. Raises KeyError for none."""
    verb = VERBS[name]
    module = import_module(f"{__package__}.{verb.module}")
    flags, command = getattr(module, verb.flags), getattr(module, verb.command)
    only = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    only.command(name, cls=FoldedHelp, epilog=f"Try: patchpar {name} {verb.example}")(takes(flags, command))
    return typer.main.get_command(only)
