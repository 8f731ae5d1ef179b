"""A replay computes, counts and leaves what the step would have, on a device that pretends to replay; else it runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from patchpar.comm.traffic import CommStats
from patchpar.errors import ExchangeError
from patchpar.plan.mesh import Axis
from patchpar.shard.graphs import step_graphs
from patchpar.shard.graphs.recorder import CaptureRefused
from patchpar.shard.graphs.step_graphs import REPLAY, Stateless, StepGraphs


class Replayed:
    """A captured step: `replay` computes it anew, and writes to the output of the capture."""

    fraction, untaken = 0.0, 1.0

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        self._compute, self.output = compute, compute()
        self.output.fill_(torch.nan)  # the capture has not run it

    def replay(self) -> None:
        self.output.copy_(self._compute())


class Carried(Stateless):
    """One value that a step leaves to the next. What the process knows of it is a `name`."""

    def __init__(self) -> None:
        self.generation, self.value, self.name = 0, torch.zeros(1), "nothing"

    def stored(self) -> Iterator[Tensor]:
        yield self.value

    def snapshot(self) -> Any:
        return self.name

    def set_back(self, snapshot: Any) -> None:
        self.name = snapshot


class Denoiser:
    """Steps of a network of one weight: `did` is what the last one did, `sent` what all have sent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, refuses: str = "") -> None:
        self.network, self.state, self.did, self.beats = nn.Linear(1, 1, bias=False), Carried(), "", list[str]()
        self.failed = False
        monkeypatch.setattr(step_graphs, "every_rank_has", lambda mesh, where, here: here)
        transport = SimpleNamespace(device=torch.device("cpu"), check=self._check)
        self.comm: Any = SimpleNamespace(transport=transport, traffic=CommStats(), beat=self.beats.append)

        def capture(step: Callable[[], Tensor], what: str) -> Any:
            self.did += " captured"
            if refuses:
                raise CaptureRefused(refuses)
            step()
            x: Any = step.__closure__
            arguments = next(cell.cell_contents for cell in x if hasattr(cell.cell_contents, "call"))
            return Replayed(lambda weight=self.network.weight: weight[0] * arguments.call[0][0])

        recorder: Any = SimpleNamespace(capture=capture)
        self.graphs = StepGraphs(self.network, recorder, (self.comm, Axis("patch", 0, 1, (0,))))

    def _check(self, where: str) -> None:
        assert where == REPLAY
        if self.failed:
            raise ExchangeError("an exchange has failed")

    def _step(self, x: Tensor) -> Tensor:
        self.did += " ran"
        self.comm.traffic.book([("kv", 8, 4)])
        self.state.name = f"after {self.state.generation}"
        return self.network.weight[0] * x

    @torch.no_grad()
    def step(self, number: float) -> Tensor:
        """The output of a step for this number."""
        self.did, self.state.name = "", "before"
        found: Tensor = self.graphs.run("stale", self._step, ((torch.full((1,), number),), {}), self.state)
        assert self.state.name == f"after {self.state.generation}"
        return found

    def steps(self, *numbers: float) -> list[str]:
        """What steps do; each computes what the network does, and sends as much."""
        found = []
        for number in numbers:
            before = dict(self.comm.traffic.bytes_sent), dict(self.comm.traffic.bytes_received)
            assert torch.equal(self.step(number), self.network.weight[0].detach() * number)
            sent, received = self.comm.traffic.bytes_sent["kv"], self.comm.traffic.bytes_received["kv"]
            assert (sent - before[0].get("kv", 0), received - before[1].get("kv", 0)) == (8, 4)
            found.append(self.did.split()[0] if self.did else "replayed")
        return found


ANEW = ["ran", "captured", "replayed", "replayed"]


@pytest.fixture
def denoiser(monkeypatch: pytest.MonkeyPatch) -> Denoiser:
    return Denoiser(monkeypatch)


def test_a_replay_counts_and_leaves_what_the_step_does(denoiser: Denoiser) -> None:
    assert denoiser.steps(1, 2, 3, 4) == ANEW
    assert denoiser.graphs.replays == 3, "that which follows a capture is one too"
    assert denoiser.beats == [REPLAY] * 3


def test_an_output_stays_when_the_next_step_is_replayed(denoiser: Denoiser) -> None:
    found = [denoiser.step(number) for number in (1, 2, 3, 4)]
    assert found == [denoiser.network.weight * number for number in (1, 2, 3, 4)]


def test_weights_that_are_written_where_they_lie_are_read_by_replays(denoiser: Denoiser) -> None:
    denoiser.steps(1, 2, 3)
    denoiser.network.weight.data.fill_(5)
    denoiser.graphs.look_at_network()
    denoiser.graphs.look_at_network()
    assert denoiser.steps(4, 5) == ["replayed", "replayed"]


def test_weights_that_lie_elsewhere_end_graphs(denoiser: Denoiser, caplog: pytest.LogCaptureFixture) -> None:
    denoiser.graphs.look_at_network()
    denoiser.steps(1, 2, 3)
    denoiser.network.weight = nn.Parameter(torch.full((1, 1), 5.0))
    with caplog.at_level(logging.INFO, logger=step_graphs.log.name):
        denoiser.graphs.look_at_network()
    assert "weights have moved" in caplog.text
    assert denoiser.steps(1, 2, 3, 4) == ANEW


def test_without_a_look_the_old_weights_are_read(denoiser: Denoiser) -> None:
    """The control of the above."""
    denoiser.steps(1, 2, 3)
    denoiser.network.weight = nn.Parameter(torch.full((1, 1), 5.0))
    assert denoiser.step(1).item() != 5


def test_buffers_that_are_allocated_anew_end_graphs(denoiser: Denoiser) -> None:
    denoiser.steps(1, 2, 3)
    denoiser.state.generation += 1
    assert denoiser.steps(1, 2, 3, 4) == ANEW
    assert len(denoiser.graphs._graphs) == 1, "graphs of earlier buffers hold memory"


def test_no_replay_begins_after_an_exchange_has_failed(denoiser: Denoiser) -> None:
    denoiser.steps(1, 2, 3)
    denoiser.failed = True
    with pytest.raises(ExchangeError, match="an exchange has failed"):
        denoiser.step(1)
    assert denoiser.graphs.replays == 2


def test_what_is_refused_runs_and_is_tried_again_when_all_graphs_are_dropped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And said once for a reason, though steps of several kinds are refused for it."""
    denoiser = Denoiser(monkeypatch, refuses="an operation that it has not")
    assert denoiser.steps(1, 2, 3) == ["ran", "captured", "ran"]
    denoiser.state.generation += 1
    assert denoiser.steps(1, 2, 3) == ["ran", "captured", "ran"]
    line = "Linear cannot be captured as a graph: an operation that it has not: its steps run without graphs"
    assert caplog.messages == [line]
    assert denoiser.graphs.refused == "an operation that it has not"
    denoiser.graphs.clear()
    assert not denoiser.graphs.refused
    assert denoiser.steps(1, 2, 3) == ["ran", "captured", "ran"]


def test_a_call_of_another_shape_has_a_graph_of_its_own(denoiser: Denoiser) -> None:
    denoiser.steps(1, 2, 3)
    with torch.no_grad():
        for did in ("ran", "captured ran", "", ""):
            denoiser.did = ""
            x = torch.ones(2)
            found = denoiser.graphs.run("stale", denoiser._step, ((x,), {}), denoiser.state)
            assert torch.equal(found, denoiser.network.weight[0] * x)
            assert denoiser.did.strip() == did
    assert denoiser.steps(4) == ["replayed"]
