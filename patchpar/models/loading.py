"""Loading of all pipelines: from safetensors only, without code of their own, with clear errors."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diffusers import DiffusionPipeline
from safetensors import SafetensorError

from patchpar.errors import PatchparError, PlanError
from patchpar.models.files import refuse_other_weights
from patchpar.models.model_index import ModelIndex
from patchpar.models.remote_code import refuse_code

MALFORMED = (AttributeError, ImportError, LookupError, OSError, RecursionError, SafetensorError, TypeError, ValueError)
"""Exceptions of diffusers and transformers for a folder with invalid files."""


def load_pipeline(model: str, options: Mapping[str, Any], *, kind: Any = DiffusionPipeline) -> Any:
    """Return the pipeline of a folder or a hub name, of the class `kind` or the one its index names.

    `options`: of diffusers' from_pretrained. A repository of the hub is downloaded first and then checked as a folder,
    so that the checked files are those that are loaded. Raises PlanError.
    """
    folder = Path(model) if Path(model).is_dir() else _fetched(model, options, kind)
    refuse_code(folder, options)
    for part in ModelIndex.read(folder).parts:
        refuse_other_weights(folder / part.name)
    try:
        return kind.from_pretrained(str(folder), use_safetensors=True, **options)
    except PatchparError:
        raise
    except MALFORMED as error:
        raise PlanError(f"{model} cannot be loaded by diffusers: {type(error).__name__}: {error}") from error


def _fetched(name: str, options: Mapping[str, Any], kind: Any) -> Path:
    try:
        return Path(kind.download(name, use_safetensors=True, **options))
    except (OSError, ValueError) as error:
        raise PlanError(
            f"{name!r} is no folder here, and as a name it could not be downloaded from the hub: {error}"
        ) from error
