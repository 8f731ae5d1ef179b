"""Where the process asks for a value it launches nothing until it is there, and compiled code begins anew."""

from __future__ import annotations

import pytest
import torch

from patchpar.models.dry_run.live_bytes import LiveBytes
from patchpar.models.dry_run.meta_mode import MADE_UP, META, MetaMode
from patchpar.plan.replay.machine import Machine
from patchpar.plan.replay.price import AS_GRAPH, ASSUMED, BLOCKS_COMPILED, CostAssumptions, Prices
from patchpar.plan.replay.replay import replay
from patchpar.plan.replay.tape import AGAIN, QUESTIONS, Boundary, Kernel, Operator, Tape
from patchpar.plan.replay.topology import equal_ports

DEVICE = Machine.parse("A100").device
ADD, ASK = Operator("add", "float16", 0, 8), Operator("_local_scalar_dense", "bool", 0, 1)


@pytest.mark.parametrize("asks", [False, True])
def test_the_device_idles_for_one_launch_after_each_question(*, asks: bool) -> None:
    """Else the process is ahead of it, as kernels take longer than their launches."""
    tape = (Kernel("block", 1.0, 0.25, waits=asks),) * 8
    assert replay([tape], equal_ports(1.0)).seconds == pytest.approx(8 * 1.25 if asks else 0.25 + 8)


def test_a_process_that_is_behind_the_device_loses_nothing_by_a_question() -> None:
    for asks in (False, True):
        tape = (Kernel("block", 0.25, 1.0, waits=asks),) * 8
        assert replay([tape], equal_ports(1.0)).seconds == pytest.approx(8 + 0.25 * (1 + 7 * asks))


def priced(tape: Tape, costs: CostAssumptions) -> list[Kernel]:
    return [each for each in Prices(DEVICE, costs).of(tape) if isinstance(each, Kernel)]


def test_a_question_is_the_end_of_what_the_process_launches_at_a_time() -> None:
    found = priced((Boundary("block"), ADD, ADD, ASK, ADD), ASSUMED)
    assert [each.waits for each in found] == [True, False]
    assert [each.host for each in found] == pytest.approx([3 * ASSUMED.launch, ASSUMED.launch])


def test_graphs_wait_for_no_process() -> None:
    with_question, without = ((Boundary("block"), ADD, each, ADD) for each in (ASK, ADD))
    found = [replay([Prices(DEVICE, AS_GRAPH).of(tape)], equal_ports(1.0)).seconds for tape in (with_question, without)]
    assert found[0] == pytest.approx(found[1])


def test_compiled_code_begins_in_each_outer_block_and_after_each_question() -> None:
    """Not in what is inside a block, nor where a step or another call of the denoiser begins."""
    names = ("net.blocks.0", "net.blocks.0.ff", "net.blocks.1")
    blocks: Tape = tuple(entry for name in names for entry in (Boundary(name), ADD))
    tape = (Boundary("step 0", is_step=True), *blocks, ASK, ADD, Boundary(AGAIN), *blocks)
    assert sum(each.host == BLOCKS_COMPILED.region for each in priced(tape, BLOCKS_COMPILED)) == 2 + 1 + 2
    assert not [each for each in priced(tape, ASSUMED) if not each.seconds]


def test_what_is_answered_without_values_is_on_a_tape() -> None:
    assert set(MADE_UP) == QUESTIONS
    found: list[Operator] = []
    x = torch.empty(4, 4, device=META)
    with MetaMode(LiveBytes(""), found.append):
        assert bool((x > 0).any())
        x[0, 0].item()
        torch.equal(x, x)
        x.nonzero()
        x.masked_select(x > 0)
        assert x.flatten().long().bincount().tolist() == [16]
    assert [each.name for each in found if each.name in QUESTIONS] == [
        *("_local_scalar_dense", "_local_scalar_dense", "equal", "nonzero", "masked_select", "bincount")
    ]
