"""Every strategy keeps NCCL's rules, with two to five ranks and uneven bands, and predicts what it does elsewhere."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from patchpar.comm.collectives import Communicator
from patchpar.comm.transport import Transport, packing, torch_work
from patchpar.comm.transport.torch_p2p import TorchTransport
from patchpar.errors import ExchangeError
from patchpar.plan.mesh import Mesh
from patchpar.plan.step_clock import StepClock
from patchpar.shard.attention import fresh_exchange, stale
from patchpar.shard.attention.token_buffer import attend_to_tokens, fresh_part
from patchpar.shard.local_patch import LocalPatch
from patchpar.shard.sdpa import AttentionCall
from patchpar.shard.stale.stale_layout import StaleLayout
from tests.breadth import first_of
from tests.conformance.stand_in import StandIn
from tests.stale.on_ranks import image, patched
from tests.stale.runs import Run, errors, sites_of
from tests.unit.threads import on_threads

STRATEGIES = (
    "exact",
    "exact:attention=ring",
    "exact:attention=two-way-ring",
    "exact:attention=token-ring",
    "exact:ulysses=2",
    "displaced",
    "displaced:preset=paper",
    "displaced:group_norm=sync",
    "pcpp",
    "pcpp:context=paper",
    "fresh-edges",
    "fresh-edges:context=pooled",
    "fresh-edges:context=partials",
    "fresh-edges:context=pooled,bits=4",
    "fresh-edges:bits=8",
    "fresh-edges:correction=linear",
    "fresh-edges:quality=1",
)
OFTEN = (("fresh-edges", 3),)  # whose first step is exact
PATIENCE = 120.0  # seconds; only a rank that stopped for good takes so long
ROUNDING = 1e-5  # partial attentions are merged as they arrive
WORLDS = {"exact:ulysses=2": (2, 4)}  # 2 divides the number of ranks
RECEIVED_DIRECTLY = ("exact", "displaced", "fresh-edges", "fresh-edges:correction=none,extrapolated=false")
BUILDING = threading.Lock()
EXACT_AT_FIRST = ("displaced", "pcpp", "fresh-edges")


@dataclass(frozen=True)
class ThreadRank:
    """What `tests.stale.on_ranks` wants to know of a rank."""

    transport: Transport
    world: int

    @property
    def rank(self) -> int:
        return self.transport.rank

    def comm(self) -> Communicator:
        return Communicator(self.transport)

    def mesh(self, **degrees: int) -> Mesh:
        return Mesh(self.rank, range(self.world), **degrees)


def run_of(strategy: str, size: tuple[int, int] = (27, 9)) -> Run:
    """Some evaluations, of which the first is exact; 27 rows, so that no number of bands up to five is even."""
    if strategy.startswith(EXACT_AT_FIRST):
        strategy += ("," if ":" in strategy else ":") + "warmup_steps=1"
        return Run(strategy=strategy, size=size, evaluations=3)
    return Run(strategy=strategy, size=size, evaluations=1)


def predicted(transport: Transport, run: Run, world: int, images: int = 2) -> list[list[Tensor]]:
    """Predictions of some images."""
    clock = StepClock()
    with BUILDING:  # weights are drawn from the generator that all threads share
        bands = patched(ThreadRank(transport, world), run, clock)  # type: ignore[arg-type]
    return [image(bands, clock, run) for _ in range(images)]


@pytest.fixture(scope="module", autouse=True)
def probed_once() -> None:
    sites_of("sd")


@pytest.mark.parametrize(
    ("strategy", "world"),
    first_of([(strategy, world) for strategy in STRATEGIES for world in WORLDS.get(strategy, (2, 3, 4, 5))], *OFTEN),
)
def test_a_strategy_keeps_the_rules(strategy: str, world: int) -> None:
    keeps_the_rules(run_of(strategy), world)


@pytest.mark.parametrize(
    ("strategy", "world"),
    first_of(
        [(strategy, world) for strategy in RECEIVED_DIRECTLY for world in (2, 4)],
        *((each, 2) for each in RECEIVED_DIRECTLY if each == "exact"),
    ),
)
def test_equal_parts_are_received_where_they_are_read(strategy: str, world: int) -> None:
    """One operation into the buffer of all ranks' keys and values, without a copy."""
    all_gather, gathered = Communicator.all_gather, []

    def noted(comm: Communicator, *args: Any, into: Tensor | None = None, **kwargs: Any) -> Any:
        work = all_gather(comm, *args, into=into, **kwargs)
        if into is not None and comm.transport.collectives is not None:
            gathered.append((into, work))
        return work

    with (
        mock.patch.object(torch_work, "_into", wraps=torch_work._into) as received,
        mock.patch.object(Communicator, "all_gather", noted),
    ):
        keeps_the_rules(run_of(strategy, (32, 8)), world)
    found = [packing.offset_of(own) == packing.offset_of(x) for (own, x), _ in received.call_args_list]
    found += [work.wait() is into for into, work in gathered]
    assert found
    assert all(found)


