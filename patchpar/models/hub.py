"""Files of a repository of the hub: downloading them, and the model that they are in the cache of this machine."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from patchpar.errors import PlanError
from patchpar.models.files import ModelFolder, inspect_folder, lacks_files
from patchpar.models.model_index import INDEX

OPTIONS = ("cache_dir", "revision", "token", "proxies", "force_download", "local_files_only")
"""Those of from_pretrained that say how to download."""


def fetched(
    name: str,
    wanted: Sequence[str],
    options: Mapping[str, Any],
    *,
    unwanted: Sequence[str] = (),
    passed_on: Iterable[str] = OPTIONS,
    subject: str,
) -> Path:
    """Return a local folder with the wanted files of a repository, but for unwanted ones. Both are patterns.

    `subject`: of the message. Raises PlanError.
    """
    from huggingface_hub import snapshot_download

    passed = {option: options[option] for option in passed_on if options.get(option) is not None}
    passed |= {"ignore_patterns": [*unwanted]} if unwanted else {}
    try:
        return Path(snapshot_download(name, allow_patterns=[*wanted], **passed))
    except (OSError, ValueError) as error:
        raise not_fetched(subject, error) from error


def not_fetched(subject: str, error: Exception) -> PlanError:
    """Return the error for something of the hub that cannot be downloaded."""
    return PlanError(f"{subject} could not be downloaded from the hub: {error}")


def no_folder(name: str) -> str:
    """Return the subject of the message for a model."""
    return f"{name!r} is no folder here, and as a name it"


def cached_model(name: str, options: Mapping[str, Any]) -> ModelFolder | None:
    """Return the checked folder that a hub name has in the cache; None where files are missing, or it is refused.

    `options`: of from_pretrained. Nothing is requested from the hub.
    """
    from huggingface_hub import try_to_load_from_cache

    where = {option: options.get(option) for option in ("cache_dir", "revision")}
    index = try_to_load_from_cache(name, INDEX, **where)
    if not isinstance(index, str):
        return None
    folder, variant = Path(index).parent, options.get("variant")
    try:
        return None if lacks_files(folder, variant, besides=options) else inspect_folder(folder, variant)
    except PlanError:  # which loading it says
        return None
