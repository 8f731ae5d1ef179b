"""Weights that no file of a model has: random numbers are the same on every rank, and what has no values is refused.

Those of a network that is given are not looked for.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from patchpar.errors import PlanError
from patchpar.models.files import embedded_model
from patchpar.models.loading import load_pipeline
from tests import tiny

OPTIONS = {"variant": "fp16"}


def without(folder: Path, file: str, ending: str) -> Path:
    """The embedded model with one weight less."""
    for path in Path(embedded_model()).rglob("*"):
        target = folder / path.relative_to(embedded_model())
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file() and path != Path(embedded_model()) / file:
            target.symlink_to(path)
    weights = load_file(Path(embedded_model()) / file)
    kept = {name: weight for name, weight in weights.items() if not name.endswith(ending)}
    assert len(kept) == len(weights) - 1
    save_file(kept, folder / file, metadata={"format": "pt"})
    return folder


def test_random_numbers_of_an_encoder_are_those_of_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ending, of_gpus = "encoder.layers.0.self_attn.q_proj.weight", list[int]()
    monkeypatch.setattr(torch.cuda, "manual_seed_all", of_gpus.append)
    folder = without(tmp_path, "text_encoder/model.fp16.safetensors", ending)
    found = []
    for seed in range(2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        of_gpus.clear()
        encoder = load_pipeline(str(folder), OPTIONS).text_encoder
        assert torch.equal(torch.get_rng_state(), before), "the caller's random numbers do not move on"
        assert not of_gpus, "nor those that are sampled on a GPU"
        found += [weight for name, weight in encoder.named_parameters() if name.endswith(ending)]
    assert torch.equal(*found)
    assert found[0].float().std() > 0


def test_a_network_without_values_is_refused(tmp_path: Path) -> None:
    folder = without(tmp_path, "unet/diffusion_pytorch_model.fp16.safetensors", "add_embedding.linear_2.weight")
    with pytest.raises(
        PlanError, match=r"unet of .* has no values for 1 of its weights \(add_embedding.linear_2.weight"
    ):
        load_pipeline(str(folder), OPTIONS)


def test_a_network_that_is_given_is_not_loaded(tmp_path: Path) -> None:
    """Also one that the pipeline's class may lack, as Wan's transformers."""
    given = tiny.build("wan").pipe
    given.save_pretrained(tmp_path)
    for file in (tmp_path / "transformer").glob("*.safetensors"):
        file.unlink()
    assert load_pipeline(str(tmp_path), {"transformer": given.transformer}).transformer is given.transformer
