"""A released checkpoint of a block-causal transformer made a folder that can be streamed."""

import json
import os
import pickle
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from patchpar.errors import PlanError
from patchpar.models.files import PICKLES
from patchpar.stream.causal.checkpoint import transformer_of
from patchpar.stream.causal.model_folder import LOADED_BY_US
from patchpar.stream.causal.original_names import as_diffusers
from patchpar.stream.config import CONFIG, StreamConfig
from patchpar.stream.families import family_of
from patchpar.stream.hub import local_folder
from patchpar.stream.model_index import HIGH_NOISE

SUFFIXES = tuple(pattern.removeprefix("*") for pattern in PICKLES)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertedModel:
    """`entry`: the name under which the checkpoint had the weights, empty if it has nothing else."""

    folder: Path
    family: str
    entry: str
    base: Path
    num_weights: int
    config: StreamConfig


def convert_checkpoint(
    checkpoint: str | Path, folder: str | Path, *, base: str | Path | None = None, family: str | None = None
) -> ConvertedModel:
    """Write a folder for StreamingPipeline from the weights of a transformer, in safetensors or a pickle of tensors.

    `base`: a WanPipeline with the other components and the transformer's config.json, by default that of the family.
    `family`: one of FAMILIES; None where the checkpoint says what it is. Weights keep their dtype. Raises PlanError;
    UnsupportedModel for weights that do not match.
    """
    source, target = Path(checkpoint).expanduser(), Path(folder).expanduser().absolute()
    if target.exists():
        raise PlanError(f"{target} is there already: give a new folder")
    entries = _read(source)
    name, found = family_of(family, frozenset(entries))
    entry = next((each for each in found.weights if each in entries), "")
    weights = as_diffusers(_tensors(source, entries[entry] if entry else entries))
    path, _ = local_folder(base or found.base, {}, besides=LOADED_BY_US)
    transformer = transformer_of(path, HIGH_NOISE, weights)
    config = StreamConfig.of(found.stream)
    _write(path, target, transformer, found.stream)
    numbers = sum(x.numel() for x in weights.values())
    return ConvertedModel(folder=target, family=name, entry=entry, base=path, num_weights=numbers, config=config)


def _read(file: Path) -> dict[str, Any]:
    """Return the entries of a checkpoint: tensors, or dictionaries of tensors. Raises PlanError."""
    if not file.is_file():
        raise PlanError(f"{file} is no file: give a checkpoint in .safetensors or {', '.join(SUFFIXES)}")
    try:
        if file.suffix == ".safetensors":
            return dict(load_file(file))
        if file.suffix not in SUFFIXES:
            raise PlanError(f"{file}: {file.suffix or 'no suffix'} is no checkpoint; give .safetensors or .pt")
        found = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise PlanError(
            f"{file} holds more than tensors, which could run code, so that it is not read: {error}"
        ) from error
    except (OSError, RuntimeError, SafetensorError, ValueError, EOFError) as error:
        raise PlanError(f"{file} cannot be read as a checkpoint: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise PlanError(f"{file} holds a {type(found).__name__}, but a checkpoint is a dictionary of weights by name")
    return found


def _tensors(file: Path, entry: Any) -> dict[str, Tensor]:
    if not isinstance(entry, Mapping) or not all(isinstance(x, Tensor) for x in entry.values()):
        others = sorted(str(name) for name, x in dict(entry).items() if not isinstance(x, Tensor))[:4]
        raise PlanError(f"{file} has no weights of a transformer by name, but {', '.join(others) or 'something else'}")
    return dict(entry)


def _write(base: Path, target: Path, transformer: WanTransformer3DModel, stream: Mapping[str, Any]) -> None:
    """Write the folder under another name first, so that one that is there is whole. Raises PlanError."""
    partial = target.with_name(f".{target.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(base, partial, copy_function=_link_or_copy, ignore=_other_weights(base))
        transformer.save_pretrained(partial / HIGH_NOISE, safe_serialization=True)
        (partial / CONFIG).write_text(json.dumps(stream, indent=1) + "\n")
        partial.rename(target)
    except OSError as error:
        raise PlanError(f"{target} cannot be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _other_weights(base: Path) -> Any:
    """What is not copied: the transformer of the base model, which the checkpoint replaces."""
    return lambda folder, names: [HIGH_NOISE] if Path(folder) == base else []


def _link_or_copy(source: str, target: str) -> None:
    """Link a file of the base model instead of copying gigabytes, where the file system can. Raises OSError."""
    try:
        os.link(os.path.realpath(source), target)
    except OSError:
        shutil.copy2(source, target)
