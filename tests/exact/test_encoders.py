"""With encoders on the first rank every rank gets the bits of encoding by itself, and the others hold no weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers.hooks import apply_layerwise_casting
from torch import nn

from patchpar.errors import UnsupportedModel
from patchpar.plan.mesh import Axis
from patchpar.shard.encoders.one_rank import OneRankEncoders

ON_RANKS = "tests.exact.encoders"


@pytest.mark.parametrize(
    ("name", "world"),
    [
        ("sdxl", 3),
        ("flux", 2),
        ("wan", 3),
        *(
            pytest.param(name, 2, marks=pytest.mark.breadth)
            for name in (
                "sd",
                "sd3",
                "qwen",
                "hidream",
                "hunyuan_video",
                "wan_i2v",
                "svd",
                "zimage",
                "cogview4",
                "qwen_edit",
            )
        ),
    ],
)
def test_every_rank_has_the_bits_of_its_own_encoding(ranks: Any, name: str, world: int) -> None:
    for rank, found in enumerate(ranks.run(f"{ON_RANKS}:final_latents", world, name)):
        assert found["equal"]
        assert found["whole"] > 0
        assert found["meanwhile"] == (0 if rank else found["whole"])
        assert found["restored"]
        assert found["same objects"]
        assert found["no trace"]


def test_without_the_transfer_the_image_is_another(ranks: Any) -> None:
    """The negative control."""
    first, other = ranks.run(f"{ON_RANKS}:final_latents", 2, "sdxl", "off")
    assert first["equal"]
    assert not other["equal"]


def test_weights_can_be_trained_after_they_came_back_in_inference_mode(ranks: Any) -> None:
    assert ranks.run(f"{ON_RANKS}:of_inference_mode", 2) == [False, False]


def test_outputs_of_all_kinds_exceptions_and_random_states_travel(ranks: Any) -> None:
    first, *others = ranks.run(f"{ON_RANKS}:outputs", 3)
    assert others == [first, first]
    assert first[6] == "ArithmeticError: no such token"
    assert first[7].startswith("UnsupportedModel: what encoder returns cannot be sent to other ranks")
    assert "encoders=all" in first[7]


def test_other_uses_of_an_encoder_work_or_are_refused_in_words(ranks: Any) -> None:
    first, other = ranks.run(f"{ON_RANKS}:uses", 2)
    refused = {"converted", "a weight", "embeddings"}
    assert refused < other.keys()
    for name, text in other.items():
        if name in refused:
            assert text.startswith("UnsupportedModel: the weights of text_encoder are on the first rank"), (name, text)
            assert "encoders=all" in text
        else:
            assert text == first[name]


def _compiled(network: nn.Module) -> nn.Module:
    network.compile()
    return network


def _cast_layer_by_layer(network: nn.Module) -> nn.Module:
    apply_layerwise_casting(network, storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    return network


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (_compiled, "is compiled"),
        (_cast_layer_by_layer, "has hooks that may move or convert its weights"),
        (lambda network: network.to("meta"), "has a weight that is a meta tensor"),
    ],
    ids=["compiled", "cast", "meta"],
)
def test_an_encoder_that_cannot_be_on_one_rank_is_refused_as_it_is(
    made: Callable[[nn.Module], nn.Module], reason: str
) -> None:
    network = made(nn.Sequential(nn.Linear(2, 2)))
    before = dict(vars(network[0]))
    with pytest.raises(UnsupportedModel, match=f"text_encoder {reason}.*: use encoders=all"):
        OneRankEncoders({"text_encoder": network}, [], Axis("patch", 1, 2, (0, 1)), torch.device("cpu"), pytest.fail)
    assert vars(network[0]) == before
