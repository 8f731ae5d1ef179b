"""Networks of the structure of ComfyUI's own, written for these tests, with random weights; and their calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.modules.comfy_flux import Flux
from tests.modules.comfy_lumina import NextDiT
from tests.modules.comfy_qwen import QwenImageTransformer2DModel
from tests.modules.comfy_unet import UNetModel
from tests.modules.comfy_wan import WanModel

NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "flux": Flux,
    "wan": WanModel,
    "qwen": QwenImageTransformer2DModel,
    "lumina": NextDiT,
    "unet": UNetModel,
}


def network(name: str) -> nn.Module:
    """The same weights in every process."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = NETWORKS[name]()
        for parameter in made.parameters():  # no part may be silent
            parameter.data += 0.02 * torch.randn_like(parameter)
    return made.eval().requires_grad_(False)


def call_of(name: str, step: int = 0, size: tuple[int, int] = (16, 24)) -> dict[str, Any]:
    """Arguments of one call, as ComfyUI's samplers pass them."""
    generator = torch.Generator().manual_seed(10 + step)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    time = torch.full((2,), 1.0 - 0.1 * step)
    options = {"cond_or_uncond": [0, 1], "sample_sigmas": torch.linspace(1, 0, 5), "sigmas": time, "patches": {}}
    found = {"context": noise(2, 5, 12), "transformer_options": options}
    if name == "wan":
        return {"x": noise(2, 4, 3, *size), "timestep": 1000 * time, **found}
    if name == "qwen":
        return {"x": noise(2, 4, 1, *size), "timestep": time, **found}
    if name == "lumina":  # not a multiple of 8 tokens
        return {"x": noise(2, 4, size[0] - 2, size[1] - 2), "timesteps": time, "num_tokens": 5, **found}
    if name == "flux":
        return {"x": noise(2, 4, *size), "timestep": time, "y": noise(2, 8), "guidance": torch.full((2,), 3.5), **found}
    return {"x": noise(2, 4, *size), "timesteps": 1000 * time, "y": noise(2, 8), **found}
