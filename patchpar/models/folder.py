"""What a model folder holds, read without loading it: is it there, is it safetensors, is it whole, how large.

No torch and no diffusers, so that a bad path is refused before any worker is started.
"""

import json
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patchpar.errors import PlanError

EMBEDDED = "embedded"
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
PICKLES = ("*.bin", "*.ckpt", "*.pt", "*.pth")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """A checked model folder. `weight_bytes` is what its chosen safetensors files weigh."""

    path: Path
    pipeline: str
    weight_bytes: int


def embedded_model() -> Path:
    """The folder of the model that comes with the package: inside the wheel, or beside the package in a clone."""
    package = Path(__file__).parent.parent
    for folder in (package / "assets" / "scenes-unet", package.parent / "assets" / "scenes-unet"):
        if (folder / "model_index.json").is_file():
            return folder
    raise PlanError(
        f"the embedded model is missing: neither {package}/assets nor {package.parent}/assets has scenes-unet"
    )


def resolve_model(model: str | Path, options: Mapping[str, Any]) -> tuple[str, dict[str, Any], ModelFolder | None]:
    """(what to load, with which options, what is known of it). Hub names are left to the hub: nothing is known.

    Raises PlanError for a path that is no model folder, has no safetensors, or has a broken weight file.
    """
    options = dict(options)
    if str(model) == EMBEDDED:
        options.setdefault("variant", "fp16")
        options.setdefault("torch_dtype", "float32")
        model = embedded_model()
    path = Path(model).expanduser()
    if path.is_dir():
        return str(path), options, inspect_folder(path, options.get("variant"))
    if path.exists() or not HUB_NAME.fullmatch(str(model)):
        ways = "a folder with model_index.json, a hub name such as org/model, or 'embedded'"
        raise PlanError(f"{str(model)!r} is no model: give {ways}")
    return str(model), options, None


def inspect_folder(path: Path, variant: str | None = None) -> ModelFolder:
    """Check a local model folder. Raises PlanError."""
    index = path / "model_index.json"
    if not index.is_file():
        raise PlanError(f"{path} has no model_index.json, so it is no diffusers model folder")
    try:
        entries = json.loads(index.read_text())
    except ValueError as error:
        raise PlanError(f"{index} is not valid JSON: {error}") from error
    total = 0
    for name, entry in entries.items():
        if isinstance(entry, list) and entry[0] is not None:
            total += sum(_checked_size(file) for file in _weights(path / name, variant))
    return ModelFolder(path=path, pipeline=str(entries.get("_class_name")), weight_bytes=total)


def _weights(folder: Path, variant: str | None) -> list[Path]:
    files = sorted(folder.glob("*.safetensors"))
    chosen = [file for file in files if variant and f".{variant}." in file.name] or [
        file for file in files if not re.search(r"\.(fp16|bf16|fp32)\.", file.name)
    ]
    if not chosen and any(file for pattern in PICKLES for file in folder.glob(pattern)):
        raise PlanError(f"{folder} has weights only as pickles, which can run code: convert them to safetensors first")
    if not chosen and files:
        raise PlanError(f"{folder} has {files[0].name}, but not that without a variant: pass variant=, such as 'fp16'")
    if not chosen and (folder / "config.json").is_file() and _has_weights(folder):
        raise PlanError(f"{folder} has a config.json but no safetensors weights")
    return chosen


def _has_weights(folder: Path) -> bool:
    config = json.loads((folder / "config.json").read_text())
    return "_class_name" in config or "architectures" in config


def _checked_size(file: Path) -> int:
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header: Any = json.loads(stream.read(length)) if length < size else None
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    except (struct.error, ValueError, AttributeError, KeyError, TypeError, MemoryError) as error:
        raise PlanError(f"{file} is not a whole safetensors file: its header cannot be read. Fetch it again") from error
    if 8 + length + max(ends, default=0) != size:
        raise PlanError(f"{file} should have {8 + length + max(ends, default=0)} bytes but has {size}: fetch it again")
    return size


def check_memory(folder: ModelFolder | None, devices: tuple[str, ...], load_bytes_factor: float = 1.0) -> None:
    """Raise PlanError when the weights of all CPU workers exceed the memory that is free."""
    workers = sum(device == "cpu" for device in devices)
    free = _free_memory()
    if folder is None or not workers or free is None:
        return
    need = int(folder.weight_bytes * load_bytes_factor * workers)
    if need > free:
        raise PlanError(
            f"{workers} CPU workers need about {need / 2**30:.1f} GiB for the weights of {folder.path}, but only "
            f"{free / 2**30:.1f} GiB are free: use at most {int(free * workers / need)} devices or a smaller dtype"
        )


def _free_memory() -> int | None:
    info = Path("/proc/meminfo")
    if not info.exists():
        return None
    match = re.search(r"MemAvailable:\s+(\d+) kB", info.read_text())
    return int(match.group(1)) * 1024 if match else None
