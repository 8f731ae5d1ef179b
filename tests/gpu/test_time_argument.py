"""A timestep that is a number is an argument of the graph, where the network makes a tensor of it and does no more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from patchpar.comm.traffic import CommStats
from patchpar.plan.mesh import Axis
from patchpar.shard.graphs import step_graphs
from patchpar.shard.graphs.step_graphs import Stateless, StepGraphs
from patchpar.shard.graphs.time_argument import MADE_OF_NUMBERS, TimeArgument
from tests import tiny
from tests.breadth import first_of
from tests.conformance.stand_in import SimulatedRank
from tests.gpu.op_tape import TapeRecorder

CPU = torch.device("cpu")
PIPELINES = {
    "sd": "UNet2DConditionModel",
    "text_to_video": "UNet3DConditionModel",
    "animatediff": "UNetMotionModel",
    "svd": "UNetSpatioTemporalConditionModel",
    "kandinsky3": "Kandinsky3UNet",
    "ddpm": "UNet2DModel",
}


class Seen(Exception):
    """The call of a network, which is as far as its pipeline goes."""


def call_of(name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The first call of a pipeline's network."""
    found = tiny.build(name)

    def see(module: nn.Module, args: Any, kwargs: Any) -> None:
        raise Seen(args, kwargs)

    handle = found.denoiser.register_forward_pre_hook(see, with_kwargs=True)
    with pytest.raises(Seen) as seen:
        found.pipe(**found.call_kwargs, num_inference_steps=2)
    handle.remove()
    return found.denoiser, *seen.value.args


@pytest.mark.parametrize("name", first_of(PIPELINES, "sd"))
def test_the_network_computes_the_same_of_the_tensor(name: str) -> None:
    network, args, kwargs = call_of(name)
    assert type(network).__name__ == PIPELINES[name]
    argument, time = TimeArgument(network), kwargs.get("timestep", args[1] if len(args) > 1 else None)
    assert argument.as_tensor((args, kwargs), CPU) == (args, kwargs), "a tensor stays"
    assert isinstance(time, torch.Tensor)
    outputs = []
    for value in (301, 300.625):
        given = (args, kwargs | {"timestep": value}) if "timestep" in kwargs else ((args[0], value, *args[2:]), kwargs)
        as_tensor = argument.as_tensor(given, CPU)
        with torch.no_grad():
            want, got = (network(*a, **b)[0] for a, b in (given, as_tensor))
        made = as_tensor[1].get("timestep", as_tensor[0][1] if len(as_tensor[0]) > 1 else None)
        assert isinstance(made, torch.Tensor)
        assert torch.equal(got, want)
        outputs.append(want)
    assert not torch.equal(*outputs), "control"


def test_every_other_network_keeps_its_number() -> None:
    class UNet2DConditionModel(nn.Module):
        def forward(self, sample: Any, timestep: Any) -> Any:
            return sample * timestep

    assert TimeArgument(UNet2DConditionModel()).as_tensor(((1, 2.0), {}), CPU) == ((1, 2.0), {})
    assert TimeArgument(nn.Linear(1, 1)).as_tensor(((1, 2.0), {}), CPU) == ((1, 2.0), {})


def test_steps_of_all_numbers_are_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_graphs, "every_rank_has", lambda mesh, where, here: here)
    network, args, kwargs = call_of("sd")
    comm = type("Comm", (), {"traffic": CommStats(), "beat": lambda *_: None})()
    comm.transport = type("Transport", (), {"device": CPU, "check": lambda *_: None})()
    graphs = StepGraphs(network, TapeRecorder(SimulatedRank()), (comm, Axis("patch", 0, 1, (0,))))
    with torch.no_grad():
        for number in range(6):
            given = (args[0], 900.5 - number, *args[2:])
            found = graphs.run("exact", network, (given, kwargs), Stateless())
            assert torch.equal(found[0], network(*given, **kwargs)[0])
    assert graphs.replays == 5
    assert len(graphs._graphs) == 1


def test_known_networks_are_diffusers() -> None:
    import diffusers

    assert all(hasattr(diffusers, name) for name in MADE_OF_NUMBERS)
