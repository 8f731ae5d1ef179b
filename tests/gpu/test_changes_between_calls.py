"""What a program changes between two calls of a denoiser that is replayed: each output is that of the plain network.

A tape of operators takes the place of a CUDA graph.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from diffusers.guiders import AutoGuidance, SkipLayerGuidance
from diffusers.hooks import LayerSkipConfig
from diffusers.models.transformers import transformer_flux
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor
from diffusers.utils.torch_utils import lru_cache_unless_export
from peft import LoraConfig
from torch import Tensor, nn

from patchpar.comm.collectives import Communicator
from patchpar.comm.transport.torch_p2p import TorchTransport
from patchpar.plan.exchange_policy import ExchangePolicy
from patchpar.plan.mesh import Mesh
from patchpar.plan.step_clock import StepClock
from patchpar.shard import fingerprint as fingerprints
from patchpar.shard.denoiser import WholeDenoiser
from patchpar.shard.graphs.step_graphs import Stateless, StepGraphs
from tests.conformance.stand_in import StandIn
from tests.gpu.op_tape import TapeRecorder
from tests.gpu.steps import _call, model
from tests.tiny.weights import enliven, seeded

Change = Callable[[Any, int, int], object]
"""Of a network, before a call of an evaluation."""


@dataclass(frozen=True, slots=True)
class Outputs:
    """Of calls one after the other, with whether each was a replay."""

    values: Sequence[Tensor]
    replayed: Sequence[bool]


def outputs(network: Any, change: Change, *, images: int = 1, evaluations: int = 6, calls: int = 2) -> Outputs:
    """Outputs of a network whose calls are replayed. In each evaluation all calls have the same arguments."""
    stand_in, arguments = StandIn(1), arguments_of(network)

    def on_rank(transport: TorchTransport) -> Outputs:
        mesh, clock = (Communicator(transport), Mesh(0, range(1), patch=1)["patch"]), StepClock()
        whole = WholeDenoiser(network, mesh, ExchangePolicy(), clock=clock)
        whole.use_graphs(graphs := StepGraphs(network, TapeRecorder(stand_in.rank), mesh))
        found, replayed = [], []
        for image in range(images):
            clock.reset()
            whole.reset()
            for evaluation in range(image * evaluations, (image + 1) * evaluations):
                for call in range(calls):
                    change(network, evaluation, call)
                    clock.next_call()
                    before, given = graphs.replays, _call(arguments, evaluation, 0)
                    with torch.no_grad():
                        found.append(whole.denoise(network.forward, **given)[0])
                    replayed.append(graphs.replays > before)
                clock.tick()
        return Outputs(found, replayed)

    (result,) = stand_in.run(on_rank)
    if isinstance(result, BaseException):
        raise result
    return result


def arguments_of(network: Any) -> dict[str, Any]:
    return model("sdxl" if hasattr(network, "up_blocks") else "flux").call


def plain_outputs(network: Any, change: Change, *, images: int = 1, evaluations: int = 6, calls: int = 2) -> Any:
    found = []
    for evaluation in range(images * evaluations):
        for call in range(calls):
            change(network, evaluation, call)
            with torch.no_grad():
                found.append(network(**_call(arguments_of(network), evaluation, 0))[0])
    return found


def unchanging(network: Any, evaluation: int, call: int) -> None:
    pass


def network() -> Any:
    return deepcopy(model("flux").network)


def compared(make: Callable[[], Any], change: Callable[[], Change], **options: int) -> list[bool]:
    """Which calls were replays; each output is that of the plain network, and the change is one."""
    found, wanted = outputs(make(), change(), **options), plain_outputs(make(), change(), **options)
    assert [torch.equal(x, y) for x, y in zip(found.values, wanted, strict=True)] == [True] * len(wanted)
    unchanged = plain_outputs(make(), unchanging, **options)
    assert not all(torch.equal(x, y) for x, y in zip(wanted, unchanged, strict=True)), "the change is one"
    return list(found.replayed)


# --- within a step --------------------------------------------------------------------------------------------------


def guided(guider: Any) -> Change:
    """Hooks for one call of late steps, as a guider installs them before it and removes them afterwards."""

    def change(network: Any, evaluation: int, call: int) -> None:
        if evaluation or call:
            guider.cleanup_models(network)
        if call == 0:
            guider.set_state(evaluation, 6, torch.zeros(1))
        guider.prepare_models(network)

    return change


GUIDERS: dict[str, tuple[Callable[[], Any], set[int]]] = {
    "skipped layers": (
        lambda: SkipLayerGuidance(
            skip_layer_config=LayerSkipConfig(indices=[0], fqn="transformer_blocks"),
            skip_layer_guidance_start=0.5,
            skip_layer_guidance_stop=1.0,
        ),
        {2},
    ),
    "a worse model": (
        lambda: AutoGuidance(auto_guidance_config=LayerSkipConfig(indices=[0], fqn="transformer_blocks"), start=0.5),
        {1, 2},
    ),
}
"""Guiders that install hooks in late steps, and for which calls."""


@pytest.mark.parametrize("name", GUIDERS)
def test_hooks_of_a_guider_are_of_its_calls_alone(name: str) -> None:
    make, hooked = GUIDERS[name]
    found = compared(network, lambda: guided(make()), calls=3)
    assert found[15:] == [call not in hooked for call in range(3)], "other calls are graphs"


# --- processors, factors, modes -------------------------------------------------------------------------------------


ALIVE: deque[Any] = deque(maxlen=64)
"""Processors, which a program keeps to put them back."""


class Scaled:
    """An attention processor with a factor, and a map that it adds."""

    def __init__(self, scale: float = 0.7, shift: float = 0.0) -> None:
        self.inner, self.scale, self.shift = FluxAttnProcessor(), scale, torch.full((1,), shift)
        self.strength, self.strengths = 1.0, [1.0]
        ALIVE.append(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = self.inner(*args, **kwargs)
        first, *others = found if isinstance(found, tuple) else (found,)
        first = first * self.scale * self.strength * self.strengths[0] + self.shift
        return (first, *others) if others else first


@pytest.fixture(autouse=True)
def as_of_diffusers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code of these tests is not foreign."""
    monkeypatch.setattr(fingerprints, "KNOWN", fingerprints.KNOWN | {"tests"})


