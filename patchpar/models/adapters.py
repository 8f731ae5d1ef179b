"""LoRA and textual inversions from safetensors only, in a file, a folder or the hub. See also `ip_adapters`."""

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from patchpar.errors import PlanError
from patchpar.models.files import HUB_NAME, path_of, pickles_in

READ_FILES = ("load_lora_weights", "load_lora_adapter", "load_attn_procs", "load_textual_inversion", "lora_state_dict")
"""Methods of pipelines and networks that read weights from the location in their first argument."""
SOURCES = ("pretrained_model_name_or_path_or_dict", "pretrained_model_name_or_path")
SUFFIX = ".safetensors"
CONVERT = "which can run code: convert it to safetensors first"
OF_TRANSFORMERS = "load_adapter"
"""A method of transformers' networks, which reads PEFT files."""
PEFT_WEIGHTS = "adapter_model.safetensors"
OF_ONE_FILE = "from_single_file"
SINGLE_FILES = (SUFFIX, ".gguf")


def from_safetensors(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments with which the method `name`, as "unet.load_lora_adapter", reads safetensors only.

    They are unchanged for other methods and for weights in memory. Raises PlanError for missing files and for a pickle,
    before any rank reads anything.
    """
    method = name.rpartition(".")[2]
    if method == OF_TRANSFORMERS:
        _check_peft(name, args, kwargs)
    elif method == OF_ONE_FILE:
        _check_single_file(name, args, kwargs)
    if method not in READ_FILES:
        return dict(kwargs)
    source = args[0] if args else next((kwargs[each] for each in SOURCES if each in kwargs), None)
    locations = [each for each in several(source) if isinstance(each, (str, PathLike))]
    if not locations:
        return dict(kwargs)
    check_strength(name, kwargs)
    folders, files = several(kwargs.get("subfolder")), several(kwargs.get("weight_name"))
    for number, location in enumerate(locations):
        check_source(name, location, entry(folders, number), entry(files, number))
    for file in files:  # one location may have several files
        _check_name(name, file)
    return {**kwargs, "use_safetensors": True}


def several(value: Any) -> list[Any]:
    """Return a list of an argument that may be a single item."""
    return list(value) if isinstance(value, (list, tuple)) else [value]


def entry(values: Sequence[Any], number: int) -> Any:
    """Return the item of that number, or the first, which applies to all."""
    return values[number] if number < len(values) else values[0]


def check_strength(name: str, kwargs: Mapping[str, Any]) -> None:
    """Raise PlanError if `use_safetensors` lets a method read a pickle."""
    if kwargs.get("use_safetensors", True) is not True:
        raise PlanError(f"use_safetensors={kwargs['use_safetensors']!r}: {name} reads no pickle, {CONVERT}")


def check_source(name: str, location: Any, subfolder: Any, file: Any) -> None:
    """Raise PlanError for a file, a folder or a hub name from which `name` would not read safetensors."""
    _check_name(name, file)
    path = path_of(location)
    if path.is_file():
        _check_name(name, path.name)
    elif path.is_dir():
        folder = path / (subfolder or "")
        if file is not None and not (folder / file).is_file():
            raise PlanError(f"{name}: {folder} has no {file}")
        if file is None:
            _check_folder(name, folder)
    elif isinstance(location, PathLike) or not HUB_NAME.fullmatch(location):
        raise PlanError(f"{name}: {str(location)!r} is no local file or folder, and no hub name such as org/model")


def folder_and_name(source: str) -> tuple[str, dict[str, str]]:
    """Return the first argument of `load_lora_weights` for a LoRA, and the keyword arguments of one in a file.

    diffusers takes a folder and the name of a file in it. Raises PlanError for a path that cannot be.
    """
    path = path_of(source)
    return (str(path.parent), {"weight_name": path.name}) if path.is_file() else (source, {})


def load_lora(pipe: Any, source: str, name: str) -> None:
    """Load a LoRA on all ranks as adapter `name`. `source`: a file, a folder or a hub name.

    Raises PlanError, and what diffusers raises.
    """
    location, in_it = folder_and_name(source)
    pipe.load_lora_weights(location, adapter_name=name, **in_it)


def _check_name(name: str, file: Any) -> None:
    if file is not None and not str(file).endswith(SUFFIX):
        raise PlanError(f"{name}: {file} is no safetensors file, and anything else may be a pickle, {CONVERT}")


def _check_folder(name: str, folder: Path) -> None:
    """Raise PlanError for a folder of weights without safetensors."""
    if any(folder.glob(f"*{SUFFIX}")):
        return
    pickles = pickles_in(folder)
    if pickles:
        raise PlanError(f"{name}: {folder} has only {pickles[0]}, a pickle, {CONVERT}")
    raise PlanError(f"{name}: {folder} has no weights as safetensors")


def _check_peft(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise PlanError unless an adapter of PEFT is in memory, or in a folder here as safetensors.

    transformers otherwise looks for a pickle, and files on the hub cannot be checked before it does.
    """
    location = args[0] if args else kwargs.get("peft_model_id", kwargs.get("pretrained_model_name_or_path"))
    if location is None:
        return
    check_strength(name, kwargs)
    folder = Path(location, kwargs.get("subfolder") or "")
    if not (folder / PEFT_WEIGHTS).is_file():
        raise PlanError(
            f"{name}: {str(folder)!r} is no folder here with {PEFT_WEIGHTS} (fetch what is on the hub), and no pickle "
            f"is read, {CONVERT}"
        )


def _check_single_file(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    location = args[0] if args else next((value for key, value in kwargs.items() if key.startswith("pretrained_")), "")
    if not str(location).endswith(SINGLE_FILES):
        raise PlanError(f"{name}: {location} is neither safetensors nor GGUF, and may be a pickle, {CONVERT}")
