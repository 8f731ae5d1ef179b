"""One of ComfyUI's own models on several GPUs: the calls of its network go to a team of copies, a thread for each GPU.

    OUTER_SAMPLE       an image begins and ends; the copies get the LoRAs of the model
    PREDICT_NOISE      a step of the sampler ends
    DIFFUSION_MODEL    a call of the network, which the team computes

ComfyUI loads the copies like any model that a model brings along, and moves them off the GPUs when it needs room.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from patchpar import PlanError, Team

KEY, COMFYUI_SPLIT = "patchpar", "multigpu"
OPTIONS = "transformer_options"
OVERRIDE = "optimized_attention_override"


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamSettings:
    """How calls are divided: see `patchpar.Team`."""

    strategy: str = "exact"
    split: str = "auto"
    verify: Any = True


class ModelTeam:
    """The wrappers of one model. A team lives as long as the sampling of an image: then weights may move."""

    def __init__(self, settings: TeamSettings) -> None:
        self.settings = settings
        self._copies: list[Any] = []
        self._team: Team | None = None

    def sample(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the sampling of an image. Raises PlanError where ComfyUI splits it too."""
        if self._copies:  # a sampler that samples inside of its own sampling: its calls are split already
            return executor(*args, **kwargs)
        model = executor.class_obj.model_patcher
        if model.get_additional_models_with_key(COMFYUI_SPLIT):
            raise PlanError(
                "ComfyUI splits this model over GPUs by itself (its node MultiGPU), in threads of which each would "
                "start the same team: remove that node, or this one"
            )
        try:
            self._copies = model.get_additional_models_with_key(KEY)
            for each in self._copies:
                follow(model, each)
            return executor(*args, **kwargs)
        finally:
            self._copies = []
            team, self._team = self._team, None
            if team is not None:
                team.close()

    def predict(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a step of the sampler, in which the network is called once or several times."""
        found = executor(*args, **kwargs)
        if self._team is not None:
            self._team.step()
        return found

    def forward(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a call of the network. Outside of a sampling it runs on one GPU, as without this node."""
        if not self._copies:
            return executor(*args, **kwargs)
        network = executor.class_obj
        if self._team is None:
            self._team = self._started([network, *(each.model.diffusion_model for each in self._copies)])
        given = named_arguments(network, args, kwargs)
        given[OPTIONS] = without_wrappers(given.get(OPTIONS) or {}, executor.wrappers[executor.idx + 1 :])
        return self._team(**given)

    def _started(self, networks: list[Any]) -> Team:
        settings = self.settings
        team = Team(
            networks, strategy=settings.strategy, split=settings.split, verify=settings.verify, ignore=[OPTIONS]
        )
        team.begin()
        return team


def named_arguments(network: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name. ComfyUI passes wrappers those of `forward` in its order."""
    signature = inspect.signature(network.forward)
    found = signature.bind(*args, **kwargs).arguments
    rest = next((each.name for each in signature.parameters.values() if each.kind is each.VAR_KEYWORD), None)
    return {name: value for name, value in found.items() if name != rest} | found.get(rest, {})


def without_wrappers(options: dict[str, Any], later: list[Any]) -> dict[str, Any]:
    """Return a call's options with the wrappers that have not run yet, and torch's attention, which can be split."""
    wrappers = {**options.get("wrappers", {}), "diffusion_model": {KEY: list(later)} if later else {}}
    return {**options, "wrappers": wrappers, OVERRIDE: torch_attention}


def torch_attention(  # noqa: PLR0913 - the arguments are ComfyUI's
    function: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    mask: Tensor | None = None,
    attn_precision: Any = None,
    skip_reshape: bool = False,
    skip_output_reshape: bool = False,
    enable_gqa: bool = False,
    **_: Any,
) -> Tensor:
    """Return ComfyUI's attention by torch's function: [B, L, heads * D], or [B, heads, L, D] with `skip_reshape`."""
    if enable_gqa:
        raise PlanError("attention with fewer heads of keys than of queries is not split: set gpus to 1")
    if not skip_reshape:
        q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    if mask is not None:
        mask = mask.unsqueeze(0) if mask.ndim == 2 else mask
        mask = mask.unsqueeze(1) if mask.ndim == 3 else mask
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return out if skip_output_reshape else out.transpose(1, 2).flatten(2)


def follow(model: Any, copy: Any) -> None:
    """Give a copy the patches (LoRAs) that the model has now: nodes behind ours may have added some."""
    if copy.patches_uuid != model.patches_uuid:
        copy.patches = {name: list(patches) for name, patches in model.patches.items()}
        copy.patches_uuid = model.patches_uuid


def check_version(model: Any) -> None:
    """Raise PlanError where this ComfyUI cannot copy a model (a ModelPatcher) to other devices."""
    from comfy.patcher_extension import WrappersMP

    if not hasattr(model, "deepclone_multigpu") or not hasattr(WrappersMP, "PREDICT_NOISE"):
        raise PlanError("this ComfyUI cannot copy a model to another GPU (ModelPatcher.deepclone_multigpu): update it")


def parallel(model: Any, devices: list[torch.device], settings: TeamSettings) -> Any:
    """Return a clone of a ModelPatcher whose network runs on its own device and on copies on `devices`."""
    from comfy.patcher_extension import WrappersMP

    found = model.clone()
    copies = [found.deepclone_multigpu(new_load_device=device) for device in devices]
    found.set_additional_models(KEY, copies)
    team = ModelTeam(settings)
    for name, wrapper in (
        (WrappersMP.OUTER_SAMPLE, team.sample),
        (WrappersMP.PREDICT_NOISE, team.predict),
        (WrappersMP.DIFFUSION_MODEL, team.forward),
    ):
        found.remove_wrappers_with_key(name, KEY)
        found.add_wrapper_with_key(name, KEY, wrapper)
    return found
