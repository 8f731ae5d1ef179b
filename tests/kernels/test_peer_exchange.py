"""Exchanges in symmetric memory: what one kernel brings, that it compiles for GPUs, and when NCCL is used instead."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch

from patchpar.comm.transport.programs import peer_exchange
from patchpar.comm.transport.symmetric_memory import CHUNKS, MappedMemory, PeerMemory
from tests.breadth import first_of
from tests.kernels import forked_ranks
from tests.kernels.conftest import WAIT, _Recorder


@pytest.mark.parametrize(
    ("world", "dtype"),
    first_of([(world, dtype) for world in (2, 3, 4) for dtype in (torch.float16, torch.int32)], (3, torch.float16)),
)
def test_every_rank_gets_what_the_others_sent(interpreter: ProcessPoolExecutor, world: int, dtype: torch.dtype) -> None:
    found = interpreter.submit(forked_ranks.run_forked, forked_ranks.rounds, world, dtype, 4).result(WAIT)
    assert found == [[]] * world


def test_without_the_memory_of_the_others_it_is_wrong(interpreter: ProcessPoolExecutor) -> None:
    found = interpreter.submit(forked_ranks.run_forked, forked_ranks.unread_rounds, 2).result(WAIT)
    assert all(isinstance(each, list) and each for each in found), found


def test_a_rank_that_waits_for_nothing_can_give_up(interpreter: ProcessPoolExecutor) -> None:
    waited, _ = interpreter.submit(forked_ranks.run_forked, forked_ranks.alone, 2).result(WAIT)
    assert 0.2 < waited < forked_ranks.GIVE_UP, waited


def test_one_launch_that_compiles_for_gpus(compiled: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[Any] = []
    recorder = _Recorder(peer_exchange.peer_exchange_program, launches)
    monkeypatch.setattr(peer_exchange, "peer_exchange_program", recorder)
    memory = torch.zeros(PeerMemory.bytes_for(4), dtype=torch.uint8)
    peers = PeerMemory(MappedMemory(memory, [memory.data_ptr()] * 4, None), 1)
    peers.all_gather(torch.zeros(6).half(), torch.zeros(4, 6).half())
    (launch,) = launches
    assert launch.grid == (4, CHUNKS)
    assert launch.arguments["WORD"].primitive_bitwidth == 32, "12 bytes are three words of 4"
    assert all(len(binary) > 1000 for binary in compiled(launch))
