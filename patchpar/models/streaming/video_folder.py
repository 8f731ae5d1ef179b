"""The folder of a video model, also one of the hub, and what its configuration files say without its weights."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from patchpar.errors import PlanError
from patchpar.models.files import HUB_NAME, STREAM_CONFIG, path_of, resolve_model
from patchpar.models.hub import OPTIONS, fetched, no_folder
from patchpar.models.model_index import INDEX
from patchpar.plan.json_fields import number
from patchpar.plan.json_files import read_object

HIGH_NOISE, LOW_NOISE = "transformer", "transformer_2"
"""The denoisers of a pipeline. Wan 2.2 has one for each range of noise levels, other models have the first only."""
CONFIG = STREAM_CONFIG
SELF_FORCING = "SelfForcingFlowMatchScheduler"
"""The scheduler that FastVideo writes into such folders, as in wlsaidhi/SFWan2.1-T2V-1.3B-Diffusers."""
SCHEDULER = "scheduler/scheduler_config.json"
LTX = "LTXVideoTransformer3DModel"
WANTED = ("*.json", "*/*.json", "*/*.safetensors", "*/*.model", "*/*.txt", "*.png", "*.jpg")
"""Configurations, weights in the components' folders, tokenizers and reference images: no pickles and no code."""


def local_folder(
    model: str | Path, options: Mapping[str, Any], *, besides: Collection[str] = (), unread: Collection[str] = ()
) -> tuple[Path, dict[str, Any]]:
    """Return a checked folder with the model and the options to load it with.

    A hub name is downloaded, without pickles, code and the weights of components `unread`, and then checked as a folder
    is. `besides`, `unread`: see resolve_model. Raises PlanError.
    """
    path, known, folder = resolve_model(model, options, besides=besides, unread=unread)
    if folder is None:
        rest = {name: value for name, value in known.items() if name not in OPTIONS}
        path, known, _ = resolve_model(_downloaded(path, known, unread), rest, besides=besides, unread=unread)
    return Path(path), known


def is_block_causal(model: str | Path) -> bool:
    """Whether a folder, or a repository of the hub, says how it is streamed; only these facts of it are downloaded.

    It has stream.json, or the scheduler of Self-Forcing. Raises PlanError.
    """
    folder = path_of(model)
    if not folder.exists() and isinstance(model, str) and HUB_NAME.fullmatch(model):
        folder = fetched(model, (INDEX, CONFIG, SCHEDULER), {}, subject=no_folder(model))
    return (folder / CONFIG).is_file() or is_self_forcing(folder)


def is_self_forcing(folder: Path) -> bool:
    """Whether a folder has the scheduler of Self-Forcing (arXiv:2506.08009). Raises PlanError."""
    file = folder / SCHEDULER
    return file.is_file() and read_object(file).get("_class_name") == SELF_FORCING


def _downloaded(name: str, options: Mapping[str, Any], unread: Collection[str]) -> Path:
    unwanted = [f"{part}/*.safetensors*" for part in unread]
    folder = fetched(name, WANTED, options, unwanted=unwanted, subject=no_folder(name))
    if not (folder / "model_index.json").is_file():
        raise PlanError(
            f"{name} has no model_index.json, so it is no pipeline: if it has a checkpoint of the transformer alone, "
            "download that and use `patchpar convert`"
        )
    return folder


def read_index(folder: Path) -> dict[str, Any]:
    """Read model_index.json. Raises PlanError."""
    file = folder / "model_index.json"
    if not file.is_file():
        raise PlanError(f"{folder} has no model_index.json: give the folder of a WanPipeline")
    return read_object(file)


def transformer_class(folder: Path) -> str:
    """Return the name of the transformer's class; empty if there is none. Raises PlanError."""
    part = read_index(folder).get(HIGH_NOISE)
    return str(part[-1]) if isinstance(part, list) and part else ""


def low_noise_below(folder: Path) -> float | None:
    """Return the noise level, 0 to 1, below which the second transformer is used, if any. Raises PlanError."""
    index = read_index(folder)
    part = index.get(LOW_NOISE)
    if not isinstance(part, list) or not part or part[-1] is None:
        return None
    boundary = index.get("boundary_ratio")
    if boundary is None:
        raise PlanError(f"{folder / 'model_index.json'} has two transformers, but no boundary_ratio between them")
    return number("boundary_ratio", boundary, 0, 1)
