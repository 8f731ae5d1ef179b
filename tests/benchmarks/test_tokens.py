"""Bytes per layer of split tokens are those of the closed formulas, in a whole model."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import equal

from benchmarks.tokens import volumes as tokens_volumes
from benchmarks.tokens.__main__ import row
from benchmarks.tokens.model import subject
from benchmarks.tokens.ranks import installed
from benchmarks.tokens.volumes import FORMULAS, RANKS, counted_per_layer, volumes
from patchpar.comm.collectives import Communicator
from patchpar.plan.mesh import Axis
from tests.breadth import first_of
from tests.unit.threads import on_threads


@pytest.mark.breadth
def test_every_way_sends_what_its_formula_says() -> None:
    found = list(volumes())
    assert len(found) == sum(len(formula.ranks) for formula in FORMULAS)
    assert [line for line, equal in found if not equal] == []


def test_another_formula_is_told_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = [replace(FORMULAS[0], fraction=lambda n: FORMULAS[0].fraction(n) + 1, ranks=(2,))]
    monkeypatch.setattr(tokens_volumes, "FORMULAS", wrong)
    assert [equal for _, equal in volumes()] == [False]


def test_uneven_tokens_send_by_what_each_rank_has() -> None:
    """25 tokens on 2 ranks are 13 and 12: the rank that has more sends more."""
    first, second = counted_per_layer(subject("pixart", toy=True).of_size(10), "exact", 2)
    assert first * 12 == second * 13


@pytest.mark.parametrize("name", first_of(["pixart", "wan", "flux"], "pixart"))
def test_models_are_split_exactly(name: str) -> None:
    whole = subject(name, toy=True).of_size(12)
    want = whole.model(**whole.call)[0]

    def split(transport: object) -> object:
        axis = Axis("patch", transport.rank, RANKS[0], tuple(range(RANKS[0])))
        return installed(whole, "exact", Communicator(transport), axis)(whole.call)[0]

    for got in on_threads(RANKS[0], split):
        assert (got - want).norm() <= 1e-5 * want.norm()
        assert not equal(got, whole.model(**whole.at(1))[0])


@pytest.mark.breadth
def test_text_is_split_or_on_every_rank() -> None:
    """The bytes of keys and values are those of the image, or of the text too: 512 tokens beside 36."""
    whole = subject("flux", toy=True).of_size(12)
    split, kept = (counted_per_layer(each, "exact", 2)[0] for each in (whole, whole.with_text_on_every_rank()))
    assert split * 36 == kept * (36 + 512)


def test_a_way_that_is_refused_has_a_row_that_says_so() -> None:
    assert row("diffusers ring", {"refused": "ValueError: no"}, None).endswith("| ValueError: no |")
