"""Checks of a model folder without loading it: that it exists, has complete safetensors files, and its size.

Neither torch nor diffusers is imported, so that a bad path is refused before any worker is started.
"""

import math
import re
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patchpar.errors import PlanError
from patchpar.launch.accelerators import is_accelerator
from patchpar.launch.host_memory import free_memory
from patchpar.models.model_index import ModelIndex
from patchpar.models.remote_code import refuse_code
from patchpar.plan.byte_sizes import readable_bytes
from patchpar.plan.json_files import object_of, read_object
from patchpar.plan.plan import Plan

EMBEDDED = {"embedded": "scenes-unet", "embedded-dit": "scenes-dit", "embedded-face": "face-stream"}
CONFIG = "config.json"
STREAM_CONFIG = "stream.json"
"""Of block-causal models, which are run by streams."""
HUB_NAME = re.compile(r"(?!.*(--|\.\.))\w([\w.-]*\w)?/\w([\w.-]*\w)?")
"""A repository name of the hub; `./folder` and `~/folder` are none."""
BYTES_PER_WEIGHT = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
FLOATING = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"} | {
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
"""Names of dtypes in safetensors files, and in torch."""
MAX_HEADER = 100_000_000
"""Bytes: the longest header that the safetensors format allows."""
SHARD = r"-\d{5}-of-\d{5}"
"""Of the name of a weight file that is one of several."""
OTHER_VARIANT = rf"\.(fp16|bf16|fp32)({SHARD})?\."
PICKLES = ("*.bin", "*.ckpt", "*.pt", "*.pth")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """A checked model folder and the weights in its chosen safetensors files. `absent`: components that it lacks."""

    path: Path
    pipeline: str
    weight_bytes: int
    num_weights: int
    absent: tuple[str, ...]


def embedded_model(name: str = "embedded") -> Path:
    """Return the folder of an embedded model: inside the wheel, or beside the package in a clone.

    Raises PlanError if it is in neither.
    """
    package = Path(__file__).parent.parent
    for folder in (package / "assets" / EMBEDDED[name], package.parent / "assets" / EMBEDDED[name]):
        if (folder / "model_index.json").is_file():
            return folder
    raise PlanError(
        f"the model {name!r} is missing: neither {package}/assets nor {package.parent}/assets has {EMBEDDED[name]}"
    )


def shipped_name(model: str | Path) -> str | None:
    """Return the name of an embedded model from its name or its folder; None for any other model."""
    if str(model) in EMBEDDED:
        return str(model)
    folder = Path(model).absolute()
    return next((name for name in EMBEDDED if embedded_model(name).absolute() == folder), None)


def resolve_model(
    model: str | Path, options: Mapping[str, Any], *, besides: Collection[str] = (), unread: Collection[str] = ()
) -> tuple[str, dict[str, Any], ModelFolder | None]:
    """Return (model to load, its options, its folder). The folder of a hub name is None.

    Absent components are passed as None, which diffusers requires. Folders are absolute paths: a rank that is started
    later may have another working directory. `besides`: components that are not loaded from the folder. `unread`: those
    whose weights need not be there. Raises PlanError for a path that is no model folder, has no safetensors, has a
    broken weight file, or has code of its own.
    """
    options = dict(options)
    if str(model) in EMBEDDED:
        options.setdefault("variant", "fp16")
        options.setdefault("torch_dtype", "float32")
        model = embedded_model(str(model))
    if options.get("cache_dir") is not None:
        options["cache_dir"] = str(path_of(options["cache_dir"]).absolute())
    path = path_of(model).absolute()
    if str(model) and path.is_dir():
        folder = inspect_folder(path, options.get("variant"), unread=unread)
        refuse_code(path, options, besides=besides)
        refuse_missing_configs(path, {*besides, *options})
        return str(path), {**dict.fromkeys(folder.absent), **options}, folder
    if path.exists() or isinstance(model, Path) or not HUB_NAME.fullmatch(model):
        shipped = ", ".join(repr(name) for name in EMBEDDED)
        ways = f"a folder with model_index.json, a hub name such as org/model, or one of {shipped}"
        what = "is a file, and so no model" if path.is_file() else "is no model, and no such folder is here"
        raise PlanError(f"{str(model)!r} {what}: {_way_of_a_file(path)}give {ways}")
    return model, options, None


def _way_of_a_file(path: Path) -> str:
    """Return how to use weights in one file, which do not say of what pipeline they are; empty for anything else."""
    if path.suffix not in (".safetensors", ".gguf"):
        return ""
    return (
        "load it in Python with from_single_file of its class in diffusers, and give a pipeline to "
        "ParallelPipeline(pipe), a network to from_pretrained(model, transformer=network); save_pretrained makes a "
        "folder of a pipeline. Or "
    )


