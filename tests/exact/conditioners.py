"""Pipelines with ControlNets in bands against the same pipelines alone, on ranks that are threads."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from diffusers import ControlNetModel, MultiControlNetModel
from torch import Tensor, nn

from benchmarks.coverage.pipelines.zoo import ZOO
from patchpar.comm.collectives import Communicator
from patchpar.pipeline.installed_plan import InstalledPlan
from patchpar.pipeline.messages import CallOptions
from patchpar.pipeline.pipeline_call import PipelineCall
from patchpar.plan.mesh import Mesh
from patchpar.plan.plan import Plan
from patchpar.plan.step_clock import StepClock
from patchpar.shard.unet.conditioner import BandedConditioner
from patchpar.shard.verification_cache import VerificationCache
from patchpar.strategies.cfg.split import guidance_of
from tests.contexts import ThreadContext
from tests.exact.on_ranks import Centred
from tests.tensors import relative
from tests.tokens.piped import DEADLINE
from tests.unit.threads import on_threads

SEED, STEPS = 7, 3
XL, SD = "StableDiffusionXLControlNetPipeline", "StableDiffusionControlNetPipeline"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One call of a pipeline of the zoo. `change`: of its ControlNet; `call`: arguments beside its own.

    `trusted`: whose code in a network is trusted, such as that with which these tests count.
    """

    name: str = SD
    plan: str = "patch=2"
    change: str = ""
    call: dict[str, Any] = field(default_factory=dict)
    trusted: frozenset[str] = frozenset({"tests"})
    verify: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Of one rank. Errors of latents: in bands, and with each band of the ControlNets `alone`.

    `elements`: of the samples that first convolutions of ControlNets read, over those of one process; `gathered`: bytes
    of residuals; `hooked`: whether something is left in a ControlNet after `restore`; `latents`: those in bands.
    """

    latents: Tensor
    error: float
    alone: float
    elements: float
    gathered: int
    hooked: bool


def nets_of(pipe: Any) -> list[Any]:
    return list(getattr(pipe.controlnet, "nets", [pipe.controlnet]))


def _twice(pipe: Any) -> None:
    """A second one, that does something else."""
    other = copy.deepcopy(pipe.controlnet)
    for parameter in other.parameters():
        parameter.data.mul_(1.2)
    pipe.register_modules(controlnet=MultiControlNetModel([pipe.controlnet, other]))


def _centre(pipe: Any) -> None:
    """It mixes positions in a way that nobody told patchpar of."""
    pipe.controlnet.mid_block.resnets[0].nonlinearity = nn.Sequential(nn.SiLU(), Centred())


def _zeros(pipe: Any) -> None:
    """As before it is trained."""
    for block in [*pipe.controlnet.controlnet_down_blocks, pipe.controlnet.controlnet_mid_block]:
        for parameter in block.parameters():
            parameter.data.zero_()


def _looks_hard(pipe: Any) -> None:
    """A new one hardly looks at its image."""
    for net in nets_of(pipe):
        if isinstance(net, ControlNetModel):
            net.controlnet_cond_embedding.conv_out.weight.data.mul_(1e5)


def _counts_for_more(pipe: Any) -> None:
    """Also the UNet: with random weights it hardly changes the latents that it is given."""
    _looks_hard(pipe)
    pipe.unet.conv_out.weight.data.mul_(30)
    for name, parameter in pipe.unet.named_parameters():
        if ".attn1." in name:
            parameter.data.mul_(2)


class HalfWay(nn.Module):
    """Beside a layer a convolution to maps of half as many rows, and back."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Conv2d(layer.in_channels, layer.in_channels, 3, stride=2, padding=1)
        self.small = nn.Conv2d(layer.in_channels, layer.in_channels, 3, padding=1)
        for parameter in [*self.down.parameters(), *self.small.parameters()]:
            parameter.data.fill_(0.01)

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        return self.layer(x, *args) + nn.functional.interpolate(self.small(self.down(x)), scale_factor=2.0)


def _deepen(pipe: Any) -> None:
    resnets = pipe.controlnet.mid_block.resnets
    resnets[0] = HalfWay(resnets[0])


CHANGES: dict[str, Callable[[Any], None]] = {
    "": _looks_hard,
    "louder": _counts_for_more,
    "two": lambda pipe: (_looks_hard(pipe), _twice(pipe))[1],
    "centred": _centre,
    "zeros": _zeros,
    "deeper": _deepen,
}


def compared(case: Case, folder: Path) -> list[Found]:
    """Of each rank of the plan, as threads: calls in bands and without exchange in the ControlNets, and plain ones."""
    pipes = [_built(case) for _ in range(Plan.parse(case.plan).world_size)]  # threads share torch's random state
    read = [_samples_read(pipe) for pipe, _ in pipes]
    pipe, call = pipes[0]
    plain, whole = _latents(pipe(**_seeded(call))), sum(read[0])

    def on_rank(transport: Any) -> Found:
        (pipe, call), rank = pipes[transport.rank], transport.rank
        plan, clock, installed = Plan.parse(case.plan), StepClock(), InstalledPlan(pipe)
        mesh, comm = Mesh(rank, range(plan.world_size), **plan.degrees()), Communicator(transport)
        verifications = VerificationCache(folder / str(rank), trusted=case.trusted) if case.verify else None
        installed.install_denoisers(plan, mesh, comm, clock, lambda: guidance_of(pipe, call), verifications)

        def latents() -> Tensor:
            clock.reset()
            context: Any = ThreadContext()
            recorder = installed.begin(tracing=False)
            with torch.no_grad():
                output = PipelineCall(
                    pipe, context, clock, CallOptions(plan=plan, quiet=True), recorder, installed
                ).run(_seeded(call))
            installed.finish()
            return _latents(output)

        try:
            latents()  # which verifies
            read[rank].clear()
            in_bands = latents()
            error, elements = relative(in_bands, plain), sum(read[rank]) / whole
            gathered = comm.traffic.bytes_sent.get("residuals", 0)
            for each in installed.patched:
                if isinstance(each, BandedConditioner):
                    each.exchange = "off"
            alone = relative(latents(), plain)
        finally:
            installed.restore()
        hooked = any("forward" in vars(module) for net in nets_of(pipe) for module in net.modules())
        return Found(latents=in_bands, error=error, alone=alone, elements=elements, gathered=gathered, hooked=hooked)

    found = on_threads(len(pipes), on_rank, deadline=DEADLINE)
    for each in found:
        if isinstance(each, BaseException):
            raise each
    return found


def _built(case: Case) -> tuple[Any, dict[str, Any]]:
    pipe, call = ZOO[case.name].make()
    CHANGES[case.change](pipe)
    for name, each in pipe.components.items():
        if name.startswith("tokenizer"):
            setattr(pipe, name, copy.deepcopy(each))
    call = call | {"num_inference_steps": STEPS, "output_type": "latent"} | case.call
    if case.change == "two":
        call["image"] = [call["image"]] * 2
    return pipe, call


def _samples_read(pipe: Any) -> list[int]:
    """What each first convolution of a ControlNet reads, in numbers, from now on."""
    read = list[int]()
    for net in nets_of(pipe):
        net.conv_in.register_forward_hook(lambda _, args, __: read.append(args[0].numel()))
    return read


def _seeded(call: dict[str, Any]) -> dict[str, Any]:
    return call | {"generator": torch.Generator().manual_seed(SEED)}


def _latents(output: Any) -> Tensor:
    return output.images if hasattr(output, "images") else output.frames
