"""Every transformers in the range finds all weights of the text encoders that come with the package."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from training.package import name_as_on_the_hub

ASSETS = Path(__file__).parents[2] / "assets"
ENCODERS = sorted(path.relative_to(ASSETS).as_posix() for path in ASSETS.glob("*/text_encoder*"))


def loaded(folder, variant=None):
    """The encoder of a folder, and the names of weights that have no values in its files, or no place in it."""
    kind = getattr(transformers, json.loads((folder / "config.json").read_text())["architectures"][0])
    encoder, info = kind.from_pretrained(folder, variant=variant, use_safetensors=True, output_loading_info=True)
    return encoder, sorted([*info["missing_keys"], *info["unexpected_keys"]])


@pytest.mark.parametrize("name", ENCODERS)
def test_no_weight_of_an_embedded_model_is_random(name):
    first, lost = loaded(ASSETS / name, variant="fp16")
    assert lost == []
    second, _ = loaded(ASSETS / name, variant="fp16")
    assert all(torch.equal(one, two) for one, two in zip(first.parameters(), second.parameters(), strict=True))


def test_a_weight_under_another_name_would_be_seen(tmp_path):
    folder = ASSETS / "scenes-unet" / "text_encoder"
    weights = load_file(folder / "model.fp16.safetensors")
    assert all(name.startswith("text_model.") for name in weights), "as of published models"
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    changed = {name.replace("layer_norm1", "first_norm"): weight for name, weight in weights.items()}
    save_file(changed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert [name for name in loaded(tmp_path)[1] if "layer_norm1" in name]


@pytest.mark.parametrize("kind", [CLIPTextModel, CLIPTextModelWithProjection])
def test_a_packaged_encoder_has_published_names_and_the_same_values(kind, tmp_path):
    config = CLIPTextConfig(
        vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, projection_dim=4
    )
    encoder = kind(config).eval()
    encoder.save_pretrained(tmp_path)
    for _ in range(2):
        name_as_on_the_hub(tmp_path)
        names = set(load_file(tmp_path / "model.safetensors"))
        assert {name.split(".")[0] for name in names} <= {"text_model", "text_projection"}
        again, lost = loaded(tmp_path)
        assert lost == []
        pairs = zip(encoder.state_dict().values(), again.state_dict().values(), strict=True)
        assert all(torch.equal(one, two) for one, two in pairs)
