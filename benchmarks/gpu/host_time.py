"""Time of the process in a step, without a GPU: networks as deep as SDXL and FLUX, so narrow that only Python counts.

On a GPU this is the time in which the process enqueues a step. Tensors are on the CPU and messages go nowhere, but all
of torch.distributed's own Python runs. A fused operator, one launch on a GPU, is what it is there up to the launch,
which is left out (`fake_launch`), instead of its eager twin of many operators. The split step runs in pairs with the
plain one of the same band, by a copy of the network that has no hooks (`paired`).

Beside the time stands how many functions written in Python run, which is the same on every machine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from benchmarks.gpu.denoisers import Denoiser, knowing_sites, knowing_tokens
from benchmarks.gpu.fake_cuda import EventCounts, _Event, cuda_names
from benchmarks.gpu.fake_launch import kernels_on_cpu
from benchmarks.gpu.fake_nccl import GroupCounts, fake_nccl
from benchmarks.gpu.paired import PairedTimes, in_pairs
from benchmarks.gpu.strategies import DEADLINE, installed
from benchmarks.volumes.shapes import SDXL
from patchpar.comm.collectives import Communicator
from patchpar.comm.transport.torch_collectives import _GroupMethods
from patchpar.comm.transport.torch_p2p import TorchTransport
from patchpar.plan.bands import split_bands
from patchpar.plan.mesh import Mesh
from patchpar.shard.local_patch import LocalPatch
from patchpar.shard.transformer.token_ranges import TokenGrid
from patchpar.shard.unet.discover import discover
from patchpar.shard.unet.layer_hooks import ConvFed, NormHook

CPU = torch.device("cpu")
COLUMNS = 8
STEPS_BEFORE = 4
"""Steps that are not measured: an exact one, and those in which caches fill."""
ROUNDS = 6
"""Times that each strategy is measured, with a part of its pairs, one strategy after the other."""
EXCHANGES = 20
"""Exchanges in one measurement of a single one: so few that most measurements end before another program runs."""
EXCHANGE_PAIRS = 5
"""Pairs of measurements of a single exchange for each pair of steps."""
FACTS = ("__get__", "data_ptr", "get_device")
"""Methods that read a fact of a tensor."""
Step = Callable[[], object]
TorchFunction = tuple[Callable[..., Any], Any, Any]
"""A function of torch with args and kwargs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiny:
    """A narrow network with a call of the whole image, and the call of one rank's band of a copy without hooks."""

    whole: Denoiser
    band: Step


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTime:
    """Times of the process in one step, the plain and then the split one, and the number of exchanges in the latter.

    `calls`: of functions written in Python, that each exchange point adds.
    """

    times: PairedTimes
    exchanges: int
    calls: float

    @classmethod
    def of_rounds(cls, rounds: Sequence[HostTime]) -> HostTime:
        """Return that of all rounds, of the pairs that others slowed least."""
        times = PairedTimes.together(each.times for each in rounds).least_disturbed
        return cls(times=times, exchanges=rounds[0].exchanges, calls=min(each.calls for each in rounds))

    @property
    def added(self) -> float:
        """Seconds added by each exchange point."""
        return self.times.difference / self.exchanges


def tiny_sdxl(world: int, layers: Mapping[str, Any] | None = None) -> Tiny:
    """A UNet as deep as SDXL's, both guidance branches in one call. `layers` replaces its numbers of layers."""
    from diffusers import UNet2DConditionModel

    narrow = {
        "block_out_channels": (32, 64, 128),
        "attention_head_dim": (1, 2, 4),
        "cross_attention_dim": 32,
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 32 + 6 * 8,
    }
    network = UNet2DConditionModel(**{**SDXL, **narrow, **(layers or {})}).eval().requires_grad_(False)
    call = {
        "sample": torch.randn(2, 4, 8 * world, COLUMNS),
        "timestep": torch.tensor([500.0]),
        "encoder_hidden_states": torch.randn(2, 4, 32),
        "added_cond_kwargs": {"text_embeds": torch.randn(2, 32), "time_ids": torch.zeros(2, 6)},
        "return_dict": False,
    }
    band, plain = {**call, "sample": call["sample"][:, :, :8].contiguous()}, deepcopy(network)
    whole = Denoiser(network=network, call=call, prepare=knowing_sites(discover(network, network.forward, (), call)))
    return Tiny(whole=whole, band=lambda: plain(**band))


