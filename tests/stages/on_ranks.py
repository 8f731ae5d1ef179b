"""What ranks run here: networks in stages, against the same networks whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from patchpar.errors import PatchparError, PlanError
from patchpar.shard.stages import block_seconds
from patchpar.shard.stages.block_hooks import BlockHooks, Recorder
from patchpar.shard.stages.denoiser import StagedDenoiser
from patchpar.shard.verification_cache import VerificationCache
from tests.clock import Clock
from tests.exact import denoisers
from tests.ranks import PoolRank
from tests.tiny.transformers import TRANSFORMERS
from tests.weights import networks
from tests.weights.on_ranks import equal, same_state, state_of, tensors

DEEP = {
    "Lumina2Transformer2DModel": {"num_layers": 10},
    "HunyuanVideoFramepackTransformer3DModel": {"num_single_layers": 10},
}
"""Configurations with more blocks, so that refiners of text are few beside them and run on every stage."""


def staged(this: PoolRank, network: nn.Module, folder: str | None = None) -> StagedDenoiser:
    cache = None if folder is None else VerificationCache(Path(folder), trusted=frozenset({"tests"}))
    return StagedDenoiser(network, (this.comm(), this.mesh(stage=this.world)["stage"]), cache)


def held(network: nn.Module) -> int:
    """Bytes of a network's weights in memory."""
    return sum({x.data_ptr(): x.untyped_storage().nbytes() for x in network.parameters()}.values())


@torch.no_grad()
def diffusers_network(this: PoolRank, name: str, folder: str | None) -> dict[str, Any]:
    """Three calls of a network of diffusers: verified at the first, without others' weights from the second."""
    network, call = built(name)
    before, whole = state_of(network), held(network)
    wanted = network(**call())
    stages = staged(this, network, folder)
    found, sent = [], []
    for _ in range(3):
        stages.comm.traffic.clear()
        found.append(equal(stages.denoise(network.forward, **call()), wanted))
        sent.append({kind: count for kind, count in stages.comm.traffic.bytes_sent.items() if count})
    (layout,) = stages._layouts[0][1]
    kept = held(network)
    stages.exchange = "off"
    wrong = equal(stages.denoise(network.forward, **call()), wanted)
    stages.restore()
    return {
        "equal": found,
        "equal without exchange": wrong,
        "restored": same_state(network, before) and equal(network(**call()), wanted),
        "bytes": sent,
        "handed over": [
            sum(spec.num_bytes for number in numbers for spec in layout.calls[number].form.specs)
            for numbers in layout.carried
        ],
        "output": sum(x.nbytes for x in tensors(wanted)),
        "held": kept / whole,
        "error": stages.error,
    }


@torch.no_grad()
def restored_late(this: PoolRank) -> dict[str, Any]:
    """Whole weights that do not fit are refused, a gather that fails is made again: nothing is lost."""
    network, call = built("FluxTransformer2DModel")
    before, wanted = state_of(network), network(**call())
    stages = staged(this, network)
    found = [equal(stages.denoise(network.forward, **call()), wanted) for _ in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("patchpar.shard.weights.stores.free_bytes", lambda device: 1000)
        with pytest.raises(PlanError, match="iB when they are whole, more than is free"):
            stages.restore()
    found.append(equal(stages.denoise(network.forward, **call()), wanted))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages.comm, "send_recv", _no_memory)
        with pytest.raises(MemoryError):
            stages.restore()
    stages.restore()
    return {"equal": found, "restored": same_state(network, before)}


def _no_memory(*_: Any, **__: Any) -> Any:
    raise MemoryError("no memory")


@torch.no_grad()
def counted(this: PoolRank, name: str) -> dict[str, Any]:
    """The work of each block of a network, and whether a call after it is as one before it."""
    network, call = built(name)
    wanted, hooks, recorder = network(**call()), BlockHooks(network), Recorder(network)
    hooks.pass_through(recorder, network.forward, (), call())
    hooks.close()
    return {"costs": [each.cost for each in recorder.calls], "equal": equal(network(**call()), wanted)}


