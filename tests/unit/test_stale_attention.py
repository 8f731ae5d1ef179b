"""Attention to stale keys is attention to the keys that the docs say, whatever steps were before."""

from __future__ import annotations

import gc
import weakref
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from patchpar.errors import PlanError
from patchpar.shard.stale.state import StaleState
from tests.breadth import first_of
from tests.conformance.nccl import SimulatedCommunicator

from .stale_attention import SAME, TIMES, Case, errors, on_nccl, on_ranks

EVEN, UNEVEN = (3, 3), (2, 4, 1)
LONG = {"ran": (0, 1, 2, 3, 4, 5, 7, 8), "exact": (0, 1, 4, 7)}
"""Two steps of warm-up; one is exact after stale ones, one for a step that has been left out."""
ALL = "fresh-edges:extrapolated=false,correction=none"
EXTRAPOLATED = "fresh-edges:correction=none"
POOLED = "fresh-edges:context=pooled,pool=2,extrapolated=false"
CASES = [
    Case("displaced", EVEN, **LONG, layers=2),
    Case("displaced", UNEVEN, text=2, hidden=4, key_heads=1),
    Case("displaced:preset=paper", UNEVEN, **LONG, layers=2),
    Case("pcpp:fraction=0.4", (2, 3, 2), **LONG),
    Case("pcpp:fraction=0.4,context=paper", (2, 3, 2), text=2, hidden=4, layers=2),
    Case(ALL, EVEN, text=(2, 2), layers=2),
    Case(ALL, UNEVEN, **LONG, text=(2, 1, 1), hidden=4),
    Case(EXTRAPOLATED, EVEN, **LONG, layers=5),
    Case(EXTRAPOLATED, UNEVEN, text=(2, 1, 1), hidden=4, layers=5, wider=1),
    Case(EXTRAPOLATED, EVEN, layers=5, wider=1),
    Case("fresh-edges:extrapolated=false", EVEN, **LONG, text=(2, 2)),
    Case("fresh-edges:extrapolated=false", UNEVEN, text=(2, 1, 1), layers=2),
    Case("fresh-edges", EVEN, **LONG, text=1),
    Case("fresh-edges", UNEVEN, text=(2, 1, 1), hidden=4),
    Case("fresh-edges:extrapolated=false,correction=linear", (7, 8), **LONG, text=(2, 2)),
    Case(POOLED, (3, 5, 2), **LONG),
    Case(f"{POOLED},correction=none", (3, 5, 2), text=2, hidden=4),
    Case(POOLED, (1, 1), layers=2, hidden=None),
    Case(f"{POOLED},correction=none", (3, 5, 2), text=2, hidden=None),
    Case("displaced", UNEVEN, text=2, hidden=None),
    Case("fresh-edges:extrapolated=false,correction=linear", (5, 8), **LONG, text=(2, 1)),
    Case("fresh-edges:correction=linear", (5, 8), **LONG, text=(2, 1)),
    Case("fresh-edges:context=partials,refresh=2", UNEVEN, **LONG, layers=3),
    Case("fresh-edges:context=partials,refresh=3", EVEN, text=2, hidden=4, layers=3),
]
FEW_BITS = [
    (strategy, bits)
    for strategy in (ALL, EXTRAPOLATED, f"{POOLED},correction=none", "fresh-edges:correction=affine")
    for bits in (8, 4)
]
TRANSPORTS = [on_ranks, on_nccl]
PAUSES = {"ran": (0, 1, 2, 4, 5, 6, 7), "exact": (0, 4)}