def tiny_flux(world: int, layers: Mapping[str, Any] | None = None) -> Tiny:
    """A transformer as deep as FLUX.1 dev. `layers` replaces its numbers of layers."""
    from diffusers import FluxTransformer2DModel

    network = FluxTransformer2DModel(
        guidance_embeds=True,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=16,
        pooled_projection_dim=16,
        axes_dims_rope=(4, 6, 6),
        **(layers or {}),
    )
    network = network.eval().requires_grad_(False)
    rows = 2 * world
    call = _tiny_flux_call(rows)
    band, plain = _tiny_flux_call(2), deepcopy(network)
    prepare = knowing_tokens(network, TokenGrid(1, rows, COLUMNS))
    return Tiny(whole=Denoiser(network=network, call=call, prepare=prepare), band=lambda: plain(**band))


def _tiny_flux_call(rows: int) -> dict[str, object]:
    positions = torch.meshgrid(
        torch.arange(1.0), torch.arange(float(rows)), torch.arange(float(COLUMNS)), indexing="ij"
    )
    return {
        "hidden_states": torch.randn(1, rows * COLUMNS, 64),
        "encoder_hidden_states": torch.randn(1, 8, 16),
        "pooled_projections": torch.randn(1, 16),
        "timestep": torch.full((1,), 0.5),
        "guidance": torch.full((1,), 3.5),
        "img_ids": torch.stack(positions, -1).reshape(-1, 3),
        "txt_ids": torch.zeros(8, 3),
        "return_dict": False,
    }


TINY: dict[str, Callable[..., Tiny]] = {"sdxl": tiny_sdxl, "flux": tiny_flux}