@torch.no_grad()
def two_forms(this: PoolRank) -> list[bool]:
    """Calls of two sizes in turn: what is found for one holds for both, and weights come back for the first of each."""
    entry = TRANSFORMERS["FluxTransformer2DModel"]
    network = entry.build()
    wanted = [network(**entry.call(variant)) for variant in (0, 1)]
    stages = staged(this, network)
    order = (0, 0, 1, 0, 1)
    found = [equal(stages.denoise(network.forward, **entry.call(variant)), wanted[variant]) for variant in order]
    stages.restore()
    return found


@torch.no_grad()
def other_lengths(this: PoolRank, name: str, folder: str, deep: bool) -> dict[str, Any]:
    """Calls whose arguments have the same shapes, and a mask that says how long each text is, which blocks see."""
    network, calls = of_lengths(name, deep=deep)
    wanted = [network(**each) for each in calls]
    stages = staged(this, network, folder)
    order = (0, 1, 0, 1, 2, 0, 1, 2)
    found = [equal(stages.denoise(network.forward, **calls[each]), wanted[each]) for each in order]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages._weights, "gather", _no_memory)  # what is known needs no weights of other stages
        found += [equal(stages.denoise(network.forward, **calls[each]), wanted[each]) for each in order]
        kept = held(network)
        stages.exchange = "off"
        wrong = [equal(stages.denoise(network.forward, **calls[each]), wanted[each]) for each in order]
    stages.restore()
    return {"equal": found, "equal without exchange": wrong, "held": kept / held(network), "error": stages.error}


def of_lengths(name: str, *, deep: bool = True) -> tuple[nn.Module, list[dict[str, Any]]]:
    """A network, `deep` one of many blocks, and arguments of the same shapes with texts of three lengths."""
    entry = TRANSFORMERS[name]
    more = DEEP[name] if deep else {}
    network, call = replace(entry, config=entry.config | more).build(), partial(entry.call, 0)
    given = one_sample(call()) if name.startswith("Hunyuan") else call()  # of several it keeps all tokens
    return network, [{**given, "encoder_attention_mask": mask} for mask in masks_like(given["encoder_attention_mask"])]


