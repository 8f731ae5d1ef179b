"""Keys of the last step on tokens: as the replicas of one process have it, on every rank."""

from __future__ import annotations

import pytest
import torch

from patchpar.errors import UnsupportedModel
from tests.exact.on_ranks import relative

from .past import Case, on_ranks, plain, replicas

SAME = 2e-5
FLUX, SD3, PIXART, QWEN = (
    f"{name}2DModel" for name in ("FluxTransformer", "SD3Transformer", "PixArtTransformer", "QwenImageTransformer")
)
STALE = "displaced:warmup_steps=1"
LED_ON = "fresh-edges:warmup_steps=1"
CASES = [
    *[Case(name=name, strategy=STALE, ranks=ranks) for name in (FLUX, SD3, PIXART, QWEN) for ranks in (2, 3)],
    Case(name=FLUX, strategy="displaced:preset=paper:warmup_steps=1", ranks=3),
    Case(name=FLUX, strategy="fresh-edges:extrapolated=false", ranks=3),
    Case(name=FLUX, strategy="fresh-edges:context=pooled:pool=1:extrapolated=false", ranks=3),
    Case(name=FLUX, strategy="fresh-edges:context=partials:refresh=1", ranks=3),
    *[Case(name=name, strategy=LED_ON, ranks=3, leads_on=True) for name in (FLUX, PIXART, QWEN)],
    *[
        Case(name=name, strategy=f"pcpp:fraction=0.4:{rest}warmup_steps=1", ranks=3, seen=0.4)
        for name, rest in ((FLUX, ""), (SD3, ""), (FLUX, "context=paper:"))
    ],
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_keys_of_the_last_step(case: Case) -> None:
    want, exact = replicas(case), plain(case)
    for got in on_ranks(case):
        errors = [relative(x, y) for x, y in zip(got, want, strict=True)]
        assert max(errors) <= SAME
        far = [relative(x, y) for x, y in zip(got, exact, strict=True)]
        assert far[0] <= SAME  # the first step is exact
        assert min(far[1:]) > 10 * SAME


def test_frozen_keys_are_something_else() -> None:
    case = Case(name=FLUX, strategy=STALE, exchange="frozen")
    want = replicas(case)
    errors = [relative(x, y) for x, y in zip(on_ranks(case)[0], want, strict=True)]
    assert max(errors[:2]) <= SAME  # the keys of the first step are still those of the last
    assert min(errors[2:]) > 10 * SAME


@pytest.mark.parametrize("strategy", ["displaced", "pcpp", "fresh-edges", "fresh-edges:context=partials"])
def test_as_many_exact_steps_as_steps(strategy: str) -> None:
    case = Case(name=SD3, strategy=f"{strategy}:warmup_steps=4")
    exact = on_ranks(Case(name=SD3, strategy="exact"))
    for got, want in zip(on_ranks(case), exact, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


def test_differences_in_few_bits_cost_little() -> None:
    stale = on_ranks(Case(name=FLUX, strategy="fresh-edges:extrapolated=false"))[0]
    coarse = on_ranks(Case(name=FLUX, strategy="fresh-edges:extrapolated=false:bits=8"))[0]
    exact = plain(Case(name=FLUX, strategy="exact"))
    # the second step has the keys of the first, which came whole
    for last, rough, want in zip(stale[2:], coarse[2:], exact[2:], strict=True):
        assert 0 < relative(rough, last) < 0.2 * relative(last, want)


def test_averaged_keys_cost_less_than_none() -> None:
    exact = plain(Case(name=FLUX, strategy="exact"))
    pooled = on_ranks(Case(name=FLUX, strategy="fresh-edges:context=pooled:pool=2", ranks=3))[0]
    alone = on_ranks(Case(name=FLUX, strategy="exact", ranks=3, exchange="off"))[0]
    for got, none, want in zip(pooled[1:], alone[1:], exact[1:], strict=True):
        assert SAME < relative(got, want) < 0.9 * relative(none, want)


def test_averages_of_masked_tokens_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="masked, and averages of tokens cannot be: use context=all"):
        on_ranks(Case(name=QWEN, strategy="fresh-edges:context=pooled:pool=2"))
