"""Adapters in bands: what a LoRA adds to convolutions and attention is exact as well."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from patchpar.pipeline.adapter_selection import AdapterSelection
from patchpar.pipeline.encoder_placement import EncoderPlacement
from patchpar.pipeline.installed_plan import InstalledPlan
from patchpar.shard.unet import denoiser as unet_denoiser
from tests.exact import denoisers, on_ranks
from tests.ranks import PoolRank

TARGETS = ["to_q", "to_k", "to_v", "conv1", "conv2", "conv_shortcut", "conv_in", "proj_in", "time_emb_proj"]


@torch.no_grad()
def with_peft(this: PoolRank, name: str) -> dict[str, float]:
    """The adapter is added before, and again its scale is changed and it is taken out while the seams are in."""
    from peft import LoraConfig

    denoiser, call = denoisers.build(name), denoisers.call(name, 20, 8)
    alone = on_ranks.first(denoiser(**call))
    denoiser.add_adapter(LoraConfig(r=4, lora_alpha=4, target_modules=TARGETS, init_lora_weights=False))
    _same_everywhere(denoiser)
    bands = on_ranks.patched(this, denoiser)

    def split() -> torch.Tensor:
        return on_ranks.first(bands.denoise(denoiser.forward, **call))

    def error() -> float:
        got = split()
        bands.restore()
        return on_ranks.relative(got, on_ranks.first(denoiser(**call)))

    found = {"adapted": error(), "weight": on_ranks.relative(split(), alone)}
    denoiser.set_adapters(["default"], 0.3)
    found["scaled"] = error()
    denoiser.disable_adapters()
    found["disabled"] = on_ranks.relative(split(), alone)
    return found


@torch.no_grad()
def in_turn(this: PoolRank, name: str) -> dict[str, Any]:
    """Two adapters and none, each twice, as requests select them: errors, and how often exchange points are found."""
    from peft import LoraConfig

    denoiser, call = denoisers.build(name), denoisers.call(name, 20, 8)
    for adapter, targets in (("ink", TARGETS), ("snow", ["conv1", "to_k"])):
        config = LoraConfig(r=4, lora_alpha=4, target_modules=targets, init_lora_weights=False)
        denoiser.add_adapter(config, adapter_name=adapter)
    _same_everywhere(denoiser)
    pipe, selection = SimpleNamespace(components={"unet": denoiser}), AdapterSelection()
    encoders = EncoderPlacement(this.rank, torch.device("cpu"), this.comm)
    bands, found = on_ranks.patched(this, denoiser), list[float]()
    count, discover = 0, unet_denoiser.discover

    def counted(*args: Any) -> Any:
        nonlocal count
        count += 1
        return discover(*args)

    unet_denoiser.discover = counted
    try:
        for adapters in (("ink", 0.7),), (("snow", 1.0),), (), (("ink", 0.2),), (("snow", 0.4),), ():
            selection.choose(pipe, adapters, InstalledPlan(), encoders)
            bands.reset()
            got = on_ranks.first(bands.denoise(denoiser.forward, **call))
            bands.restore()
            found.append(on_ranks.relative(got, on_ranks.first(denoiser(**call))))
    finally:
        unet_denoiser.discover = discover
    return {"errors": found, "searches": count}


class LowRank(nn.Module):
    """A LoRA by hand, beside the layer it adapts: same kind of layer, few channels, then one per pixel."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer
        if isinstance(layer, nn.Linear):
            self.down = nn.Linear(layer.in_features, 4, bias=False)
            self.up: nn.Module = nn.Linear(4, layer.out_features, bias=False)
            return
        how = {"stride": layer.stride, "padding": layer.padding, "bias": False}
        self.down = nn.Conv2d(layer.in_channels, 4, layer.kernel_size, **how)
        self.up = nn.Conv2d(4, layer.out_channels, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.up(self.down(x))


@torch.no_grad()
def by_hand(this: PoolRank, name: str) -> dict[str, float]:
    denoiser, call = denoisers.build(name), denoisers.call(name, 20, 8)
    alone = on_ranks.first(denoiser(**call))
    for path, module in list(denoiser.named_modules()):
        last = path.rpartition(".")[2]
        if last in ("to_q", "to_v", "conv1", "conv_in", "conv"):
            setattr(denoiser.get_submodule(path.rpartition(".")[0]), last, LowRank(module))
    _same_everywhere(denoiser)
    bands = on_ranks.patched(this, denoiser)
    got = on_ranks.first(bands.denoise(denoiser.forward, **call))
    bands.restore()
    return {
        "adapted": on_ranks.relative(got, on_ranks.first(denoiser(**call))),
        "weight": on_ranks.relative(got, alone),
    }


def _same_everywhere(denoiser: nn.Module) -> None:
    """What an adapter adds is random: give it the same values on every rank."""
    generator = torch.Generator().manual_seed(0)
    for path, parameter in denoiser.named_parameters():
        if "lora" in path or ".down.weight" in path or ".up.weight" in path:
            scale = 0.5 / parameter[0].numel() ** 0.5
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