def processed() -> Any:
    found = network()
    for block in found.transformer_blocks:
        block.attn.processor = Scaled()
    return found


def adapted() -> Any:
    found = network()
    with seeded():
        for name in ("default", "other"):
            found.add_adapter(LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False), name)
        found.set_adapter("default")
        return enliven(found.eval().requires_grad_(False))


def dropping() -> Any:
    found = network()
    found.transformer_blocks[0].attn.to_out[1].p = 1.0
    return found


def configured() -> Any:
    """Its first block reads the configuration."""
    found = network()
    found.register_to_config(strength=1.0)
    module = found.transformer_blocks[0].ff
    module.forward = functools.partial(as_configured, found, module)
    return found


def as_configured(network: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
    return network.config.strength * type(module).forward(module, *args, **kwargs)


def of_convolutions() -> Any:
    return deepcopy(model("sdxl").network)


def hooked() -> Any:
    found = network()
    found.transformer_blocks[0].ff.register_forward_hook(halved)
    return found


def other_class(network: Any) -> None:
    network.transformer_blocks[0].attn.processor = Scaled() if is_plain(network) else FluxAttnProcessor()


def is_plain(network: Any) -> bool:
    return type(network.transformer_blocks[0].attn.processor) is FluxAttnProcessor


def same_class(network: Any) -> None:
    attention = network.transformer_blocks[0].attn
    attention.processor = Scaled(shift=1 - attention.processor.shift.item())


def in_place(network: Any) -> None:
    for block in network.transformer_blocks:
        block.attn.processor.scale = 1.5 - block.attn.processor.scale


def other_number(network: Any) -> None:
    for block in network.transformer_blocks:
        block.attn.processor.strength = 1.5 - block.attn.processor.strength


def in_a_list(network: Any) -> None:
    for block in network.transformer_blocks:
        block.attn.processor.strengths[0] = 1.5 - block.attn.processor.strengths[0]


def without_adapters(network: Any) -> None:
    layer = network.transformer_blocks[0].attn.to_q
    (network.enable_adapters if layer.disable_adapters else network.disable_adapters)()


def other_adapter(network: Any) -> None:
    layer = network.transformer_blocks[0].attn.to_q
    network.set_adapter("default" if layer.active_adapters == ["other"] else "other")


def of_configuration(network: Any) -> None:
    network.register_to_config(strength=1.5 - network.config.strength)


def free_lunch(network: Any) -> None:
    if getattr(network.up_blocks[0], "s1", None) is None:
        network.enable_freeu(s1=0.5, s2=0.5, b1=1.5, b2=1.5)
    else:
        network.disable_freeu()


def other_hook(network: Any) -> None:
    module = network.transformer_blocks[0].ff
    (before,) = module._forward_hooks.values()
    module._forward_hooks.clear()
    module.register_forward_hook(doubled if before is halved else halved)


def training_elsewhere() -> Any:
    found = dropping()
    found.transformer_blocks[0].norm1.silu.train()
    return found


def train_another(network: Any) -> None:
    """As many modules are in training as before."""
    dropout, other = network.transformer_blocks[0].attn.to_out[1], network.transformer_blocks[0].norm1.silu
    dropout.train(not dropout.training)
    other.train(not dropout.training)


def of_adapter(network: Any) -> None:
    for module in network.modules():
        if hasattr(module, "scaling"):
            module.scaling["default"] = 1.5 - module.scaling["default"]


def to_train(network: Any) -> None:
    network.train(not network.training)


def forward_by_hand(network: Any) -> None:
    module = network.transformer_blocks[0].ff
    if "forward" in vars(module):
        del module.forward
    else:
        module.forward = functools.partial(half, module)


def half(module: Any, *args: Any, **kwargs: Any) -> Any:
    return 0.5 * type(module).forward(module, *args, **kwargs)


def with_a_torch_hook(network: Any) -> None:
    module = network.transformer_blocks[0].ff
    if module._forward_hooks:
        module._forward_hooks.clear()
    else:
        module.register_forward_hook(halved)


def halved(module: Any, args: Any, output: Any) -> Any:
    return 0.5 * output


def doubled(module: Any, args: Any, output: Any) -> Any:
    return 2.0 * output


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "a processor of another class": (processed, other_class),
    "another processor of the class": (processed, same_class),
    "a processor's factor": (processed, in_place),
    "another number of a processor": (processed, other_number),
    "a list of a processor": (processed, in_a_list),
    "an adapter's factor": (adapted, of_adapter),
    "without adapters": (adapted, without_adapters),
    "another adapter": (adapted, other_adapter),
    "the configuration": (configured, of_configuration),
    "FreeU": (of_convolutions, free_lunch),
    "training of another module": (training_elsewhere, train_another),
    "another hook of torch": (hooked, other_hook),
    "training": (dropping, to_train),
    "a forward": (network, forward_by_hand),
    "a hook of torch": (network, with_a_torch_hook),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("when", ["once", pytest.param("in each call", marks=pytest.mark.breadth)])
def test_a_change_within_a_step(name: str, when: str) -> None:
    """By a pipeline that is no part of diffusers, without a callback."""
    make, to = CHANGES[name]

    def change(network: Any, evaluation: int, call: int) -> None:
        if evaluation >= 3 and (when != "once" or (evaluation, call) == (3, 1)):
            to(network)

    compared(make, lambda: change)


# --- between images -------------------------------------------------------------------------------------------------


def other_rotation(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return 0.9 * x


def other_positions(network: Any) -> None:
    """A module without weights, with another table of the same shape."""
    network.positions = Positions(1 - network.positions.table)


class Positions(nn.Module):
    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = table
        ALIVE.append(self)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table


def positioned() -> Any:
    """Its first block adds positions to its input."""
    found = network()
    found.positions = Positions(torch.full((1,), 0.3))
    found.x_embedder.forward = functools.partial(at_positions, found)
    return found


def at_positions(network: Any, x: Tensor) -> Tensor:
    module = network.x_embedder
    embedded: Tensor = network.positions(type(module).forward(module, x))
    return embedded


@pytest.mark.parametrize("what", ["a function that a processor calls", "a module without weights"])
def test_a_change_between_images(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    def change(network: Any, evaluation: int, call: int) -> None:
        if (evaluation, call) == (4, 0):
            if what == "a module without weights":
                other_positions(network)
            else:
                monkeypatch.setattr(transformer_flux, "apply_rotary_emb", other_rotation)

    def changed_back(network: Any, evaluation: int, call: int) -> None:
        if (evaluation, call) == (0, 0):
            monkeypatch.undo()
            monkeypatch.setattr(fingerprints, "KNOWN", fingerprints.KNOWN | {"tests"})
        change(network, evaluation, call)

    make = positioned if what == "a module without weights" else network
    found = compared(make, lambda: changed_back, images=2, evaluations=4, calls=1)
    assert found == [False, False, True, True] * 2


# --- caches of code -------------------------------------------------------------------------------------------------


class Rotating(nn.Module):
    """Positions of a bounded number of sizes, of which the oldest are dropped."""

    @lru_cache_unless_export(maxsize=2)
    def forward(self, size: int) -> Tensor:
        return torch.linspace(0.0, 1.0, size)


class Sized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rotating = Rotating()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.rotating(x.shape[0])


def test_values_that_a_cache_has_dropped_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each size once, as in images of two steps: none of the others is captured."""
    stand_in, network = StandIn(1), Sized()

    def on_rank(transport: TorchTransport) -> int:
        mesh = Communicator(transport), Mesh(0, range(1), patch=1)["patch"]
        graphs = StepGraphs(network, TapeRecorder(stand_in.rank), mesh)
        for size in (2, 2, 2, 3, 4, 5, 2, 2, 2, 2):
            x = torch.rand(size)
            found = graphs.run("exact", network, ((x,), {}), Stateless())
            assert torch.equal(found, network(x) if size > 2 else x + torch.linspace(0.0, 1.0, size))
        return graphs.replays

    (found,) = stand_in.run(on_rank)
    assert found == 5
