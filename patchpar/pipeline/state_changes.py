"""Which methods of a pipeline and its networks restarted workers have to repeat, by name.

encode_prompt, vae.decode, get_..., prepare_...     compute only: not repeated
set_..., enable_... and disable_...                 the last call is repeated
load_lora_weights ... unload_lora_weights           the second undoes the first
load_lora_weights(adapter_name=...), set_adapters, delete_adapters      calls about deleted adapters are dropped
any other method                                    repeated as it was
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from patchpar.launch.hang_detection import LOAD_SECONDS
from patchpar.launch.replay import CallEffects, NamedAdapters
from patchpar.models.files import path_of

COMPUTES = frozenset(
    {
        *("blend", "build", "check", "convert", "decode", "denormalize", "encode", "estimate", "forward", "generate"),
        *("get", "has", "interpolate", "is", "lora_state_dict", "normalize", "num", "numpy", "pack", "pad", "patchify"),
        *("postprocess", "preprocess", "prepare", "process", "sample", "score", "state", "tile", "tiled", "tokenize"),
        *("trim", "truncate", "unpatchify", "unscale", "upsample"),
    }
)
"""Methods that do not change networks, by name or by its first word."""
CHANGES_AFTER_ALL = frozenset({"prepare_unet", "encode_kv_cache"})
SETS = frozenset({"set", "enable", "disable"})
LORA = (
    *("load_lora_weights", "load_lora_adapter", "load_attn_procs", "unload_lora", "set_lora_device"),
    *("load_lora_into_unet", "load_lora_into_transformer", "load_lora_into_text_encoder"),
    *("add_adapter", "set_adapter", "set_adapters", "delete_adapters", "enable_adapters", "disable_adapters"),
    *("enable_lora", "disable_lora"),
)
INVERTS, OF_ONE_ENCODER = "load_textual_inversion", frozenset({"tokenizer", "text_encoder"})
"""A method, and its arguments with which only a call with them too undoes it: there may be a second encoder."""
KINDS = {
    **dict.fromkeys(LORA, "lora"),
    "fuse_lora": "fused",
    "load_ip_adapter": "image prompt",
    "set_ip_adapter_scale": "image prompt",
    INVERTS: "inversion",
}
UNDOES = {
    "unload_lora_weights": CallEffects(undoes="lora", unless=("fused",)),
    "unfuse_lora": CallEffects(undoes="fused"),
    "unload_ip_adapter": CallEffects(undoes="image prompt"),
    "unload_textual_inversion": CallEffects(undoes="inversion"),
}
"""Methods of the pipeline that undo all calls of a kind, when called without arguments."""

NAMES_ADAPTERS: Mapping[str, tuple[Literal["adds", "selects", "deletes"], int, str]] = {
    "load_lora_weights": ("adds", 1, "adapter_name"),
    "set_adapters": ("selects", 0, "adapter_names"),
    "delete_adapters": ("deletes", 0, "adapter_names"),
}
"""Methods of the pipeline that name adapters: effect, and position and name of the argument with the names."""
ADDS_OR_HIDES = ("fused", "image prompt")
"""Kinds of calls after which the present adapters are unknown: IP-Adapters may add their own."""


def change_of(
    path: str, args: Sequence[Any], kwargs: Mapping[str, Any], *, is_fresh: bool = True
) -> CallEffects | None:
    """Return what a call of the method `path` ("set_adapters", "vae.enable_tiling") changes; None if it only computes.

    `is_fresh`: the pipeline was loaded from files; one that was passed in memory may have had adapters before.
    """
    owner, _, name = path.rpartition(".")
    parts = _adapters_of(path, args, kwargs) if is_fresh else None
    word, _, rest = name.partition("_")
    if (word in COMPUTES or name in COMPUTES) and name not in CHANGES_AFTER_ALL:
        return None
    if path in UNDOES and not args and not kwargs:
        undo = UNDOES[path]
        return undo if is_fresh else replace(undo, kind=undo.undoes)
    kind = None if name == INVERTS and OF_ONE_ENCODER & kwargs.keys() else KINDS.get(name)
    change = CallEffects(kind=kind, parts=parts, unless=ADDS_OR_HIDES if parts else ())
    if word not in SETS:
        return change
    what = name if word == "set" else rest
    given = frozenset[str | int]((*range(len(args)), *kwargs))
    return replace(change, sets=f"{owner}.{what}".lstrip("."), given=given)


def _adapters_of(path: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> NamedAdapters | None:
    """Return the adapters that a call of the pipeline adds, selects or deletes; None if it does not name them."""
    if path not in NAMES_ADAPTERS:
        return None
    does, index, name = NAMES_ADAPTERS[path]
    named = args[index] if len(args) > index else kwargs.get(name)
    names = [named] if isinstance(named, str) else named
    if not isinstance(names, (list, tuple)) or not names or not all(isinstance(each, str) for each in names):
        return None
    without = partial(_selecting, path, list(names), args[1:], kwargs) if does == "selects" else None
    return NamedAdapters(does=does, names=frozenset(names), without=without)


def _selecting(
    path: str, names: list[str], rest: Sequence[Any], kwargs: Mapping[str, Any], gone: frozenset[str]
) -> tuple[Any, ...]:
    """Return the arguments of `apply` for a call of set_adapters without the adapters `gone` and their weights."""
    weights = rest[0] if rest else kwargs.get("adapter_weights")
    kept = [index for index, name in enumerate(names) if name not in gone]
    if isinstance(weights, (list, tuple)):
        weights = [weights[index] for index in kept]
    return path, ([names[index] for index in kept], weights), {}


def engine_call(
    path: str, args: Sequence[Any], kwargs: Mapping[str, Any], *, is_fresh: bool
) -> tuple[list[Any], dict[str, Any]]:
    """Return arguments and options of `Executor.call` that run the method `path` on every rank."""
    whole, named = with_whole_paths(path, args, kwargs)
    change = change_of(path, whole, named, is_fresh=is_fresh)
    return ["apply", path, whole, named], {"replay": change or False, "expected": LOAD_SECONDS if change else 0.0}


def with_whole_paths(
    path: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a method's arguments with absolute paths, since later workers may have another working directory.

    Paths are Path objects, and strings that name what a `load_` method loads, if such a file or folder exists here.
    Raises PlanError for one that cannot be.
    """
    loads = path.rpartition(".")[2].startswith("load_")
    whole = [_whole(value, loads and not index) for index, value in enumerate(args)]
    return tuple(whole), {
        name: _whole(value, loads and ("pretrained_model" in name or name == "peft_model_id"))
        for name, value in kwargs.items()
    }


def _whole(value: Any, names_files: bool) -> Any:
    if isinstance(value, Path):
        return path_of(value).absolute()
    if names_files and isinstance(value, (list, tuple)):
        return type(value)(_whole(each, True) for each in value)
    if names_files and isinstance(value, str) and path_of(value).exists():
        return str(path_of(value).absolute())
    return value
