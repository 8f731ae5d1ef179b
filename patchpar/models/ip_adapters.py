"""IP-Adapters and their image encoders: checked, and read from safetensors only, from folders or the hub.

transformers reads an encoder as a pickle if there is no other file, and diffusers has no option against it. So the
encoder is located here as `load_ip_adapter` would locate it, downloaded without pickles if it is on the hub, checked
as a folder is, and passed on as that folder.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi

from patchpar.errors import PlanError
from patchpar.models.adapters import CONVERT, SUFFIX, check_source, check_strength, entry, several
from patchpar.models.files import HUB_NAME, PICKLES, path_of, pickles_in, refuse_other_weights
from patchpar.models.hub import fetched
from patchpar.models.remote_code import refuse_code_of_network

METHOD = "load_ip_adapter"
SOURCE = "pretrained_model_name_or_path_or_dict"
OWN_SOURCE = "image_encoder_pretrained_model_name_or_path"
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
"""Files that transformers looks for before a pickle."""
WITHOUT = "or give the pipeline an image encoder before"
OF_SD3 = "SD3IPAdapterMixin"
"""Mixin whose method takes `image_encoder_folder` as a folder or repository of its own."""
FOR_ENCODERS = ("cache_dir", "local_files_only")
"""Options that diffusers passes on when it loads an encoder."""
FOR_ADAPTERS = (*FOR_ENCODERS, "revision", "token", "force_download")

Given = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class IPAdapter:
    """An adapter that a call names. `source`: weights in memory, or the location of `subfolder`/`file`."""

    source: Any
    subfolder: Any
    file: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageEncoderSource:
    """A folder or hub repository, and the folder inside. `is_beside`: the method joins it to the adapter's location."""

    source: str
    inside: str
    is_beside: bool = False

    def __str__(self) -> str:
        return f"{self.source}/{self.inside}".rstrip("/")


def with_checked_sources(
    method: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return the arguments with which METHOD of a pipeline reads safetensors only; unchanged for other methods.

    Raises PlanError, before anything is read, for a pickle and for an encoder with code of its own.
    """
    owner: Any = getattr(method, "__self__", None)
    if owner is None or getattr(method, "__name__", "") != METHOD:
        return args, kwargs
    bound = inspect.signature(method).bind(*args, **kwargs)
    bound.apply_defaults()
    given: Given = bound.arguments
    options = given["kwargs"]
    check_strength(METHOD, options)
    adapters = _adapters(given)
    for adapter in adapters:
        if not isinstance(adapter.source, Mapping):
            check_source(METHOD, adapter.source, adapter.subfolder, adapter.file)
    encoder = _encoder(owner, given, adapters[0])
    if encoder is not None:
        _hand_over(given, encoder, _folder_of(encoder, options), adapters)
    return bound.args, bound.kwargs


def _adapters(given: Given) -> list[IPAdapter]:
    """Return the adapters as diffusers pairs the arguments: a single value applies to all."""
    sources, folders, files = (several(given[name]) for name in (SOURCE, "subfolder", "weight_name"))
    return [
        IPAdapter(source=entry(sources, number), subfolder=entry(folders, number), file=entry(files, number))
        for number in range(max(len(sources), len(files)))
    ]


def _encoder(owner: Any, given: Given, first: IPAdapter) -> ImageEncoderSource | None:
    """Return the encoder that the method would load; None if the pipeline has one or the call needs none."""
    if getattr(owner, "image_encoder", owner) is not None:
        return None
    if OWN_SOURCE in given:  # FLUX
        source, inside = given[OWN_SOURCE], given["image_encoder_subfolder"] or ""
        return None if source is None else ImageEncoderSource(source=str(source), inside=inside)
    folder = given.get("image_encoder_folder")
    if folder is None or isinstance(first.source, Mapping):
        return None
    inside = folder if "/" in folder else Path(first.subfolder or "", folder).as_posix()
    if any(base.__name__ == OF_SD3 for base in type(owner).__mro__):  # importing it is slow, and warns
        return ImageEncoderSource(source=inside, inside="")
    return ImageEncoderSource(source=str(first.source), inside=inside, is_beside=True)


def _folder_of(encoder: ImageEncoderSource, options: Mapping[str, Any]) -> Path:
    """Return a local folder with the encoder, checked."""
    here = path_of(encoder.source).absolute()
    if not here.is_dir() and (here.exists() or not HUB_NAME.fullmatch(encoder.source)):
        raise PlanError(f"{METHOD}: {encoder} is no folder here and no hub name, so no image encoder, {WITHOUT}")
    if not here.is_dir():
        wanted = [f"{encoder.inside}/{each}".lstrip("/") for each in ("*.json", f"*{SUFFIX}")]
        here = fetched(encoder.source, wanted, options, passed_on=FOR_ENCODERS, subject=_named(encoder.source))
    folder = here / encoder.inside
    if not any((folder / name).is_file() for name in WEIGHTS):
        pickles = pickles_in(folder)
        _refuse(encoder, pickles or _listed(encoder, options))
    refuse_other_weights(folder)
    refuse_code_of_network(folder)
    return folder


def _refuse(encoder: ImageEncoderSource, pickles: Sequence[str]) -> None:
    if pickles:
        raise PlanError(f"{METHOD}: the image encoder {encoder} has only {pickles[0]}, a pickle, {CONVERT}, {WITHOUT}")
    raise PlanError(f"{METHOD}: {encoder} has no {WEIGHTS[0]}, and so no image encoder, {WITHOUT}")


def _listed(encoder: ImageEncoderSource, options: Mapping[str, Any]) -> list[str]:
    """Return the pickles in the encoder's folder of a repository, for the message; none if the hub is unreachable."""
    if options.get("local_files_only") or Path(encoder.source).expanduser().is_dir():
        return []
    try:
        names: Iterable[Path] = map(Path, HfApi().list_repo_files(encoder.source))
    except Exception:  # noqa: BLE001  any error of the hub's library: only the message depends on it
        return []
    return sorted(
        name.name
        for name in names
        if name.parent == Path(encoder.inside) and any(name.match(pattern) for pattern in PICKLES)
    )


def _hand_over(given: Given, encoder: ImageEncoderSource, folder: Path, adapters: Sequence[IPAdapter]) -> None:
    """Make the method take the encoder from this folder, even if the hub has changed by then."""
    if OWN_SOURCE in given:
        given.update({OWN_SOURCE: str(folder), "image_encoder_subfolder": ""})
        return
    given["image_encoder_folder"] = str(folder)
    if encoder.is_beside:  # joined to a folder, an absolute path stays as it is
        given[SOURCE] = [_here(adapter, given["kwargs"]) for adapter in adapters]


def _here(adapter: IPAdapter, options: Mapping[str, Any]) -> Any:
    """Return an adapter's source as a local folder that has its file."""
    if isinstance(adapter.source, Mapping) or Path(adapter.source).is_dir():
        return adapter.source
    file = Path(adapter.subfolder or "", adapter.file).as_posix()
    return str(fetched(adapter.source, [file], options, passed_on=FOR_ADAPTERS, subject=_named(adapter.source)))


def _named(repository: str) -> str:
    return f"{METHOD}: {repository!r}"
