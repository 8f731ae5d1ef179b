"""What people add to a transformer, with its tokens split: ControlNet residuals, adapters, quantised weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from torch import Tensor, nn

from patchpar.comm.collectives import Communicator
from patchpar.plan.mesh import Axis
from patchpar.shard.verification_cache import VerificationCache
from patchpar.strategies.exact import ExactPatch
from tests import tiny
from tests.conftest import POOL_SIZE
from tests.tensors import relative
from tests.tiny.transformers import TRANSFORMERS
from tests.tiny.transformers_entry import noise
from tests.unit.threads import on_threads

from .ranks import LIMIT, predictions

FLUX, SD3, PIXART = (f"{name}Transformer2DModel" for name in ("Flux", "SD3", "PixArt"))


def split(models: list[nn.Module], call: dict[str, Any], folder: Path, exchange: str = "on") -> list[Tensor]:
    """The prediction on every rank, verified at first use."""

    def on_rank(transport: Any) -> Tensor:
        model, ranks = models[transport.rank], len(models)
        axis = Axis("patch", transport.rank, ranks, tuple(range(ranks)))
        verifications = VerificationCache.of(folder / str(transport.rank), trusted=["tests"])
        denoiser = ExactPatch().install(model, Communicator(transport), axis, verifications=verifications)
        denoiser.exchange = exchange
        try:
            with torch.no_grad():
                return predictions(denoiser.denoise(model.forward, **call))[0]
        finally:
            denoiser.restore()

    found = on_threads(len(models), on_rank, deadline=60.0)
    for each in found:
        if isinstance(each, Exception):
            raise each
    return found


class Quantised(nn.Module):
    """A linear layer of 8-bit weights, a scale for each row; with `activations` of 8-bit inputs too, one per token."""

    def __init__(self, linear: nn.Linear, activations: bool) -> None:
        super().__init__()
        self.bias, self.activations = linear.bias, activations
        self.weight, self.scale = eight_bits(linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        scale = None
        if self.activations:
            x, scale = eight_bits(x)
        y = (x.float() @ self.weight.float().T) * self.scale.squeeze(-1)
        y = y if scale is None else y * scale
        return y if self.bias is None else y + self.bias


def eight_bits(x: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers up to 127, and what one of them is worth in each row."""
    scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-8) / 127
    return (x / scale).round().to(torch.int8), scale


def quantise(model: nn.Module, *, activations: bool) -> None:
    """Every linear layer of the blocks."""
    for module in [each for name, each in model.named_modules() if "blocks" in name]:
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, Quantised(child, activations))


def residuals(tokens: int, width: int, count: int) -> list[Tensor]:
    return [noise(2, tokens, width, seed=number) for number in range(count)]


@pytest.mark.parametrize(
    ("name", "added"),
    [
        (
            FLUX,
            {
                "controlnet_block_samples": residuals(35, 36, 2),
                "controlnet_single_block_samples": residuals(35, 36, 1),
            },
        ),
        (SD3, {"block_controlnet_hidden_states": residuals(35, 24, 2)}),
    ],
)
def test_controlnet_residuals(name: str, added: dict[str, Any], tmp_path: Path) -> None:
    """They are added between blocks, to all tokens; and calls with and without them need not come apart."""
    call = TRANSFORMERS[name].call(0)
    models = [TRANSFORMERS[name].build() for _ in range(3)]
    with torch.no_grad():
        want, without = (predictions(models[0](**call, **more))[0] for more in (added, {}))
    for got in split(models, call | added, tmp_path):
        assert relative(got, want) <= LIMIT
    for got in split(models, call, tmp_path):
        assert relative(got, without) <= LIMIT
    assert relative(without, want) > 0.01


@pytest.mark.parametrize("activations", [False, True])
@pytest.mark.parametrize("name", [PIXART, FLUX])
def test_quantised_weights(name: str, activations: bool, tmp_path: Path) -> None:
    """Weights in 8 bits. Where activations are too, sums in another order may be another integer, by the model's own
    measure: that is no reason to refuse it.
    """
    call = TRANSFORMERS[name].call(0)
    models = [TRANSFORMERS[name].build() for _ in range(2)]
    with torch.no_grad():
        coarse_not = predictions(models[0](**call))[0]
        for model in models:
            quantise(model, activations=activations)
        want = predictions(models[0](**call))[0]
    assert relative(want, coarse_not) > 10 * LIMIT
    limit = 0.01 if activations else LIMIT
    for got in split(models, call, tmp_path):
        assert relative(got, want) <= limit
    assert relative(split(models, call, tmp_path, "off")[0], want) > 4 * limit


@pytest.fixture(scope="module")
def loras(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two adapters for FLUX as files."""
    folder = tmp_path_factory.mktemp("loras")
    for seed, name in enumerate(("ink", "snow")):
        pipe = tiny.build("flux").pipe
        torch.manual_seed(seed)
        targets = ["to_q", "to_k", "to_v", "to_out.0"]
        pipe.transformer.add_adapter(LoraConfig(r=4, lora_alpha=4, init_lora_weights=False, target_modules=targets))
        layers = get_peft_model_state_dict(pipe.transformer)
        pipe.save_lora_weights(folder, transformer_lora_layers=layers, weight_name=f"{name}.safetensors")
    return folder


@pytest.mark.breadth
def test_adapters_are_swapped_between_images(ranks: Any, loras: Path) -> None:
    """Loaded, mixed, swapped, unloaded: each image is that of one process in the same state."""
    found = ranks.run("tests.tokens.on_ranks:with_adapters", POOL_SIZE, loras)[0]
    assert len(found) == 4
    for got, want in found:
        assert relative(got, want) <= LIMIT
    assert relative(found[0][1], found[1][1]) > 10 * LIMIT
    assert relative(found[1][1], found[2][1]) > 10 * LIMIT
    assert torch.equal(found[3][1], found[0][1])
