"""What the process does for an exchange point in a steady step, counted and not timed: functions written in Python.

On a GPU they are most of the time in which the process enqueues a step beyond that of the plain model; the times are
in docs/figures/gpu-counts.md. The networks have the layers of SDXL and FLUX, narrow and few.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from benchmarks.gpu.denoisers import SHORT
from benchmarks.gpu.fake_launch import kernels_on_cpu
from benchmarks.gpu.host_time import (
    TINY,
    Step,
    Tiny,
    python_calls,
    quiet_rank,
    single_exchanges,
    steady,
    torch_functions,
)
from patchpar.comm.collectives import Communicator
from patchpar.shard.kernels.group_moments import moments_of_band
from patchpar.shard.transformer import install
from tests.gpu.short_models import WORLD

# Ceilings only go down: who needs fewer calls enters the new numbers, which a failure prints.
CEILINGS = {
    ("sdxl", "exact"): 53,
    ("sdxl", "fresh-edges"): 53,  # a seventh of a call of each is to know the kind of a denoiser call again
    ("sdxl", "fresh-edges:context=pooled"): 55,
    ("sdxl", "pcpp"): 236,  # few exchanges, in which many norms and convolutions send for the next step
    ("flux", "exact"): 84,
    ("flux", "exact:ulysses=4"): 63,
    ("flux", "exact:attention=ring"): 61,
    ("flux", "fresh-edges"): 68,  # owners extrapolate what they send
    ("flux", "fresh-edges:correction=none"): 89,
    ("flux", "fresh-edges:context=pooled"): 96,
    ("flux", "pcpp"): 175,
}
"""Calls that an exchange point adds to those of the plain model, with the layer around it; rounded up."""
INLINED = int(sys.version_info >= (3, 12))  # comprehensions, of which the plain model has more: they are no calls there
OF_ONE_EXCHANGE = {
    "keys and values of all ranks, into one buffer": 18,
    "corrections of all ranks": 20,
    "moments of all ranks": 20,
    "moments of all ranks, edge rows of two": 31,
}
"""Calls from the start of an exchange to the end of its wait."""
OF_TORCH = 11
"""Functions of torch that one exchange calls; of all kinds the most: two of them take the edge rows of a band."""
EVENTS = ("_Event", "record")
COLLECTIVES = ("all_gather_single", "_allgather_base", "all_to_all_single", "alltoall_base")


@pytest.fixture(scope="module")
def models() -> Iterator[dict[str, Tiny]]:
    with torch.no_grad(), quiet_rank(1, WORLD):
        yield {name: build(WORLD, SHORT[name]) for name, build in TINY.items()}


def added_calls(tiny: Tiny, strategy: str) -> float:
    """Calls that an exchange point adds."""
    with steady(tiny, strategy, 1, WORLD) as (step, exchanges):
        split = min(python_calls(step) for _ in range(3))  # a thread that watches deadlines wakes up now and then
        return (split - python_calls(tiny.band)) / exchanges


@pytest.mark.parametrize(("model", "strategy"), CEILINGS)
def test_an_exchange_point_calls_no_more_of_python_than_its_ceiling(
    models: dict[str, Tiny], model: str, strategy: str
) -> None:
    found = added_calls(models[model], strategy)
    assert found <= CEILINGS[model, strategy] + INLINED, f"{found:.1f} calls"


@pytest.mark.parametrize("strategy", ["exact", "fresh-edges"])
@pytest.mark.parametrize("model", ["sdxl", "flux"])
def test_no_attention_layer_of_a_split_step_looks_up_a_signature(
    models: dict[str, Tiny], model: str, strategy: str
) -> None:
    """Which diffusers does in each, and which takes longer than an exchange."""
    with steady(models[model], strategy, 1, WORLD) as (step, _):
        assert look_ups(step) == 0
    assert look_ups(models[model].band) > 1


def look_ups(step: Step) -> int:
    """Signatures looked up in a step."""
    with mock.patch.object(inspect, "signature", wraps=inspect.signature) as signature:
        step()
    return signature.call_count


@pytest.mark.parametrize("strategy", ["exact", "fresh-edges:context=pooled"])
def test_arguments_of_blocks_are_looked_at_once_in_a_step(models: dict[str, Tiny], strategy: str) -> None:
    """Leaf by leaf: those of the first block, which says how tokens are split. Others are called as before."""
    with (
        steady(models["flux"], strategy, 1, WORLD) as (step, _),
        mock.patch.object(install, "leaves_and_form", wraps=install.leaves_and_form) as looked,
    ):
        step()
    assert sum(SHORT["flux"].values()) > 1
    assert looked.call_count == 1


def test_a_call_more_in_every_exchange_is_counted(models: dict[str, Tiny], monkeypatch: pytest.MonkeyPatch) -> None:
    before = added_calls(models["flux"], "exact")
    start = Communicator._start
    monkeypatch.setattr(Communicator, "_start", lambda comm, *exchange: start(comm, *exchange))
    assert added_calls(models["flux"], "exact") == pytest.approx(before + 1)


def test_a_single_exchange_calls_no_more_of_python_than_its_ceiling(models: dict[str, Tiny]) -> None:
    found = {}
    for name, exchange in single_exchanges(1, WORLD).items():
        exchange()
        found[name] = min(python_calls(exchange) for _ in range(3))
    assert found.keys() == OF_ONE_EXCHANGE.keys()
    assert not {name for name, calls in found.items() if calls > OF_ONE_EXCHANGE[name]}, found


def test_a_single_exchange_calls_one_collective_and_few_other_functions_of_torch(models: dict[str, Tiny]) -> None:
    for name, exchange in single_exchanges(1, WORLD).items():
        exchange()
        called = [function.__name__ for function, _, _ in torch_functions(exchange)]
        assert len([each for each in called if each in COLLECTIVES]) == 1, name
        assert called.count("record") == 2, "of the stream, before and after its wait"
        assert len([each for each in called if each not in EVENTS]) <= OF_TORCH, (name, called)
        assert [function.__name__ for function, _, _ in torch_functions(exchange)] == called


def test_a_fused_operator_is_no_eager_twin_while_kernels_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    x, eager = torch.zeros(1, 4, 2, 2), []
    monkeypatch.setattr(torch, "native_group_norm", lambda *_: eager.append("moments"))
    with torch.no_grad(), kernels_on_cpu():
        assert moments_of_band(x, 2).shape == (5,)
    assert not eager
