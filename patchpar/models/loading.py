"""Loading of all pipelines: from safetensors only, without code of their own, with a dtype, and prepared in a rank."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers import DiffusionPipeline
from packaging.version import Version
from safetensors import SafetensorError
from torch import nn

from patchpar.errors import PatchparError, PlanError, UnsupportedModel
from patchpar.models.files import ModelFolder, refuse_missing_configs, refuse_other_weights
from patchpar.models.hub import cached_model, no_folder, not_fetched
from patchpar.models.info import networks_of
from patchpar.models.model_index import ModelIndex
from patchpar.models.remote_code import refuse_code
from patchpar.shard.module_tree import modules_of

DTYPE_NAMES = ("torch_dtype", "dtype")
DTYPE_NAME = DTYPE_NAMES[Version(diffusers.__version__) >= Version("0.42.0")]
"""diffusers warns of the older name from that version on."""
MALFORMED = (AttributeError, ImportError, LookupError, OSError, RecursionError, SafetensorError, TypeError, ValueError)
"""Exceptions of diffusers and transformers for a folder with invalid files."""


def with_dtype(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of from_pretrained with the dtype, given as text or torch.dtype, as one under `DTYPE_NAME`."""
    kept = {name: value for name, value in options.items() if name not in DTYPE_NAMES}
    dtype = dtype_of(options)
    return kept if dtype is None else {**kept, DTYPE_NAME: dtype}


def dtype_of(options: Mapping[str, Any]) -> Any:
    """Return the dtype in options of from_pretrained, or those by component; None without one. Raises PlanError."""
    given = [options[name] for name in DTYPE_NAMES if options.get(name) is not None]
    dtype = given[-1] if given else None
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, (torch.dtype, Mapping)) and dtype is not None:
        raise PlanError(f"torch_dtype={dtype!r}: use a dtype of torch or its name, such as 'bfloat16'")
    return found


def load_pipeline(model: str, options: Mapping[str, Any], *, kind: Any = DiffusionPipeline) -> Any:
    """Return the pipeline of a folder or a hub name, of the class `kind` or the one its index names.

    `options`: of diffusers' from_pretrained. A repository of the hub is downloaded first and then checked as a folder,
    so that the checked files are those that are loaded. What transformers fills with random numbers, because no file
    has it, is the same on every rank. Raises PlanError, also for a network with weights that no file has.
    """
    folder = Path(model) if Path(model).is_dir() else _fetched(model, options, kind)
    refuse_code(folder, options)
    index = ModelIndex.read(folder)
    for part in index.parts:
        refuse_other_weights(folder / part.name)
    refuse_missing_configs(folder, options)
    named = getattr(diffusers, str(index.pipeline), None)
    if kind is DiffusionPipeline and isinstance(named, type) and issubclass(named, kind):
        kind = named  # else components of the folder replace given ones that the class may lack, as Wan's transformers
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)  # torch.manual_seed would seed those of all GPUs too
            pipe = kind.from_pretrained(str(folder), use_safetensors=True, **options)
    except PatchparError:
        raise
    except MALFORMED as error:
        raise PlanError(f"{model} cannot be loaded by diffusers: {type(error).__name__}: {error}") from error
    _refuse_missing_weights(model, {name: part for name, part in pipe.components.items() if name not in options})
    return pipe


def _refuse_missing_weights(model: str, parts: Mapping[str, Any]) -> None:
    """diffusers leaves weights that it does not find on the meta device, and calls fail later."""
    for name, part in parts.items():
        tensors = part.named_parameters() if isinstance(part, nn.Module) else ()
        missing = [path for path, tensor in tensors if tensor.is_meta]
        if missing:
            raise PlanError(
                f"{name} of {model} has no values for {len(missing)} of its weights ({', '.join(missing[:3])}...): its "
                "files are incomplete, or name them otherwise: download or convert them again"
            )


def fetch_model(name: str, options: Mapping[str, Any]) -> ModelFolder | None:
    """Return the checked folder of a hub name whose files are fetched now; None where it is refused when it is loaded.

    `options`: of from_pretrained. Raises PlanError for files that cannot be fetched.
    """
    _fetched(name, {key: value for key, value in with_dtype(options).items() if key != "task"}, DiffusionPipeline)
    return cached_model(name, options)


def _fetched(name: str, options: Mapping[str, Any], kind: Any) -> Path:
    try:
        return Path(kind.download(name, use_safetensors=True, **options))
    except (OSError, ValueError) as error:
        raise not_fetched(no_folder(name), error) from error


def for_task(pipe: Any, task: str | None) -> Any:
    """Return the pipeline of the same networks for `task`; itself for None. Raises UnsupportedModel if none exists.

    `task`: "image-to-image" or "inpainting".
    """
    if task is None:
        return pipe
    from diffusers import AutoPipelineForImage2Image, AutoPipelineForInpainting  # slow: imports every such pipeline

    try:
        return (AutoPipelineForInpainting if task == "inpainting" else AutoPipelineForImage2Image).from_pipe(pipe)
    except ValueError as error:
        raise UnsupportedModel(
            f"diffusers has no pipeline of task {task!r} for a {type(pipe).__name__}: use another model"
        ) from error


def prepare_pipeline(pipe: Any) -> None:
    """Register what transformers models can record (hidden states), as their constructors do once per process.

    Without it an unpickled text encoder returns no hidden states. Needed for transformers 5 and later.
    """
    registry = getattr(transformers.modeling_utils, "_CAN_RECORD_REGISTRY", None)
    if registry is None:
        return
    by_name = type(registry) is dict  # of classes, in older versions
    for module in (module for network in networks_of(pipe).values() for module in modules_of(network)):
        if isinstance(module, transformers.PreTrainedModel):
            registry[str(type(module)) if by_name else module] = module._can_record_outputs
