"""The model_index.json of a diffusers pipeline: its components with their libraries and classes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patchpar.errors import PlanError
from patchpar.plan.json_files import read_object

INDEX, MODULAR = "model_index.json", "modular_model_index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentEntry:
    """A component that is loaded: the class `kind` of `library`, from the folder `name`."""

    name: str
    library: str
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelIndex:
    """`pipeline`: a class of diffusers, or (module, class) of the model's own code. `absent`: components it lacks."""

    file: Path
    pipeline: str | tuple[str, ...]
    parts: tuple[ComponentEntry, ...]
    absent: tuple[str, ...]

    @classmethod
    def read(cls, folder: Path) -> "ModelIndex":
        """Return the index of a model folder. Raises PlanError if there is none, or if an entry is invalid."""
        file = folder / INDEX
        if not file.is_file():
            message = f"{folder} has no {INDEX}, so it is no diffusers model folder"
            if (folder / MODULAR).is_file():
                message += (
                    f"; with {MODULAR} it is a modular pipeline: load it with diffusers, and use ParallelPipeline(pipe)"
                )
            raise PlanError(message)
        entries = read_object(file)
        listed = {name: entry for name, entry in entries.items() if isinstance(entry, list) and name[:1] != "_"}
        parts = [_part(file, name, entry) for name, entry in listed.items() if not _is_number_list(entry)]
        return cls(
            file=file,
            pipeline=_pipeline(file, entries.get("_class_name")),
            parts=tuple(part for part in parts if part is not None),
            absent=tuple(name for name, entry in listed.items() if entry == [None, None]),
        )


def _pipeline(file: Path, name: Any) -> str | tuple[str, ...]:
    if isinstance(name, list) and all(isinstance(each, str) for each in name):
        return tuple(name)
    if not isinstance(name, str):
        raise PlanError(f"{file} names no pipeline of diffusers: _class_name is {name!r:.80}")
    return name


def _is_number_list(entry: list[Any]) -> bool:
    """Return whether this is an option of the pipeline, such as the output layers of a text encoder."""
    return bool(entry) and all(isinstance(each, (int, float)) for each in entry)


def _part(file: Path, name: str, entry: list[Any]) -> ComponentEntry | None:
    """Return a component, None for an absent one. Its name is that of an attribute and of a folder in the model."""
    if not name.isidentifier():
        raise PlanError(f"{file}: {name!r:.80} can be no part of a pipeline: parts are named as attributes are")
    if len(entry) == 2 and entry[0] is None:
        return None
    if len(entry) != 2 or not all(isinstance(each, str) for each in entry):
        raise PlanError(f"{file}: {name} is {entry!r:.80}, but a component is [library, class]")
    return ComponentEntry(name=name, library=entry[0], kind=entry[1])
