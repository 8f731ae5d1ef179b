"""Stand-ins of the modules of ComfyUI that the nodes use, of the same structure, on CPUs."""

from __future__ import annotations

import copy
import sys
import uuid
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from tests.modules.comfy_attention import Executor


class WrappersMP:
    OUTER_SAMPLE, PREDICT_NOISE, DIFFUSION_MODEL = "outer_sample", "predict_noise", "diffusion_model"


class Interrupted(Exception):
    """ComfyUI's InterruptProcessingException."""


class ModelPatcher:
    """A model, its LoRA patches (here: factors of weights, by name), wrappers, and models that are loaded with it."""

    def __init__(self, network: nn.Module, load_device: Any = "cpu") -> None:
        self.model = SimpleNamespace(diffusion_model=network)
        self.load_device = torch.device(load_device)
        self.patches: dict[str, list[float]] = {}
        self.patches_uuid = uuid.uuid4()
        self.wrappers: dict[str, dict[str, list[Any]]] = {}
        self.additional_models: dict[str, list[ModelPatcher]] = {}

    def clone(self) -> ModelPatcher:
        found = copy.copy(self)
        found.patches = {name: list(each) for name, each in self.patches.items()}
        found.wrappers = {kind: {k: list(w) for k, w in each.items()} for kind, each in self.wrappers.items()}
        found.additional_models = dict(self.additional_models)
        return found

    def deepclone_multigpu(self, new_load_device: Any = None) -> ModelPatcher:
        found = self.clone()
        found.model, found.load_device = copy.deepcopy(self.model), torch.device(new_load_device)
        return found

    def add_patch(self, name: str, factor: float) -> None:
        self.patches.setdefault(name, []).append(factor)
        self.patches_uuid = uuid.uuid4()

    def set_additional_models(self, key: str, models: list[Any]) -> None:
        self.additional_models[key] = models

    def get_additional_models_with_key(self, key: str) -> list[Any]:
        return self.additional_models.get(key, [])

    def remove_wrappers_with_key(self, kind: str, key: str) -> None:
        self.wrappers.get(kind, {}).pop(key, None)

    def add_wrapper_with_key(self, kind: str, key: str, wrapper: Any) -> None:
        self.wrappers.setdefault(kind, {}).setdefault(key, []).append(wrapper)


class Guider:
    """Samples as CFGGuider does: loads the model and what comes with it, and calls the network in steps."""

    def __init__(self, model_patcher: ModelPatcher) -> None:
        self.model_patcher = model_patcher

    def _of(self, kind: str) -> list[Any]:
        return [wrapper for each in self.model_patcher.wrappers.get(kind, {}).values() for wrapper in each]

    def sample(self, calls: list[dict[str, Any]]) -> list[Any]:
        return Executor(self._outer_sample, self, self._of(WrappersMP.OUTER_SAMPLE)).execute(calls)

    def _outer_sample(self, calls: list[dict[str, Any]]) -> list[Any]:
        patchers = [self.model_patcher, *(m for each in self.model_patcher.additional_models.values() for m in each)]
        before = [copy.deepcopy(each.model.diffusion_model.state_dict()) for each in patchers]
        for each in patchers:
            for name, factors in each.patches.items():
                each.model.diffusion_model.get_parameter(name).data.mul_(torch.tensor(factors).prod())
        try:
            step = Executor(self._predict_noise, self, self._of(WrappersMP.PREDICT_NOISE))
            return [step.execute(call) for call in calls]
        finally:
            for each, weights in zip(patchers, before, strict=True):
                each.model.diffusion_model.load_state_dict(weights)

    def _predict_noise(self, call: dict[str, Any]) -> Any:
        options = {**call["transformer_options"], "wrappers": self.model_patcher.wrappers}
        return self.model_patcher.model.diffusion_model(**{**call, "transformer_options": options})


class _Input:
    """Of a node: `io.Int.Input("gpus", default=2)`."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def Input(self, name: str, **options: Any) -> Any:
        return SimpleNamespace(kind=self.kind, name=name, **options)

    def Output(self, **options: Any) -> Any:
        return SimpleNamespace(kind=self.kind, **options)


def modules(devices: int, check: Callable[[], None], progress: list[tuple[int, int]]) -> dict[str, ModuleType]:
    """The modules by name, for `sys.modules`. `check` raises where the user has interrupted."""
    made = {
        name: ModuleType(name)
        for name in ("comfy", "comfy.patcher_extension", "comfy.model_management", "comfy_api", "comfy_api.latest")
    }
    vars(made["comfy.patcher_extension"])["WrappersMP"] = WrappersMP
    vars(made["comfy.model_management"]).update(
        get_all_torch_devices=lambda exclude_current: [
            torch.device("cpu"),
            *(torch.device("cpu", i) for i in range(1, devices)),
        ],
        throw_exception_if_processing_interrupted=check,
        unload_all_models=lambda: None,
    )
    made["comfy"].model_management = made["comfy.model_management"]  # type: ignore[attr-defined]
    kinds = {name: _Input(name) for name in ("Model", "Int", "Float", "Combo", "String", "Image")}
    io = SimpleNamespace(
        **kinds, ComfyNode=object, Schema=SimpleNamespace, Custom=_Input, NodeOutput=lambda *values: values
    )
    execution = SimpleNamespace(set_progress=lambda value, max_value: progress.append((value, max_value)))
    vars(made["comfy_api.latest"]).update(
        io=io, ComfyExtension=object, ComfyAPISync=lambda: SimpleNamespace(execution=execution)
    )
    return made


def forget() -> None:
    """Let the nodes be imported again, with other stand-ins."""
    for name in [each for each in sys.modules if each.startswith("integrations.comfyui")]:
        del sys.modules[name]
