"""A pipeline without weights: its networks from their configurations on the meta device, the rest from its files."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from diffusers import ModelMixin
from diffusers.pipelines.pipeline_loading_utils import simple_get_class_obj
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, PreTrainedModel

from patchpar.errors import PatchparError, PlanError, UnsupportedModel
from patchpar.models.dry_run.meta_mode import META
from patchpar.models.files import CONFIG, no_config
from patchpar.models.info import networks_of
from patchpar.models.loading import DTYPE_NAMES, MALFORMED, dtype_of, load_pipeline
from patchpar.models.model_index import ComponentEntry, ModelIndex
from patchpar.models.remote_code import refuse_code
from patchpar.plan.json_files import read_object

INITIALISERS = frozenset({"normal_", "uniform_", "trunc_normal_", "kaiming_uniform_", "xavier_uniform_"})
"""Of weights, by name: of torch.nn.init, and methods."""


class NotInitialised(TorchFunctionMode):
    """Leaves tensors as they are that would get random values, of which those on the meta device have none."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """See TorchFunctionMode."""
        if getattr(func, "__name__", "") in INITIALISERS:
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


def empty_pipeline(folder: Path, options: Mapping[str, Any]) -> Any:
    """Return the pipeline of a model folder as `from_pretrained` makes it with `options`, on the meta device.

    No weight is read, and none needs to be there. Raises PlanError, and UnsupportedModel for quantised networks.
    """
    refuse_code(folder, options)
    index = ModelIndex.read(folder)
    others = {name: value for name, value in options.items() if name not in (*DTYPE_NAMES, "variant")}
    dtype = dtype_of(options) or torch.float32  # that of diffusers
    networks = {
        part.name: empty_network(folder / part.name, part, dtype)
        for part in index.parts
        if others.get(part.name) is None
    }
    found = {name: network for name, network in networks.items() if network is not None}
    given = {**dict.fromkeys(index.absent), **others, **found, "low_cpu_mem_usage": False}  # no weights are loaded
    return load_pipeline(str(folder), given)


def emptied_copy(pipe: Any) -> Any:
    """Return a copy of a pipeline in memory whose networks are on the meta device. Its weights are not copied.

    Raises UnsupportedModel for quantised weights.
    """
    empty: dict[int, Any] = {}
    for network in networks_of(pipe).values():
        for x in (*network.parameters(), *network.buffers()):
            if type(x) not in (nn.Parameter, torch.Tensor):
                raise UnsupportedModel(f"{type(network).__name__} has weights of type {type(x).__name__}: quantised")
            like = torch.empty_like(x, device=META)
            empty[id(x)] = nn.Parameter(like, requires_grad=False) if isinstance(x, nn.Parameter) else like
    return deepcopy(pipe, empty)


def empty_network(folder: Path, part: ComponentEntry, dtype: torch.dtype) -> nn.Module | None:
    """Return a network in eval mode without weights; None for a component that is no network.

    Raises UnsupportedModel for a quantised one, whose weights are not those of its class, and PlanError for files that
    cannot be read.
    """
    _refuse_quantized(folder)
    try:
        kind = simple_get_class_obj(part.library, part.kind)
        with torch.device(META), NotInitialised():
            if issubclass(kind, (ModelMixin, PreTrainedModel)) and not (folder / CONFIG).is_file():
                raise no_config(folder)
            if issubclass(kind, ModelMixin):
                network: nn.Module = kind.from_config(kind.load_config(folder))
            elif issubclass(kind, PreTrainedModel):
                network = kind(AutoConfig.from_pretrained(folder, trust_remote_code=False))
            else:
                return None
    except PatchparError:
        raise
    except MALFORMED as error:
        raise PlanError(f"{folder} cannot be read by {part.library}: {type(error).__name__}: {error}") from error
    wide = _kept_in_float32(network, dtype)
    for name, parameter in nn.Module.to(network, dtype).named_parameters():  # theirs warns
        if wide.intersection(name.split(".")):
            parameter.data = parameter.data.to(torch.float32)
    return network.eval()


def _refuse_quantized(folder: Path) -> None:
    config = folder / CONFIG
    if config.is_file() and "quantization_config" in read_object(config):
        raise UnsupportedModel(
            f"{folder} holds quantised weights, whose memory is not known before they are loaded: use the folder of "
            "the same model without quantization_config"
        )


def _kept_in_float32(network: nn.Module, dtype: torch.dtype) -> set[str]:
    """Return the names of modules and parameters that both libraries load in float32 whatever `dtype` was asked for."""
    in_half = set(getattr(network, "_keep_in_fp32_modules", None) or ())
    always = set(getattr(network, "_keep_in_fp32_modules_strict", None) or ())
    if isinstance(network, ModelMixin) or dtype == torch.float16:
        return in_half | always
    return always if dtype == torch.bfloat16 else set()