def path_of(text: str | Path) -> Path:
    """Return a path, `~` expanded. Raises PlanError for one that cannot be: too long, of an unknown user, no text."""
    try:
        path = Path(text).expanduser()
        path.exists()
    except (OSError, RuntimeError, TypeError) as error:
        why = getattr(error, "strerror", None) or error
        raise PlanError(f"{str(text)!r:.200} is no valid path: {why}") from error
    return path


def inspect_folder(path: Path, variant: str | None = None, *, unread: Collection[str] = ()) -> ModelFolder:
    """Return a local model folder after checking it, but for the weights of components `unread`. Raises PlanError."""
    index = ModelIndex.read(path)
    read = [part.name for part in index.parts if part.name not in unread]
    sizes = [_tensors_of(file)[:2] for name in read for file in _weights(path / name, variant)]
    return ModelFolder(
        path=path,
        pipeline=index.pipeline if isinstance(index.pipeline, str) else ".".join(index.pipeline),
        weight_bytes=sum(size for size, _ in sizes),
        num_weights=sum(count for _, count in sizes),
        absent=index.absent,
    )


def no_config(folder: Path) -> PlanError:
    """Return the error for a network's folder without its configuration."""
    way = f"hf download ORG/MODEL {folder.name}/{CONFIG} --local-dir {folder.parent}"
    return PlanError(f"{folder} has no {CONFIG}, which describes the network: fetch it from the model's source ({way})")


def refuse_missing_configs(path: Path, besides: Collection[str]) -> None:
    """Raise PlanError for a component that has weights and no configuration, unless it is among `besides`."""
    for folder in (path / part.name for part in ModelIndex.read(path).parts if part.name not in besides):
        if not (folder / CONFIG).is_file() and any(folder.glob("*.safetensors")):
            raise no_config(folder)


def lacks_files(path: Path, variant: str | None = None, *, besides: Collection[str] = ()) -> bool:
    """Whether components of a model folder, or some of their weight files, have still to be fetched.

    `besides`: components that are not loaded from the folder. Raises PlanError for an index that is invalid.
    """
    for part in (part for part in ModelIndex.read(path).parts if part.name not in besides):
        names = [file.name for file in _weights(path / part.name, variant)]
        counts = [int(count) for name in names for count in re.findall(r"-of-(\d+)\.", name)]
        if not (path / part.name).is_dir() or (counts and len(counts) < counts[0]):
            return True
    return False


def _weights(folder: Path, variant: str | None) -> list[Path]:
    refuse_other_weights(folder)
    files = sorted(folder.glob("*.safetensors"))
    chosen = _of_variant(files, variant) or [file for file in files if not re.search(OTHER_VARIANT, file.name)]
    if not chosen and pickles_in(folder):
        raise PlanError(f"{folder} has weights only as pickles, which can run code: convert them to safetensors first")
    if not chosen and files:
        raise PlanError(f"{folder} has {files[0].name}, but not that without a variant: pass variant=, such as 'fp16'")
    if not chosen and (folder / CONFIG).is_file() and _has_weights(folder):
        raise PlanError(f"{folder} has a {CONFIG} but no safetensors weights")
    return chosen


def _of_variant(files: Sequence[Path], variant: str | None) -> list[Path]:
    """Return the files of a variant: `model.fp16.safetensors`, or its shards by the new names, else by the old ones.

    As diffusers and transformers read them: `model.fp16-00001-of-00002.safetensors`; older versions wrote
    `model-00001-of-00002.fp16.safetensors`.
    """
    if variant is None:
        return []
    new = re.compile(rf"\.{re.escape(variant)}({SHARD})?\.safetensors$")
    found = [file for file in files if new.search(file.name)]
    shards = [file for file in found if re.search(SHARD, file.name)]
    old = [file for file in shards if file.name.endswith(f".{variant}.safetensors")]
    return found if len(old) in (0, len(found)) else [file for file in found if file not in old]


def pickles_in(folder: Path) -> list[str]:
    """Return the names of the pickles in a folder."""
    return sorted(file.name for pattern in PICKLES for file in folder.glob(pattern))


def _has_weights(folder: Path) -> bool:
    config = read_object(folder / CONFIG)
    return "_class_name" in config or "architectures" in config