def one_sample(call: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the first sample [1, ...] of a batch."""
    shared = ("indices_latents", "indices_latents_clean", "indices_latents_history_2x", "indices_latents_history_4x")
    return {name: x if name in shared else x[:1] for name, x in call.items()}


def masks_like(mask: Tensor) -> list[Tensor]:
    """Masks [B, T] of three longest texts; with the last two of them all texts are of one length.

    Of these, one of two patches has as many tokens of either.
    """
    found = [mask.clone(), torch.zeros_like(mask), torch.zeros_like(mask)]
    found[1][:, :7] = 1
    found[2][:, :6] = 1
    return found


@torch.no_grad()
def with_a_slow_block(this: PoolRank, slow: int | None, only_on: int | None) -> dict[str, Any]:
    """Where five equal blocks are cut if one of them sleeps longer than the others, on all ranks or on one.

    By a clock on which nothing but their sleep takes time.
    """
    clock = Clock()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = networks.Chain().eval().requires_grad_(False)
    for number, block in enumerate(network.blocks):
        seconds = 0.04 if number == slow and only_on in (None, this.rank) else 0.01
        block.linear.register_forward_pre_hook(lambda *_, seconds=seconds: clock.sleep(seconds))
    x = networks.sample()
    wanted, stages = network(x), staged(this, network)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_seconds, "time", clock)
        found = [equal(stages.denoise(network.forward, x), wanted) for _ in range(2)]
    ((cuts,),) = ([each.cuts for each in layouts] for _, layouts in stages._layouts)
    stages.restore()
    return {"equal": found, "cuts": cuts}


class Otherwise(networks.Chain):
    """Runs its blocks in another order when told, or some of them, or on the first `rows` alone."""

    asked: tuple[int, ...] = (0, 1, 2, 3, 4)
    rows: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.order = self.asked
        return super().forward(x[: self.rows])


class Recurrent(networks.Chain):
    """Every block runs twice, so that all stages but one would have all weights."""

    def __init__(self) -> None:
        super().__init__(3, (0, 1, 2, 0, 1, 2))


class KeepsState(networks.Chain):
    """Writes to an object among its arguments."""

    def forward(self, x: Tensor, kept: Any = None) -> Tensor:
        out = super().forward(x)
        if kept is not None:
            kept.keys = out
        return out


class FillsACache(networks.Chain):
    """Writes to a tensor among its arguments, and returns it."""

    def forward(self, x: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        for number, block in enumerate(self.blocks):
            x = block(x)
            kept[number] = x.mean()
        return x, kept


class Kept:
    keys: Any = None


def _fails_in_a_block(network: Any) -> None:
    plain = network.blocks[4].forward

    def forward(x: Tensor) -> Tensor:
        if bool(x.isnan().any()):
            raise ZeroDivisionError
        return plain(x)  # type: ignore[no-any-return]

    network.blocks[4].forward = forward


def _returns_an_object(network: Any) -> None:
    plain = network.blocks[1].forward
    network.blocks[1].forward = lambda x: (plain(x), object())


def _compile(network: Any) -> None:
    network.blocks[0].compile()


def _remove_blocks(network: Any) -> None:
    del network.blocks


def _flux_with_cache(network: Any) -> None:
    network._cache_config = type("FirstBlockCacheConfig", (), {})()


REFUSED: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], None] | None]] = {
    "too many stages": (lambda: networks.Chain(2), None),
    "compiled": (networks.Chain, _compile),
    "no blocks": (networks.Chain, _remove_blocks),
    "an object": (networks.Chain, _returns_an_object),
    "a step cache": (networks.Chain, _flux_with_cache),
    "state in arguments": (KeepsState, None),
    "a cache of tensors": (FillsACache, None),
}


@torch.no_grad()
def refused(this: PoolRank, case: str) -> str:
    """The message for a network that cannot run in stages."""
    build, change = REFUSED[case]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network: Any = build().eval().requires_grad_(False)
    if change is not None:
        change(network)
    given: dict[str, Any] = {"state in arguments": {"kept": Kept()}, "a cache of tensors": {"kept": torch.zeros(9)}}
    given = given.get(case, {})
    try:
        staged(this, network).denoise(network.forward, networks.sample(), **given)
    except PatchparError as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


@torch.no_grad()
def another_order(this: PoolRank, order: tuple[int, ...], rows: int | None = None) -> str:
    """The message where other blocks run than at the first call; the next call, as before, is right."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = Otherwise().eval().requires_grad_(False)
    x = networks.sample()
    wanted, stages = network(x), staged(this, network)
    stages.denoise(network.forward, x)
    network.asked, network.rows = order, rows
    with pytest.raises(PatchparError) as caught:
        stages.denoise(network.forward, x)
    stages.restore()
    network.asked, network.rows = Otherwise.asked, Otherwise.rows
    assert equal(network(x), wanted)
    return str(caught.value)


@torch.no_grad()
def odd_networks(this: PoolRank, name: str, folder: str) -> dict[str, Any]:
    """A network whose weights are hard to divide, for one reason."""
    if name == "recurrent":
        with torch.random.fork_rng():
            torch.manual_seed(0)
            network: nn.Module = Recurrent().eval().requires_grad_(False)
    else:
        network = networks.build(name)
    x, before = networks.sample(), state_of(network)
    wanted, stages = network(x), staged(this, network, folder)
    try:
        found = [equal(stages.denoise(network.forward, x), wanted) for _ in range(3)]
        message = ""
    except PatchparError as error:
        found, message = [], str(error)
    stages.restore()
    return {"equal": found, "message": message, "restored": same_state(network, before)}


def built(name: str) -> tuple[nn.Module, Callable[[], dict[str, Any]]]:
    """A network, and what makes arguments of its call."""
    if name in TRANSFORMERS:
        return TRANSFORMERS[name].build(), lambda: TRANSFORMERS[name].call(0)
    return denoisers.build(name), lambda: denoisers.call(name, 12, 8)
