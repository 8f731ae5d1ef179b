"""Keys of the last step on tokens: as the replicas of one process have it, on every rank."""

from __future__ import annotations

import pytest

from patchpar.comm.exchange_part import ExchangePart
from patchpar.shard.attention import fresh_exchange
from tests.breadth import first_of
from tests.tensors import relative

from .past import Case, flops_of_a_step, on_ranks, plain, replicas

SAME = 2e-5
FLUX, SD3, PIXART, QWEN = (
    f"{name}2DModel" for name in ("FluxTransformer", "SD3Transformer", "PixArtTransformer", "QwenImageTransformer")
)
WAN, LTX = "WanTransformer3DModel", "LTXVideoTransformer3DModel"
STALE = "displaced:warmup_steps=1"
LED_ON = "fresh-edges:warmup_steps=1"


def pooled(pool: int) -> str:
    """Averages over so many rows and columns, beside near lines."""
    return f"fresh-edges:context=pooled:band=0.4:pool={pool}:extrapolated=false"


CASES = [
    *[Case(name=name, strategy=STALE, ranks=ranks) for name in (FLUX, SD3, PIXART, QWEN) for ranks in (2, 3)],
    Case(name=FLUX, strategy="displaced:preset=paper:warmup_steps=1", ranks=3),
    Case(name=FLUX, strategy="fresh-edges:extrapolated=false", ranks=3),
    Case(name=FLUX, strategy="fresh-edges:context=pooled:pool=1:extrapolated=false", ranks=3, seen=0.1, pool=1),
    Case(name=FLUX, strategy="fresh-edges:context=partials:refresh=1", ranks=3),
    *[Case(name=name, strategy=LED_ON, ranks=3, leads_on=True) for name in (FLUX, PIXART, QWEN)],
    *[
        Case(name=name, strategy=f"pcpp:fraction=0.4:{rest}warmup_steps=1", ranks=ranks, seen=0.4)
        for name, rest, ranks in ((FLUX, "", 3), (SD3, "", 2), (FLUX, "context=paper:", 2))
    ],
    *[
        Case(name=name, strategy=pooled(pool), ranks=ranks, seen=0.4, pool=pool)
        for name, pool, ranks in ((FLUX, 3, 3), (SD3, 2, 3), (PIXART, 2, 2), (QWEN, 2, 2))
    ],
    # 5 frames of 5 rows: whole frames. 2 frames of 4 rows: rows of either, or equally many tokens of either
    *[
        case
        for variant, ranks in ((0, 2), (1, 3))
        for case in (
            Case(name=WAN, strategy=STALE, ranks=ranks, variant=variant),
            Case(name=WAN, strategy="pcpp:warmup_steps=1:fraction=0.4", ranks=ranks, variant=variant, seen=0.4),
            Case(name=WAN, strategy=pooled(2), ranks=ranks, variant=variant, seen=0.4, pool=2),
        )
    ],
    Case(name=LTX, strategy=LED_ON, ranks=3, variant=1, leads_on=True),
    Case(name=LTX, strategy=pooled(2), ranks=2, variant=1, seen=0.4, pool=2),
    Case(name=FLUX, strategy=pooled(2), ranks=2, seen=0.4, pool=2, mask=True),
    # text computed by every rank, or split though less of the image is sent
    Case(name=SD3, strategy=f"{STALE}:text=whole", ranks=3),
    Case(name=FLUX, strategy=f"{pooled(2)}:text=split", ranks=2, seen=0.4, pool=2, mask=True),
    Case(name=SD3, strategy="pcpp:fraction=0.4:warmup_steps=1:text=split", ranks=3, seen=0.4),
    Case(name=SD3, strategy="fresh-edges:context=partials:refresh=1:text=split", ranks=3),
    Case(name=FLUX, strategy=STALE, ranks=3, mask=True),
]


@pytest.mark.parametrize("case", first_of(CASES, *CASES[16::8], CASES[-1]), ids=str)
def test_keys_of_the_last_step(case: Case) -> None:
    want, exact = replicas(case), plain(case)
    for got in on_ranks(case):
        errors = [relative(x, y) for x, y in zip(got, want, strict=True)]
        assert max(errors) <= SAME
        far = [relative(x, y) for x, y in zip(got, exact, strict=True)]
        assert far[0] <= SAME  # the first step is exact
        assert min(far[1:]) > 10 * SAME


def test_every_rank_has_its_part_of_the_text_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stale steps compute as few tokens as `exact`, and without the exchange of text something else."""
    case = Case(name=FLUX, strategy=LED_ON, ranks=3, evaluations=3, leads_on=True)
    whole = Case(name=FLUX, strategy=f"{LED_ON}:text=whole", ranks=3, evaluations=3, leads_on=True)
    exact, want = Case(name=FLUX, strategy="exact", ranks=3), replicas(case)
    assert flops_of_a_step(case) <= 1.01 * flops_of_a_step(exact) < 0.9 * flops_of_a_step(whole)
    monkeypatch.setattr(fresh_exchange, "fresh_part", lambda *_: ExchangePart("text", [], {}))
    errors = [relative(x, y) for x, y in zip(on_ranks(case)[0], want, strict=True)]
    assert errors[0] <= SAME < 10 * SAME < min(errors[1:])


def test_frozen_keys_are_something_else() -> None:
    case = Case(name=FLUX, strategy=STALE, exchange="frozen")
    want = replicas(case)
    errors = [relative(x, y) for x, y in zip(on_ranks(case)[0], want, strict=True)]
    assert max(errors[:2]) <= SAME  # the keys of the first step are still those of the last
    assert min(errors[2:]) > 10 * SAME


@pytest.mark.parametrize(
    "strategy",
    first_of(["displaced", "pcpp", "fresh-edges", "fresh-edges:context=partials"], "displaced", "fresh-edges"),
)
def test_as_many_exact_steps_as_steps(strategy: str) -> None:
    case = Case(name=SD3, strategy=f"{strategy}:warmup_steps=4")
    exact = on_ranks(Case(name=SD3, strategy="exact"))
    for got, want in zip(on_ranks(case), exact, strict=True):  # other shares: of text, with pcpp of whole rows too
        assert all(relative(x, y) <= 1e-6 for x, y in zip(got, want, strict=True))


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