@torch.no_grad()
def host_times(model: str, rank: int, world: int, strategies: Sequence[str], pairs: int) -> dict[str, HostTime]:
    """Return for each strategy the time of a steady step of rank `rank` beside the plain one.

    Strategies take turns, a round of pairs each: all are measured over as long a time.
    """
    with quiet_rank(rank, world):
        tiny = TINY[model](world)
        rounds = [
            {strategy: _host_time(tiny, strategy, rank, world, pairs // ROUNDS) for strategy in strategies}
            for _ in range(ROUNDS)
        ]
    return {strategy: HostTime.of_rounds([found[strategy] for found in rounds]) for strategy in strategies}


def _host_time(tiny: Tiny, strategy: str, rank: int, world: int, pairs: int) -> HostTime:
    with steady(tiny, strategy, rank, world) as (step, exchanges):
        calls = (python_calls(step) - python_calls(tiny.band)) / exchanges
        return HostTime(times=in_pairs(tiny.band, step, pairs), exchanges=exchanges, calls=calls)


@contextmanager
def steady(tiny: Tiny, strategy: str, rank: int, world: int) -> Iterator[tuple[Step, int]]:
    """Yield what runs one step of a strategy after those in which caches fill, and its number of exchanges."""
    comm = Communicator(TorchTransport(CPU, DEADLINE))
    with installed(tiny.whole, strategy, comm, Mesh(rank, range(world), patch=world)) as step:
        for _ in range(STEPS_BEFORE):
            step()
        comm.traffic.clear()
        step()
        yield step, sum(comm.traffic.rounds.values())


def python_calls(step: Step) -> int:
    """Return how many functions written in Python run in a step, in this thread."""
    calls = 0

    def note(frame: Any, event: str, arg: Any) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(before)
    return calls


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeTime:
    """Times of the process for `EXCHANGES` exchanges, each from its start to the end of its wait.

    The first of a pair is what they call of torch (collective, operators, events), one after the other without
    patchpar. `calls`: of functions written in Python, in one exchange.
    """

    times: PairedTimes
    calls: int

    @property
    def whole(self) -> float:
        """Seconds of an exchange."""
        return self.times.second / EXCHANGES

    @property
    def torch(self) -> float:
        """Seconds of torch in it."""
        return self.times.first / EXCHANGES

    @property
    def python(self) -> float:
        """Seconds of patchpar's own Python in it."""
        return self.times.difference / EXCHANGES


@torch.no_grad()
def exchange_times(rank: int, world: int, pairs: int) -> dict[str, ExchangeTime]:
    """Return the time of one exchange of each kind."""
    with quiet_rank(rank, world):
        found = {}
        for name, exchange in single_exchanges(rank, world).items():
            exchange()
            functions = torch_functions(exchange)

            def bare(functions: Sequence[TorchFunction] = functions) -> None:
                for function, args, kwargs in functions:
                    function(*args, **kwargs)

            times = in_pairs(many(bare), many(exchange), pairs * EXCHANGE_PAIRS).least_disturbed
            found[name] = ExchangeTime(times=times, calls=python_calls(exchange))
        return found


def many(step: Step) -> Step:
    """Return what runs a short step often enough to be timed."""

    def steps() -> None:
        for _ in range(EXCHANGES):
            step()

    return steps


class _Functions(TorchFunctionMode):
    """Notes functions and methods of torch with their arguments, as they are called."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[TorchFunction] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    def noting(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method of a process group that is noted, too."""

        def noted(*args: Any) -> Any:
            self.found.append((collective, args, {}))
            return collective(*args)

        return noted


def torch_functions(step: Step) -> Sequence[TorchFunction]:
    """Return what a step calls of torch: functions, methods of tensors, collectives, events of streams.

    Not what reads a fact of a tensor.
    """
    functions = _Functions()
    gather, to_all = _GroupMethods.all_gather, _GroupMethods.all_to_all

    def noting(begin: Callable[..., Any]) -> Callable[..., Any]:
        def noted(methods: _GroupMethods, *args: Any) -> Any:
            of_torch = {name: functions.noting(getattr(methods, name)) for name in ("_gather", "_to_all")}
            with mock.patch.multiple(methods, **of_torch):
                return begin(methods, *args)

        return noted

    def record(event: _Event, *stream: Any) -> None:
        functions.found.append((type(event), (event._events,), {}))  # each is made to be recorded once
        functions.found.append((recorded, (event, *stream), {}))
        recorded(event, *stream)

    recorded = _Event.record

    with (
        mock.patch.multiple(_GroupMethods, all_gather=noting(gather), all_to_all=noting(to_all)),
        mock.patch.object(_Event, "record", record),
        functions,
    ):
        step()
    return [each for each in functions.found if getattr(each[0], "__name__", "") not in FACTS]


def single_exchanges(rank: int, world: int) -> dict[str, Step]:
    """Return what runs one exchange of each kind, from its start to the end of its wait."""
    comm, axis = Communicator(TorchTransport(CPU, DEADLINE)), Mesh(rank, range(world), patch=world)["patch"]
    moments, band = torch.zeros(129), torch.zeros(1, 4, 8, 8).half()
    feeds = ConvFed(("conv",), before=1, after=1, activations=())
    norm = NormHook(LocalPatch(comm, axis, bands=split_bands(8 * world, world, 8)), "here", feeds)
    fit, tokens = torch.zeros(2, 1, 4, 17), torch.zeros(axis.size, 8, 1, 8, 16)
    return {
        "keys and values of all ranks, into one buffer": lambda: comm.all_gather(
            axis, "kv", "here", tokens[axis.rank], into=tokens
        ).wait(),
        "corrections of all ranks": lambda: comm.all_gather(axis, "correction", "here", fit).wait(),
        "moments of all ranks": lambda: comm.all_gather(axis, "moments", "here", moments).wait(),
        "moments of all ranks, edge rows of two": lambda: norm.gather_with_edges(
            band, moments, feeds, fused=True
        ).wait(),
    }


@contextmanager
def quiet_rank(rank: int, world: int) -> Iterator[None]:
    """Messages go nowhere; what should have come with them is whatever is in memory, flushed where it is denormal."""
    torch.set_flush_denormal(True)
    try:
        with fake_nccl(rank, world, GroupCounts()), cuda_names(EventCounts()), kernels_on_cpu():
            yield
    finally:
        torch.set_flush_denormal(False)
