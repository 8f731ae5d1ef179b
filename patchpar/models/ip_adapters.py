"""IP-Adapters and the encoders of their images: read from safetensors, out of folders or the hub, looked at before.

transformers reads an encoder as a pickle where it finds nothing else, and diffusers cannot tell it otherwise. So the
encoder is found here as `load_ip_adapter` would find it, fetched without pickles if it is on the hub, looked at as a
folder is, and handed on as that folder.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, snapshot_download

from patchpar.errors import PlanError
from patchpar.models.adapters import CONVERT, SUFFIX, check_source, check_strength, entry, several
from patchpar.models.files import HUB_NAME, PICKLES, refuse_other_weights
from patchpar.models.remote_code import refuse_code_of_network

METHOD = "load_ip_adapter"
SOURCE = "pretrained_model_name_or_path_or_dict"
OWN_SOURCE = "image_encoder_pretrained_model_name_or_path"
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
"""What transformers looks for before it looks for a pickle."""
WITHOUT = "or give the pipeline an image encoder before"
OF_SD3 = "SD3IPAdapterMixin"
"""Its method takes the encoder from the folder or repository that `image_encoder_folder` names by itself."""
FOR_ENCODERS = ("cache_dir", "local_files_only")
"""Options of the method that diffusers passes on when it loads an encoder."""
FOR_ADAPTERS = (*FOR_ENCODERS, "revision", "token", "force_download")

Given = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class IPAdapter:
    """One that a call names. `source`: weights in memory, or where the `file` is, in its folder `subfolder`."""

    source: Any
    subfolder: Any
    file: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageEncoderSource:
    """Where an image encoder is looked for: a folder here or a repository of the hub, and the folder in it.

    `is_beside`: the method joins this folder to where the adapter comes from.
    """

    source: str
    inside: str
    is_beside: bool = False

    def __str__(self) -> str:
        return f"{self.source}/{self.inside}".rstrip("/")


def looked_at(
    method: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """The arguments with which a method of a pipeline reads safetensors only; those of others than METHOD as they are.

    Raises PlanError, before anything is read, for a pickle and for an encoder that would have code of its own run.
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
    """As diffusers puts them together: what is named once is that of all."""
    sources, folders, files = (several(given[name]) for name in (SOURCE, "subfolder", "weight_name"))
    return [
        IPAdapter(source=entry(sources, number), subfolder=entry(folders, number), file=entry(files, number))
        for number in range(max(len(sources), len(files)))
    ]


def _encoder(owner: Any, given: Given, first: IPAdapter) -> ImageEncoderSource | None:
    """The encoder that the method would load; None where the pipeline has one, takes none, or is told to take none."""
    if getattr(owner, "image_encoder", owner) is not None:
        return None
    if OWN_SOURCE in given:  # as FLUX has it
        source = given[OWN_SOURCE]
        return (
            None
            if source is None
            else ImageEncoderSource(source=str(source), inside=given["image_encoder_subfolder"] or "")
        )
    folder = given.get("image_encoder_folder")
    if folder is None or isinstance(first.source, Mapping):
        return None
    inside = folder if "/" in folder else Path(first.subfolder or "", folder).as_posix()
    if any(base.__name__ == OF_SD3 for base in type(owner).__mro__):  # importing it is slow, and warns
        return ImageEncoderSource(source=inside, inside="")
    return ImageEncoderSource(source=str(first.source), inside=inside, is_beside=True)


def _folder_of(encoder: ImageEncoderSource, options: Mapping[str, Any]) -> Path:
    """A folder here with the encoder, which may be loaded."""
    here = Path(encoder.source).expanduser().absolute()
    if not here.is_dir() and (here.exists() or not HUB_NAME.fullmatch(encoder.source)):
        raise PlanError(f"{METHOD}: {encoder} is no folder here and no hub name, so no image encoder, {WITHOUT}")
    if not here.is_dir():
        wanted = [f"{encoder.inside}/{each}".lstrip("/") for each in ("*.json", f"*{SUFFIX}")]
        here = _fetched(encoder.source, wanted, options, FOR_ENCODERS)
    folder = here / encoder.inside
    if not any((folder / name).is_file() for name in WEIGHTS):
        pickles = sorted(file.name for pattern in PICKLES for file in folder.glob(pattern))
        _refuse(encoder, pickles or _listed(encoder, options))
    refuse_other_weights(folder)
    refuse_code_of_network(folder)
    return folder


def _refuse(encoder: ImageEncoderSource, pickles: Sequence[str]) -> None:
    if pickles:
        raise PlanError(f"{METHOD}: the image encoder {encoder} has only {pickles[0]}, a pickle, {CONVERT}, {WITHOUT}")
    raise PlanError(f"{METHOD}: {encoder} has no {WEIGHTS[0]}, and so no image encoder, {WITHOUT}")


def _listed(encoder: ImageEncoderSource, options: Mapping[str, Any]) -> list[str]:
    """Pickles that a repository has where the encoder should be, to name them; none where the hub cannot be asked."""
    if options.get("local_files_only") or Path(encoder.source).expanduser().is_dir():
        return []
    try:
        names: Iterable[Path] = map(Path, HfApi().list_repo_files(encoder.source))
    except Exception:  # noqa: BLE001  whatever a library of the hub's and its connections raise: only words depend on it
        return []
    return sorted(
        name.name
        for name in names
        if name.parent == Path(encoder.inside) and any(name.match(pattern) for pattern in PICKLES)
    )


def _hand_over(given: Given, encoder: ImageEncoderSource, folder: Path, adapters: Sequence[IPAdapter]) -> None:
    """Have the method take the encoder from this folder, whatever the hub has by then."""
    if OWN_SOURCE in given:
        given.update({OWN_SOURCE: str(folder), "image_encoder_subfolder": ""})
        return
    given["image_encoder_folder"] = str(folder)
    if encoder.is_beside:  # a folder named from the root stays what it is, if it is joined to a folder
        given[SOURCE] = [_here(adapter, given["kwargs"]) for adapter in adapters]


def _here(adapter: IPAdapter, options: Mapping[str, Any]) -> Any:
    """An adapter's source as a folder here that has its file."""
    if isinstance(adapter.source, Mapping) or Path(adapter.source).is_dir():
        return adapter.source
    file = Path(adapter.subfolder or "", adapter.file).as_posix()
    return str(_fetched(adapter.source, [file], options, FOR_ADAPTERS))


def _fetched(name: str, wanted: list[str], options: Mapping[str, Any], passed_on: Iterable[str]) -> Path:
    """A folder here with the files of a repository of the hub that are wanted."""
    passed = {option: options[option] for option in passed_on if options.get(option) is not None}
    try:
        return Path(snapshot_download(name, allow_patterns=wanted, **passed))
    except (OSError, ValueError) as error:
        raise PlanError(f"{METHOD}: {name!r} could not be had from the hub: {error}") from error
