"""Transformers of diffusers with their tokens split, at two numbers of tokens, against the same in one piece.

Every forty-second class in every run, and two with something of their own; `python -m benchmarks.coverage` runs all.
"""

from __future__ import annotations

import pytest

from patchpar.errors import UnsupportedModel
from tests.breadth import first_of

from .ranks import LIMIT, TRANSFORMERS, VARIANTS, error, plain, plan_of, split

REFUSED = {
    "RFD4ProteinaTransformer": "with some of its tokens alone it fails",  # one mask for rows and for pairs
    "SanaWMTransformer3DModel": "depends on several tokens at once",
    "T5FilmDecoder": "does not call scaled_dot_product_attention",  # attention of its own
}
PARTLY = {
    "ConsisIDTransformer3DModel": "perceiver_cross_attention",  # attention of its own
    "WanAnimateTransformer3DModel": "face_adapter",  # attends within frames
}
ANEW = {"HiDreamImageTransformer2DModel": "one of its calls has a mask for images that are no squares"}
REPLICATED = {
    "AnyFlowFARTransformer3DModel": "attn1",  # flex attention
    "Kandinsky6SRTransformer3DModel": "self_attention",  # flex attention
    "NucleusMoEImageTransformer2DModel": "img_mlp",  # its experts choose among all tokens
    "WanAnimate2Transformer3DModel": "self_attn",  # positions are made in it
}
"""Classes and the part of their blocks that every rank computes with all tokens."""
MIXED = ("SanaTransformer2DModel", "SanaVideoTransformer3DModel")  # linear attention, convolutions
SPLIT = [name for name in TRANSFORMERS if name not in REFUSED]
SAMPLE = sorted({*SPLIT[::3], *PARTLY, *ANEW, *MIXED, *REPLICATED} & set(SPLIT))
QUICK = {SPLIT[0], "SanaTransformer2DModel"}


@pytest.mark.parametrize("name", first_of(SAMPLE, *QUICK))
def test_split_tokens(name: str) -> None:
    plan = plan_of(name).joined(plan_of(name, 1)) if name in ANEW else plan_of(name)
    assert [PARTLY[name] in left for left in plan.whole] == [True] if name in PARTLY else not plan.whole
    parts = {part.path for block in plan.blocks for part in block.replicated}
    assert parts == ({REPLICATED[name]} if name in REPLICATED else set())
    for variant in VARIANTS:
        want = plain(name, variant)
        for ranks in (2, 3):
            assert error(split(name, plan, ranks, variant), want) <= LIMIT
    assert error(split(name, plan, 2, 0, None), plain(name, 0)) > 100 * LIMIT  # keys of the own tokens only


@pytest.mark.parametrize("name", first_of([name for name in REFUSED if name in TRANSFORMERS], "T5FilmDecoder"))
def test_refused(name: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"{name} cannot be split by tokens .*{REFUSED[name]}"):
        plan_of(name)


def test_most_classes_are_split() -> None:
    assert len(SPLIT) >= 50
