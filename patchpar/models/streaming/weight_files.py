"""Reading of released weights of a transformer, or of a LoRA: from safetensors, or from a pickle of tensors only.

They may have the names of Wan's own code, which models distilled from it keep.
"""

import pickle
import re
import zipfile
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from patchpar.errors import PlanError
from patchpar.models.files import PICKLES

NAMED = re.compile(r"(?:GLOBAL|class) ([\w.]+\w)")
"""What torch names of a pickle that it does not read."""
SUFFIXES = tuple(pattern.removeprefix("*") for pattern in PICKLES)
PREFIXES = ("base_model.model.", "transformer.", "model.", "diffusion_model.")
"""What checkpoints, and LoRAs of PEFT and diffusers, put before the names."""
WRAPPER = "_fsdp_wrapped_module."
"""What torch's FSDP puts into the names of what it has trained."""
ONCE = "give a checkpoint that has each weight once"
ORIGINAL = "blocks.0.self_attn.q.weight"
OWN = ("self_attn", "cross_attn", "ffn.0", "ffn.2", "time_embedding", "text_embedding", "time_projection", "head.head")
"""Parts of names that Wan's own code has and diffusers has not."""


def read_entries(file: Path) -> dict[str, Any]:
    """Return the entries of a file: tensors, or dictionaries of tensors; or the tensors of a folder's safetensors.

    Raises PlanError.
    """
    shards = sorted(file.glob("*.safetensors")) if file.is_dir() else []
    if shards:
        return _joined(file, {shard.name: read_entries(shard) for shard in shards})
    if file.is_dir():
        raise PlanError(f"{file} has no .safetensors: give a checkpoint, or the folder that has its .safetensors")
    if not file.is_file():
        raise PlanError(f"{file} is no file: give a checkpoint in .safetensors or {', '.join(SUFFIXES)}")
    try:
        found = _loaded(file)
    except pickle.UnpicklingError as error:
        raise PlanError(f"{file} {_unread(error)}: use a file of tensors only, such as .safetensors") from error
    except (OSError, RuntimeError, SafetensorError, ValueError, EOFError) as error:
        raise PlanError(f"{file} cannot be read as a checkpoint: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise PlanError(f"{file} holds a {type(found).__name__}, but a checkpoint is a dictionary of weights by name")
    return found


def _loaded(file: Path) -> Any:
    """What a file holds. Raises PlanError for another kind of file, and the errors of torch and safetensors."""
    if file.suffix == ".safetensors":
        return dict(load_file(file))
    if file.suffix not in SUFFIXES:
        raise PlanError(f"{file}: {file.suffix or 'no suffix'} is no checkpoint; give .safetensors or .pt")
    is_archive = zipfile.is_zipfile(file)  # older versions of torch wrote others, which cannot be mapped into memory
    return torch.load(file, map_location="cpu", weights_only=True, mmap=is_archive)


def _unread(error: pickle.UnpicklingError) -> str:
    """Why torch reads no tensors from a file, in words of our own: torch's way out is to run what it holds."""
    if names := NAMED.findall(str(error)):
        return f"holds more than tensors ({', '.join(names)}), which could run code, so that it is not read"
    return "cannot be read as a checkpoint, as it is none of torch, or holds more than tensors"


def _joined(folder: Path, by_file: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The entries of all files. Raises PlanError if two of them have weights of one name."""
    entries: dict[str, Any] = {}
    for file, found in by_file.items():
        if twice := entries.keys() & found.keys():
            raise PlanError(
                f"{folder / file} has weights that another file there has too: {first_names(twice)}. Give the file "
                "that is meant"
            )
        entries |= found
    return entries


def entry_of(entries: Mapping[str, Any], names: Collection[str]) -> str:
    """Return the first of `names` that is an entry with weights; empty if the entries are the weights themselves."""
    return next((name for name in names if isinstance(entries.get(name), Mapping)), "")


def tensors_of(file: Path, entries: Mapping[str, Any], entry: str) -> dict[str, Tensor]:
    """Return the tensors of an entry, or all of them if it is empty, of any shapes. Raises PlanError."""
    found = entries[entry] if entry else entries
    if not all(isinstance(x, Tensor) for x in found.values()):
        others = sorted(str(name) for name, x in found.items() if not isinstance(x, Tensor))[:4]
        raise PlanError(f"{file} has no weights of a transformer by name, but {', '.join(others)}")
    return dict(found)


def first_names(names: Iterable[str]) -> str:
    """Return the first three names, and how many others there are, for a message."""
    listed = sorted(names)
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")


def without_prefix(name: str) -> str:
    """Return the name of a weight inside the transformer."""
    name = name.replace(WRAPPER, "")
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    return name


def are_original(names: Collection[str]) -> bool:
    """Whether these are names of Wan's own code."""
    return any(without_prefix(name) == ORIGINAL for name in names)


def without_prefixes(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights, each of any shape, by names inside the transformer. Raises PlanError where two have the same."""
    names = dict[str, list[str]]()
    for name in weights:
        names.setdefault(without_prefix(name), []).append(name)
    if twice := [" and ".join(sorted(each)) for each in names.values() if len(each) > 1]:
        raise PlanError(f"{first_names(twice)} are one weight: {ONCE}")
    return {plain: weights[name] for plain, (name,) in names.items()}


def as_diffusers(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights, each of any shape, under the names of diffusers' WanTransformer3DModel, by diffusers' converter.

    Raises PlanError for a weight under two names, one of which would replace the other.
    """
    from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers

    plain = without_prefixes(weights)
    if not are_original(plain):
        return plain
    plain = {name: x.detach() for name, x in plain.items()}  # each an object of its own, also where two are tied
    converted: dict[str, Tensor] = convert_wan_transformer_to_diffusers(dict(plain))  # which empties what it gets
    if len(converted) < len(plain):
        kept = {id(x) for x in converted.values()}
        lost = first_names(name for name, x in plain.items() if id(x) not in kept)
        raise PlanError(f"of {lost} there is another one by its name in diffusers, or in Wan's own code: {ONCE}")
    return converted


def diffusers_modules(names: Collection[str]) -> dict[str, str]:
    """Return the names of modules in diffusers' WanTransformer3DModel, by the given ones, of diffusers or of Wan."""
    plain = {name: without_prefix(name) for name in names}
    return {name: _renamed(bare) if any(part in bare for part in OWN) else bare for name, bare in plain.items()}


def _renamed(module: str) -> str:
    from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers

    (renamed,) = convert_wan_transformer_to_diffusers({f"{module}.weight": torch.empty(0)})
    return str(renamed).removesuffix(".weight")