@pytest.fixture(autouse=True)
def nothing_is_read_before_it_is_written() -> Iterator[None]:
    """Memory without values is full of NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(1).isnan().item()
    yield
    torch.use_deterministic_algorithms(False)


def as_sent(case: Case, where: Any) -> Case:
    """The case as the transport has it: over NCCL owners extrapolate what they correct."""
    options: Any = case.policy.context
    both = getattr(options, "extrapolated", False) and options.correction != "none"
    return replace(case, by_owners=both and where is on_nccl)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("where", TRANSPORTS)
def test_keys_of_the_last_step(case: Case, where: Any) -> None:
    case = as_sent(case, where)
    assert max(errors(case, where(case))) <= SAME


@pytest.mark.parametrize(
    "case",
    [
        Case(ALL, EVEN, layers=2),
        Case(EXTRAPOLATED, EVEN, **LONG, layers=2),
        Case("fresh-edges", UNEVEN, layers=2, text=(2, 1, 1)),
        Case(POOLED, (1, 1), **LONG, layers=2),
        Case(f"{POOLED},correction=none", (3, 5, 2), layers=2),
        Case("displaced:preset=paper", EVEN, layers=2),
        Case("pcpp:fraction=0.4,context=paper", (2, 3, 2), layers=2),
        Case("fresh-edges:context=partials,refresh=2", EVEN, layers=2),
    ],
    ids=str,
)
def test_nothing_writes_to_a_message_that_is_being_sent(case: Case) -> None:
    assert max(errors(case, on_nccl(case, collective=False))) <= SAME


@pytest.mark.parametrize("where", TRANSPORTS)
@pytest.mark.parametrize(
    "strategy", [ALL, EXTRAPOLATED, "fresh-edges", POOLED, "fresh-edges:context=partials,refresh=1"]
)
def test_frozen_keys_are_those_of_the_last_exact_step(strategy: str, where: Any) -> None:
    """Also in the image after one with keys of each last step, whose text was split. Nothing is sent any more."""
    case = Case(strategy, EVEN, text=4, exact=(0, 1), is_frozen=True)
    before = replace(case, text=4 if "partials" in strategy else (2, 2), is_frozen=False)
    for cases in ((case,), (before, case)):
        assert max(errors(case, where(*cases))) <= SAME
    for sent in where(case, facts=lambda history: history.comm.traffic.total_bytes):
        assert 0 < sent[0] < sent[1] == sent[-1]


@pytest.mark.parametrize("where", TRANSPORTS)
@pytest.mark.parametrize("strategy", [ALL, EXTRAPOLATED, "fresh-edges"])
def test_nothing_is_left_of_the_image_before(strategy: str, where: Any) -> None:
    """Nor where the parts of its text were others."""
    case = as_sent(Case(strategy, EVEN, text=(2, 2)), where)
    for text in ((2, 2), (1, 3)):
        assert max(errors(case, where(replace(case, text=text, layers=2), case))) <= SAME


@pytest.mark.parametrize("where", TRANSPORTS)
@pytest.mark.parametrize("strategy", [EXTRAPOLATED, "fresh-edges:extrapolated=false", "displaced:preset=paper"])
def test_an_image_after_one_that_failed_in_the_middle(strategy: str, where: Any) -> None:
    """Messages of the last step and of this one are under way."""
    case = Case(strategy, EVEN, layers=5)
    assert max(errors(case, where(replace(case, fails_at=(2, 1)), case))) <= SAME


@pytest.mark.parametrize("where", TRANSPORTS)
@pytest.mark.parametrize("strategy", [ALL, "fresh-edges:extrapolated=false", "pcpp:fraction=0.4"])
def test_layers_that_are_left_out_of_a_step_have_keys_of_the_one_before(strategy: str, where: Any) -> None:
    skipped = ((2, 0), (2, 1), (2, 3), (2, 6))
    case = Case(strategy, EVEN, ran=(0, 1, 2, 3, 4), layers=7, skipped=skipped)
    assert max(errors(case, where(case))) <= SAME


@pytest.mark.parametrize("where", TRANSPORTS)
@pytest.mark.parametrize("strategy", [EXTRAPOLATED, "displaced:preset=paper"])
def test_nothing_is_kept_of_images_of_another_size(strategy: str, where: Any) -> None:
    case, known = Case(strategy, EVEN, layers=2), defaultdict[int, list[Any]](list)

    def note(history: StaleState) -> bool:
        call, of_rank = history.cache._call, known[history.comm.transport.rank]
        now = [*(entry.state for entry in call.entries.values()), *call.memories.values()]
        of_rank.extend(map(weakref.ref, now))
        gc.collect()
        return {id(each()) for each in of_rank if each() is not None} == set(map(id, now))

    sizes = [replace(case, rows=rows) for rows in ((2, 3), (3, 2), EVEN)]
    gc.collect()
    gc.freeze()  # what earlier tests have left is not looked at again after each evaluation
    assert all(is_all for of_rank in where(*sizes, facts=note) for is_all in of_rank)


@pytest.mark.parametrize("strategy", [ALL, EXTRAPOLATED, "fresh-edges", f"{POOLED},bits=8"])
@pytest.mark.parametrize("rows", [EVEN, UNEVEN])
def test_what_the_next_step_reads_does_not_queue_before_what_this_one_needs(
    strategy: str, rows: tuple[int, ...]
) -> None:
    """Tokens for the next step, and text and corrections of this one, go through communicators of their own."""
    case, used = Case(strategy, rows, text=(1,) * len(rows), layers=2), set[str]()
    is_stale = set[int]()
    post = SimulatedCommunicator.post

    def noted(communicator: SimulatedCommunicator, group: Any, thread: int) -> None:
        if group.rank in is_stale:
            used.add(communicator.name)
        post(communicator, group, thread)

    with mock.patch.object(SimulatedCommunicator, "post", noted):
        on_nccl(case, facts=lambda history: is_stale.add(history.comm.transport.rank))
    assert len(used) == 2


@pytest.mark.parametrize("where", TRANSPORTS)
@pytest.mark.parametrize(
    "strategy", ["displaced", EXTRAPOLATED, "fresh-edges", f"{POOLED},correction=none", "fresh-edges:context=partials"]
)
def test_a_branch_of_guidance_that_pauses_begins_anew(strategy: str, where: Any) -> None:
    """Though the other branch goes on, so that the lengths of all steps are known."""
    case = as_sent(Case(strategy, EVEN, **PAUSES, branch=1), where)
    assert max(errors(case, where(case))) <= SAME


@pytest.mark.parametrize("where", TRANSPORTS)
@pytest.mark.parametrize(("strategy", "bits"), first_of(FEW_BITS, *FEW_BITS[::3]))
def test_differences_in_few_bits_are_whole_after_an_exact_step_and_catch_up(
    strategy: str, bits: int, where: Any
) -> None:
    case = Case(f"{strategy},bits={bits}", (3, 5, 2), exact=(0, 3, 4), text=(2, 1, 1), still_from=6)
    case = replace(case, ran=tuple(range(len(TIMES))))
    found = errors(case, where(replace(case, exact=(0,)), case))
    assert max(found[:2] + found[3:6]) <= SAME  # keys of an exact step are sent as they are
    assert SAME < found[6] <= {8: 0.02, 4: 0.4}[bits]
    assert found[-1] < 0.1 * found[6]  # what has been rounded off is sent with the next difference


def recording(kept: list[tuple[int, int]]) -> Any:
    """A kernel that notes how many keys it is given, and the alike of torch's."""

    def attend(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        kept.append((key.shape[2], value.shape[2]))
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, **options)

    return attend


