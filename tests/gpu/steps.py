"""Networks of the types of SDXL and FLUX, tiny and with values, and their steps on ranks of NCCL's simulator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from torch import Tensor

from benchmarks.gpu.denoisers import Denoiser, knowing_sites, knowing_tokens
from benchmarks.gpu.host_time import _tiny_flux_call
from patchpar.comm.collectives import Communicator
from patchpar.comm.transport.torch_p2p import TorchTransport
from patchpar.plan.mesh import Mesh
from patchpar.plan.step_clock import StepClock
from patchpar.shard.graphs.recorder import StepRecorder
from patchpar.shard.graphs.step_graphs import StepGraphs
from patchpar.shard.transformer.token_ranges import TokenGrid
from patchpar.shard.unet.discover import discover
from patchpar.strategies import parse_strategy
from tests.conformance.stand_in import StandIn
from tests.exact import denoisers
from tests.tiny.weights import enliven, seeded

TIMES = (981.0, 961.0, 921.0, 901.0, 901.0, 841.0, 601.0, 581.0, 561.0, 541.0, 501.0, 461.0)
ROWS, COLUMNS = 4, 8  # of the tokens of FLUX
Recorders = Callable[[StandIn, TorchTransport], StepRecorder]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Evaluations of the first of two images; the second has two less. `calls` in each, with other texts."""

    model: str
    strategy: str
    world: int = 2
    evaluations: int = 6
    calls: int = 1


@dataclass(frozen=True, slots=True)
class Found:
    """Predictions of all evaluations, bytes sent, how many of them were replays, and why nothing more is captured."""

    predictions: Sequence[Tensor]
    sent: dict[str, int]
    replays: int
    refused: str


@cache
def model(name: str) -> Denoiser:
    if name == "sdxl":
        network, call = denoisers.build("sdxl"), denoisers.call("sdxl", 32, 16) | {"return_dict": False}
        return Denoiser(network=network, call=call, prepare=knowing_sites(discover(network, network.forward, (), call)))
    with seeded():
        network = FluxTransformer2DModel(
            guidance_embeds=True,
            num_layers=1,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=16,
            pooled_projection_dim=16,
            axes_dims_rope=(4, 6, 6),
        )
        network, call = enliven(network.eval().requires_grad_(False)), _tiny_flux_call(ROWS)
    return Denoiser(network=network, call=call, prepare=knowing_tokens(network, TokenGrid(1, ROWS, COLUMNS)))


@cache
def predicted_without_graphs(case: Case) -> list[Found]:
    """What each rank predicts."""
    return predicted(case)


def predicted(case: Case, recorders: Recorders | None = None, *, required: bool = True) -> list[Found]:
    """What each rank predicts, with graphs if there are `recorders` of them."""
    stand_in, denoiser = StandIn(case.world), model(case.model)
    copies = [deepcopy(denoiser.network) for _ in range(case.world)]

    def on_rank(transport: TorchTransport) -> Found:
        comm, axis = Communicator(transport), Mesh(transport.rank, range(case.world), patch=case.world)["patch"]
        own, clock, method = (
            replace(denoiser, network=copies[transport.rank]),
            StepClock(),
            parse_strategy(case.strategy),
        )
        method = replace(method, warmup_steps=1) if method.policy.remembers else method
        split = method.install(own.network, comm, axis, clock=clock, split="rows")
        own.prepare(split)
        graphs = None
        if recorders is not None:
            graphs = StepGraphs(own.network, recorders(stand_in, transport), (comm, axis), required=required)
            split.use_graphs(graphs)
        found = [x for image in range(2) for x in _image(case, own, split, clock, image)]
        reported = (graphs.replays, graphs.refused) if graphs is not None else (0, "")
        split.restore()
        return Found(found, dict(comm.traffic.bytes_sent), *reported)

    found = stand_in.run(on_rank)
    for each in found:
        if isinstance(each, BaseException):
            raise each
    assert stand_in.faults == []
    return found


def _image(case: Case, denoiser: Denoiser, split: Any, clock: StepClock, image: int) -> list[Tensor]:
    """Evaluations of one image, each with another sample and at another time."""
    clock.reset()
    split.reset()
    found = []
    for evaluation in range(case.evaluations - 2 * image):
        for number in range(case.calls):
            clock.next_call()
            output = split.denoise(denoiser.network.forward, **_call(denoiser.call, 10 * image + evaluation, number))
            found.append(output[0])
        clock.tick()
    split.finish()
    return found


def _call(call: dict[str, Any], evaluation: int, number: int) -> dict[str, Any]:
    name = "sample" if "sample" in call else "hidden_states"
    noise = torch.randn(call[name].shape, generator=torch.Generator().manual_seed(evaluation))
    text = call["encoder_hidden_states"] * (1 - 2 * number)
    time = torch.as_tensor(call["timestep"], dtype=torch.float32)
    time = torch.full(time.shape, TIMES[evaluation % len(TIMES)] / (1 if name == "sample" else 1000))
    return call | {name: call[name] + 0.2 * noise, "encoder_hidden_states": text, "timestep": time}
