"""What people add to a transformer, with its tokens split: ControlNet residuals, adapters, quantised weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from torch import Tensor, nn
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, quantize_

from patchpar.exchange import Door
from patchpar.mesh import Axis
from patchpar.strategies.exact import ExactPatch
from patchpar.verdicts import Verdicts
from tests import tiny
from tests.conftest import POOL_SIZE
from tests.exact.on_ranks import relative
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
        denoiser = ExactPatch().install(model, Door(transport), axis, verdicts=Verdicts(folder / str(transport.rank)))
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


def quantise(model: nn.Module, config: Any) -> None:
    """Every linear layer of the blocks."""
    quantize_(model, config, filter_fn=lambda module, path: isinstance(module, nn.Linear) and "blocks" in path)


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


@pytest.mark.parametrize(
    ("config", "limit"),
    [(Int8WeightOnlyConfig(), LIMIT), (Int8DynamicActivationInt8WeightConfig(), 0.01)],
    ids=["weights", "weights and activations"],
)
@pytest.mark.parametrize("name", [PIXART, FLUX])
def test_quantised_weights(name: str, config: Any, limit: float, tmp_path: Path) -> None:
    """In 8 bits by torchao. Where activations are too, sums in another order may be another integer, by the model's own
    measure: that is no reason to refuse it.
    """
    call = TRANSFORMERS[name].call(0)
    models = [TRANSFORMERS[name].build() for _ in range(2)]
    with torch.no_grad():
        coarse_not = predictions(models[0](**call))[0]
        for model in models:
            quantise(model, config)
        want = predictions(models[0](**call))[0]
    assert relative(want, coarse_not) > 10 * LIMIT
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


def test_adapters_are_swapped_between_pictures(ranks: Any, loras: Path) -> None:
    """Loaded, mixed, swapped, unloaded: each picture is that of one process in the same state."""
    found = ranks.run("tests.tokens.on_ranks:with_adapters", POOL_SIZE, loras)[0]
    assert len(found) == 4
    for got, want in found:
        assert relative(got, want) <= LIMIT
    assert relative(found[0][1], found[1][1]) > 10 * LIMIT
    assert relative(found[1][1], found[2][1]) > 10 * LIMIT
    assert torch.equal(found[3][1], found[0][1])