@pytest.mark.parametrize("where", TRANSPORTS)
def test_a_kernel_gets_all_keys_at_once(where: Any) -> None:
    case, keys = Case("displaced", UNEVEN, text=2, hidden=4), list[tuple[int, int]]()
    assert max(errors(case, where(case, kernel=recording(keys)))) <= SAME
    assert keys == [(case.total, case.total)] * len(case.ran) * len(case.rows)


@pytest.mark.parametrize("where", TRANSPORTS)
def test_room_is_asked_for_before_anything_is_stored_and_not_again(where: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or layers that fit would be refused for the memory that those before them have taken."""
    case, asked = Case(ALL, EVEN, layers=3), list[int]()

    def free() -> int:
        asked.append(1)
        return 10**6 if len(asked) <= len(case.rows) else 0

    monkeypatch.setattr("patchpar.shard.stale.stale_layout.free_memory", free)
    assert max(errors(case, where(case))) <= SAME
    assert len(asked) == len(case.rows)
    with pytest.raises(PlanError, match="only 0 B for 2 CPU ranks are free"):
        where(case)


def test_drift_is_how_far_keys_of_the_same_image_have_moved() -> None:
    """The sum of squares of what has changed in this rank's keys, and that of the keys."""
    case = Case("fresh-edges:quality=0.1", (6, 7), exact=(0,), layers=2, text=2)
    for rank, found in enumerate(on_ranks(case, case, facts=lambda history: history.cache.drift.clone())):
        assert found[0][0].item() == 0
        for evaluation in case.ran:
            now, then = (
                torch.stack(
                    [case.whole(each, layer)[1][:, :, slice(*case.spans[rank])][:, :, ::16] for layer in (0, 1)]
                )
                for each in (evaluation, evaluation - 1)
            )
            wanted = [(now - then).square().sum(), now.square().sum()]
            if evaluation:
                torch.testing.assert_close(found[evaluation], torch.stack(wanted))
