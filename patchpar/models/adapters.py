"""Adapters come as safetensors too: LoRA, textual inversions and IP-Adapters, out of a file, a folder or the hub."""

from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from patchpar.errors import PlanError
from patchpar.models.folder import HUB_NAME, PICKLES

READ_FILES = (
    "load_lora_weights",
    "load_lora_adapter",
    "load_attn_procs",
    "load_textual_inversion",
    "load_ip_adapter",
    "lora_state_dict",
)
"""Methods of pipelines and networks that read weights from where their first argument says."""
SOURCES = ("pretrained_model_name_or_path_or_dict", "pretrained_model_name_or_path")
SUFFIX = ".safetensors"
CONVERT = "which can run code: convert it to safetensors first"


def from_safetensors(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments with which the method `name`, such as "unet.load_lora_adapter", reads safetensors only.

    Other methods, and weights that are in memory already, keep theirs. Raises PlanError for what is not there, and for
    a pickle, before any rank reads anything.
    """
    method = name.rpartition(".")[2]
    if method not in READ_FILES:
        return dict(kwargs)
    source = args[0] if args else next((kwargs[each] for each in SOURCES if each in kwargs), None)
    places = [each for each in _several(source) if isinstance(each, (str, PathLike))]
    if not places:
        return dict(kwargs)
    if kwargs.get("use_safetensors", True) is not True:
        raise PlanError(f"use_safetensors={kwargs['use_safetensors']!r}: {name} reads no pickle, {CONVERT}")
    has_more = method == "load_ip_adapter"
    folders = _several(args[1] if has_more and len(args) > 1 else kwargs.get("subfolder"))
    files = _several(args[2] if has_more and len(args) > 2 else kwargs.get("weight_name"))
    for number, place in enumerate(places):
        _check(name, place, _of(folders, number), _of(files, number))
    for file in files:  # of one place, maybe several
        _check_name(name, file)
    if not has_more:
        return {**kwargs, "use_safetensors": True}
    for folder in _image_encoders(places, folders, kwargs):
        _check_folder(name, folder)
    return dict(kwargs)


def _several(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _of(values: Sequence[Any], number: int) -> Any:
    return values[number] if number < len(values) else values[0]


def _check(name: str, place: Any, subfolder: Any, file: Any) -> None:
    _check_name(name, file)
    path = Path(place).expanduser()
    if path.is_file():
        _check_name(name, path.name)
    elif path.is_dir():
        folder = path / (subfolder or "")
        if file is not None and not (folder / file).is_file():
            raise PlanError(f"{name}: {folder} has no {file}")
        if file is None:
            _check_folder(name, folder)
    elif isinstance(place, PathLike) or not HUB_NAME.fullmatch(place):
        raise PlanError(f"{name}: {str(place)!r} is no file or folder that is here, and no hub name such as org/model")


def _check_name(name: str, file: Any) -> None:
    if file is not None and not str(file).endswith(SUFFIX):
        raise PlanError(f"{name}: {file} is no safetensors file, and anything else may be a pickle, {CONVERT}")


def _check_folder(name: str, folder: Path) -> None:
    """Raise PlanError for a folder of weights without safetensors."""
    if any(folder.glob(f"*{SUFFIX}")):
        return
    pickles = sorted(file.name for pattern in PICKLES for file in folder.glob(pattern))
    if pickles:
        raise PlanError(f"{name}: {folder} has only {pickles[0]}, a pickle, {CONVERT}")
    raise PlanError(f"{name}: {folder} has no weights as safetensors")


def _image_encoders(places: Sequence[Any], folders: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Path]:
    """Folders here out of which an IP-Adapter may take the encoder of its picture."""
    inner = kwargs.get("image_encoder_folder", "image_encoder")
    own = kwargs.get("image_encoder_pretrained_model_name_or_path")
    for number, place in enumerate(places):
        if inner is not None:
            inside = inner if "/" in inner else Path(_of(folders, number) or "", inner)
            yield from (folder for folder in [Path(place).expanduser() / inside] if folder.is_dir())
    if own is not None and Path(own).is_dir():
        yield Path(own, kwargs.get("image_encoder_subfolder") or "")
