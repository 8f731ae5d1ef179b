"""The folder of a video model: one that is here, one that comes with the package, or a repository of the hub."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from patchpar.errors import PlanError
from patchpar.models.files import resolve_model
from patchpar.models.hub import OPTIONS, fetched, no_folder

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


def _downloaded(name: str, options: Mapping[str, Any], unread: Collection[str]) -> Path:
    unwanted = [f"{part}/*.safetensors*" for part in unread]
    folder = fetched(name, WANTED, options, unwanted=unwanted, subject=no_folder(name))
    if not (folder / "model_index.json").is_file():
        raise PlanError(
            f"{name} has no model_index.json, so it is no pipeline: if it has a checkpoint of the transformer alone, "
            "download that and use `patchpar convert`"
        )
    return folder
