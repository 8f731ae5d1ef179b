"""SDXL and FLUX without weights, and a call of each, in full size or in the same shape with fewer layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from benchmarks.gpu.fake_cuda import DEVICE, put_on_fake_cuda
from benchmarks.volumes.shapes import SDXL
from patchpar.shard.transformer.shipped_plans import shipped_for
from patchpar.shard.transformer.token_plan import GridSource, TokenPlan
from patchpar.shard.transformer.token_ranges import TokenGrid
from patchpar.shard.unet.discover import ExchangeSites, discover

Call = dict[str, Any]
TOKENS_OF_TEXT = {"sdxl": 77, "flux": 512}


@dataclass(frozen=True, slots=True, kw_only=True)
class Denoiser:
    """A network and one call of it. `prepare` tells an installed strategy how the model is split."""

    network: nn.Module
    call: Call
    prepare: Callable[[Any], None]

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield weights, buffers and arguments, of any shape."""
        yield from self.network.parameters()
        yield from self.network.buffers()
        yield from (x for x in tree_leaves(self.call) if isinstance(x, torch.Tensor))


def sdxl(pixels: int, *, batch: int = 2, layers: Mapping[str, Any] | None = None) -> Denoiser:
    """The UNet of SDXL base 1.0 in fp16, with both guidance branches in one call. `layers` replaces its numbers."""
    from diffusers import UNet2DConditionModel

    dtype = torch.float16
    with torch.device("meta"):
        network = UNet2DConditionModel(**{**SDXL, **(layers or {})}).eval()
        sites = discover(network, network.forward, (), _sdxl_call(1, 64, torch.float32, torch.device("meta")))
    put_on_fake_cuda(network, dtype)

    call = _sdxl_call(batch, pixels // 8, dtype, DEVICE)
    return Denoiser(network=network, call=call, prepare=knowing_sites(sites))


def knowing_sites(sites: ExchangeSites) -> Callable[[Any], None]:
    """Return what tells an installed strategy the exchange points of a UNet."""

    def prepare(bands: Any) -> None:
        bands.sites = sites

    return prepare


def _sdxl_call(batch: int, size: int, dtype: torch.dtype, device: torch.device) -> Call:
    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return {
        "sample": zeros(batch, 4, size, size),
        "timestep": torch.zeros(1, device=device),
        "encoder_hidden_states": zeros(batch, TOKENS_OF_TEXT["sdxl"], 2048),
        "added_cond_kwargs": {"text_embeds": zeros(batch, 1280), "time_ids": zeros(batch, 6)},
        "return_dict": False,
    }


def flux(pixels: int, *, layers: Mapping[str, Any] | None = None) -> Denoiser:
    """The transformer of FLUX.1 dev in bf16. `layers` replaces its numbers."""
    from diffusers import FluxTransformer2DModel

    dtype, side = torch.bfloat16, pixels // 16
    with torch.device("meta"):
        network = FluxTransformer2DModel(guidance_embeds=True, **(layers or {})).eval()
    put_on_fake_cuda(network, dtype)
    prepare = knowing_tokens(network, TokenGrid(1, side, side))
    return Denoiser(network=network, call=_flux_call(side * side, dtype), prepare=prepare)


def knowing_tokens(network: nn.Module, grid: TokenGrid) -> Callable[[Any], None]:
    """Return what tells an installed strategy the tokens of a transformer, whose plan comes with the package."""
    shipped = shipped_for(network)
    plan = None if shipped is None else shipped.plan_for(network)
    if plan is None:
        raise RuntimeError(f"no token plan for {type(network).__name__} comes with the package: make plans")

    def prepare(split: Any) -> None:
        split._search = _KnownPlan(_in_grid(plan, grid))

    return prepare


def _flux_call(tokens: int, dtype: torch.dtype) -> Call:
    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=DEVICE)

    return {
        "hidden_states": zeros(1, tokens, 64),
        "encoder_hidden_states": zeros(1, TOKENS_OF_TEXT["flux"], 4096),
        "pooled_projections": zeros(1, 768),
        "timestep": zeros(1),
        "guidance": torch.zeros(1, device=DEVICE),
        "img_ids": zeros(tokens, 3),
        "txt_ids": zeros(TOKENS_OF_TEXT["flux"], 3),
        "return_dict": False,
    }


@dataclass(frozen=True, slots=True)
class _KnownGrid(GridSource):
    """The grid of a packed latent, which is read from the values of a table otherwise; fake tensors have none."""

    known: TokenGrid | None = None

    def grid(self, shape: tuple[int, ...]) -> TokenGrid | None:
        return self.known


class _KnownPlan:
    """Answers a search for the tokens, which reads values, with the plan that comes with the package."""

    second_hand = False

    def __init__(self, plan: TokenPlan) -> None:
        self._plan = plan

    def find(self, *_: Any, **__: Any) -> TokenPlan:
        return self._plan


def _in_grid(plan: TokenPlan, grid: TokenGrid) -> TokenPlan:
    return replace(plan, blocks=tuple(replace(block, origin=_KnownGrid(known=grid)) for block in plan.blocks))


DENOISERS: dict[str, Callable[..., Denoiser]] = {"sdxl": sdxl, "flux": flux}
NAMES = {
    "sdxl": "SDXL base 1.0, fp16, both guidance branches in one call",
    "flux": "FLUX.1 dev, bf16, 512 tokens of text",
}
SHORT: dict[str, Mapping[str, Any]] = {
    "sdxl": {"transformer_layers_per_block": (1, 1, 1), "layers_per_block": 1},
    "flux": {"num_layers": 2, "num_single_layers": 2},
}
"""Numbers of layers for a quick look: blocks of each kind, and few of them."""