def keeps_the_rules(run: Run, world: int) -> None:
    """Run it on ranks of the simulator, and on ranks that share memory."""
    stand_in = StandIn(world)
    found = stand_in.run(lambda transport: predicted(transport, run, world))
    assert [each for each in found if isinstance(each, BaseException)] == []
    assert stand_in.faults == []
    with at_once() if "bits=" in run.strategy else nullcontext(), sent_late(run.strategy):
        wanted = on_threads(world, torch.no_grad()(predicted), run, world, deadline=PATIENCE)
    for got, want in zip(found, wanted, strict=True):
        assert_same(got, want)


def at_once() -> Any:
    """Context in which ranks that share memory attend to all fresh keys by one attention, too, as those of NCCL do.

    Attention that is merged from parts rounds otherwise, by some 1e-7. A quantised value that is near the middle of two
    levels then becomes the other one, and 4 bits have 15 levels: predictions of 4 ranks differ by 1.4e-5, though both
    are as near to the exact one. With the same rounding before them, quantised messages are equal to the bit.
    """

    def attend(
        patch: LocalPatch, where: str, _: Any, call: AttentionCall, layout: StaleLayout, fresh: Tensor
    ) -> Tensor:
        patch.comm.exchange(where, [fresh_part(patch.axis, layout.fresh, fresh)]).wait()
        return attend_to_tokens(call, fresh, call.attn_mask)

    return mock.patch.object(stale, "_attend_now", attend)


@contextmanager
def sent_late(strategy: str) -> Iterator[None]:
    """Context in which ranks that share memory send tokens late, too, so that owners extrapolate them.

    They average and quantise what they send piece by piece.
    """
    if not strategy.startswith("fresh-edges") or "correction=none" in strategy:
        yield
        return
    of_stale, of_fresh = (
        mock.patch.object(each, "collectives_of", return_value=True) for each in (stale, fresh_exchange)
    )
    with of_stale, of_fresh, mock.patch.object(StaleLayout, "packs", False):
        yield


class Stop(torch.OutOfMemoryError):
    """What a rank raises in the middle of a call."""


@pytest.mark.parametrize(("strategy", "world", "number"), [("exact", 2, 12), ("fresh-edges", 2, 48), ("pcpp", 3, 7)])
def test_an_exception_at_an_exchange_frees_every_rank(strategy: str, world: int, number: int) -> None:
    """The others get an error that names the exchange point, and none of them exchanges anything afterwards."""
    frees_every_rank(lambda transport: predicted(transport, run_of(strategy), world), world, number)


def frees_every_rank(call: Callable[[TorchTransport], Any], world: int, number: int, stopping: int = 1) -> None:
    """Stop a rank at its exchange of this number in a call."""
    stand_in = StandIn(world)
    again: list[str] = []
    start, started = Communicator._start, iter(range(number + 1))

    def begin(comm: Communicator, *exchange: Any) -> Any:
        if comm.transport.rank == stopping and next(started) == number:
            raise Stop
        return start(comm, *exchange)

    def stopped(transport: TorchTransport) -> Any:
        try:
            return call(transport)
        except ExchangeError:
            with pytest.raises(ExchangeError, match=r"rank \d at the next one: .* is not used again") as error:
                transport.send_recv([], [], "the next one")
            again.append(str(error.value))
            raise

    with mock.patch.object(Communicator, "_start", begin):
        found = stand_in.run(stopped)
    assert isinstance(found.pop(stopping), Stop)
    for waiting in found:
        assert isinstance(waiting, ExchangeError)
        assert re.search(r"\brank \d at ", str(waiting))
        assert any(
            message in str(waiting) for message in ("no message from ranks", "have not taken part in the exchange")
        )
    assert len(again) == world - 1


def assert_same(found: Any, wanted: Any) -> None:
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert max(errors(one, other)) <= ROUNDING