def refuse_other_weights(folder: Path) -> None:
    """Raise PlanError if an index or a configuration names weight files elsewhere or not in safetensors."""
    config = folder / CONFIG
    named = read_object(config).get("transformers_weights") if config.is_file() else None
    if named is not None and not re.fullmatch(r"[^/\\]+\.safetensors(\.index\.json)?", str(named)):
        raise PlanError(f"{config} names {named!r:.80}, which is no safetensors file of this folder")
    for index in folder.glob("*.safetensors.index*.json"):
        shards = read_object(index, limit=MAX_HEADER).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
            raise PlanError(f"{index} has no valid weight_map: fetch it again")
        for name in set(shards.values()):
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise PlanError(f"{index} names {name!r:.80}, which is no safetensors file of this folder")


def floating_dtypes(path: Path, variant: str | None = None) -> frozenset[str]:
    """Return the floating-point dtypes of a local model folder's weights, as in torch. Raises PlanError."""
    parts = ModelIndex.read(path).parts
    tensors = [each for part in parts for file in _weights(path / part.name, variant) for each in _tensors_of(file)[2]]
    return frozenset(FLOATING[each["dtype"]] for each in tensors if each.get("dtype") in FLOATING)


def _tensors_of(file: Path) -> tuple[int, int, list[Any]]:
    """Return bytes, the number of weights, and what the header has of each tensor.

    Raises PlanError for a safetensors file that is incomplete.
    """
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > min(size, MAX_HEADER):
                raise ValueError(f"a header of {length} bytes, of at most {min(size, MAX_HEADER)}")
            header = object_of(stream.read(length), str(file))
        tensors = [entry for name, entry in header.items() if name != "__metadata__"]
        end = 8 + length + max((entry["data_offsets"][1] for entry in tensors), default=0)
        count = sum(math.prod(entry["shape"]) for entry in tensors)
        if not 0 <= count <= 8 * end:
            raise ValueError("more weights than there are bits")
    except (OSError, struct.error, ValueError, LookupError, AttributeError, TypeError, MemoryError) as error:
        raise PlanError(f"{file} is not a whole safetensors file: its header cannot be read. Fetch it again") from error
    if end != size:
        raise PlanError(f"{file} should have {end} bytes but has {size}: fetch it again")
    return size, count, tensors


def needed_bytes(folder: ModelFolder | None, options: Mapping[str, Any]) -> int:
    """Return the bytes of the weights when loaded with `options`; 0 if the model is unknown."""
    if folder is None:
        return 0
    dtype = str(options.get("dtype") or options.get("torch_dtype") or "float32").removeprefix("torch.")
    return folder.num_weights * BYTES_PER_WEIGHT[dtype] if dtype in BYTES_PER_WEIGHT else folder.weight_bytes


def check_memory(
    model: str,
    folder: ModelFolder | None,
    options: Mapping[str, Any],
    devices: Sequence[str],
    plan: Plan | None = None,
    plan_that_fits: Callable[[], str] = str,
) -> None:
    """Raise PlanError if the weights that all ranks have in the host's memory at a time exceed what is free there.

    A rank on the CPU keeps its weights there, and one on a GPU has them there while it loads: in the dtype of the files
    they are pages of the files, which all ranks share; in another dtype each rank has a copy of its own. With weights
    that `plan` divides, the ranks of an image have one copy together, on the CPU or hosted. `plan_that_fits`: advice to
    use such a plan, or nothing.
    """
    need, free = needed_bytes(folder, options), free_memory()
    on_cpu = sum(device == "cpu" for device in devices)
    on_gpus = sum(map(is_accelerator, devices)) if folder is not None and _is_converted(folder, need) else 0
    if plan is not None and plan.weights != "whole":
        on_cpu, on_gpus = plan.data if on_cpu or plan.weights == "hosted" else 0, 0
    ranks = on_cpu or on_gpus
    if free is None or need * ranks <= free:
        return
    fitting = free // need
    way_out = f"use at most {fitting} of them or a smaller dtype" if fitting else "use a smaller dtype"
    fitting_plan = "" if on_gpus else plan_that_fits()
    if on_gpus:
        way_out = f"{way_out}, best that of the files, which is not converted"
    elif not fitting_plan and len(devices) > 1 and fitting and (plan is None or plan.weights == "whole"):
        way_out = f"{way_out}, or divide the weights between them (weights=sharded in the plan)"
    raise PlanError(
        f"{ranks} {'GPU' if on_gpus else 'CPU'} {'rank needs' if ranks == 1 else 'ranks need'} about "
        f"{readable_bytes(need * ranks)} {'of host memory to convert' if on_gpus else 'for'} the weights of {model}, "
        f"but only {readable_bytes(free)} are free: {fitting_plan}{way_out}"
    )


def _is_converted(folder: ModelFolder, need: int) -> bool:
    """Whether weights that take `need` bytes are wider or narrower than in their files, of which headers are a part."""
    return not 0.7 * folder.weight_bytes < need < 1.5 * folder.weight_bytes
