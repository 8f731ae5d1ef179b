"""Networks of every class with divided weights under a strategy, a step cache or compiled: what ranks of the pool run.

The oracle is the same with whole weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from diffusers.hooks import FirstBlockCacheConfig
from torch import Tensor

from patchpar.comm.pytree import map_leaves
from patchpar.errors import UnsupportedModel
from patchpar.plan.step_clock import StepClock
from patchpar.shard.compiled import uncompiled
from patchpar.shard.step_caches import caches_set_aside
from patchpar.shard.transformer.denoiser import TokenDenoiser
from patchpar.shard.transformer.token_plan import TokenPlan
from patchpar.shard.weights.outside_reads import keep_what_is_read_outside
from patchpar.shard.weights.rounds import GatherRounds
from patchpar.shard.weights.sharded import ShardedWeights
from patchpar.strategies import parse_strategy
from patchpar.strategies.cfg.split import GuidanceSplit
from tests.ranks import PoolRank
from tests.stages.on_ranks import built
from tests.tiny.transformers import TRANSFORMERS
from tests.weights.on_ranks import divided as in_parts
from tests.weights.on_ranks import equal, joined, same_state, state_of, tensors

KINDS = ("sharded", "hosted")
STRATEGIES = ("exact", "fresh-edges:warmup_steps=1", "pcpp:warmup_steps=1")
STEPS = 3
SKIPS_ALL = 1e9  # a threshold of the first-block cache under which every change of its output is


@torch.no_grad()
def every_strategy(this: PoolRank, name: str) -> dict[str, Any]:
    """By strategy and kind of weights: whether the outputs of all steps are equal, or why the network is refused.

    Its tokens are searched once with whole weights and once with divided ones, which takes most of the time.
    """
    found: dict[str, Any] = {}
    plans: dict[bool, TokenPlan] = {}
    for strategy in STRATEGIES:
        wanted = _under(this, name, strategy, None, plans)
        for kind in KINDS:
            divided = _under(this, name, strategy, kind, plans)
            refused = divided if isinstance(divided, str) and divided == wanted else ""
            found[f"{strategy} {kind}"] = refused or _alike(divided, wanted)
    return found


def _alike(found: Any, wanted: Any) -> bool:
    return not isinstance(found, str) and not isinstance(wanted, str) and equal(found, wanted)


def _under(
    this: PoolRank, name: str, strategy: str, kind: str | None, plans: dict[bool, TokenPlan]
) -> list[Tensor] | str:
    """The outputs of steps of an image in patches, or why there are none. Weights are as before afterwards."""
    network, call = built(name)
    before, clock, comm, axis = state_of(network), StepClock(), this.comm(), this.mesh(patch=this.world)["patch"]
    weights = None if kind is None else _divided(this, network, call(), kind)
    patched = parse_strategy(strategy).install(network, comm, axis, clock=clock)
    outputs: list[Tensor] = []
    if isinstance(patched, TokenDenoiser) and (weights is None) in plans:
        patched.use_plan(plans[weights is None])
    try:
        for given in _inputs(name, call()):
            clock.next_call()
            outputs += [x.clone() for x in tensors(patched.denoise(network.forward, **given))]
            clock.tick()
        patched.finish()
        if isinstance(patched, TokenDenoiser) and patched.plan is not None:
            plans[weights is None] = patched.plan
    except UnsupportedModel as error:
        return str(error)
    finally:
        patched.restore()
        if weights is not None:
            weights.restore()
    assert same_state(network, before)
    return outputs


def _divided(this: PoolRank, network: Any, call: dict[str, Any], kind: str) -> ShardedWeights:
    """The network's weights, divided as a pipeline does it."""
    weights = in_parts(this, network, kind)
    with caches_set_aside(network), uncompiled(network):
        keep_what_is_read_outside(weights, lambda: network(**call))
    return weights


def _inputs(name: str, call: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Arguments of steps whose latents change a little, so that stale values are not fresh ones."""
    latent = TRANSFORMERS[name].tokens if name in TRANSFORMERS else "sample"
    for step in range(STEPS):
        yield call | {latent: map_leaves(partial(torch.mul, other=1 + 0.1 * step), call[latent])}


@torch.no_grad()
def guided(this: PoolRank, name: str) -> dict[str, tuple[bool, int]]:
    """Whether outputs are equal where each rank computes another branch of guidance, and how many calls it makes.

    Branches are slices of one call, which the ranks make at the same time, or calls in turn, of which a rank makes one.
    """
    found: dict[str, tuple[bool, int]] = {}
    for kind in KINDS:
        network, call = built(name)
        branches = [*_inputs(name, call())][:2]
        outputs = [[x.clone() for x in tensors(network(**each))] for each in branches]
        weights = joined(network, this.comm(), this.mesh(cfg=this.world).of_one_image(), kind)
        with caches_set_aside(network), uncompiled(network):
            keep_what_is_read_outside(weights, partial(network, **branches[0]))
        calls: list[int] = []
        network.register_forward_hook(lambda *_, into=calls: into.append(1))
        is_equal = equal(network(**branches[this.rank]), outputs[this.rank])
        found[f"one call {kind}"] = is_equal, len(calls)
        calls.clear()
        wanted = [a + 2 * b for a, b in zip(*outputs, strict=True)]
        is_equal = all([equal(step, wanted) for step in _calls_in_turn(this, weights, branches)])
        found[f"calls in turn {kind}"] = is_equal, len(calls)
        weights.restore()
    return found


def _calls_in_turn(this: PoolRank, weights: ShardedWeights, branches: list[dict[str, Any]]) -> Iterator[list[Tensor]]:
    """What steps compute of two branches, which are a call each."""
    comm, mesh, clock = this.comm(), this.mesh(cfg=this.world), StepClock()
    guidance = GuidanceSplit(comm, mesh["cfg"], clock)
    if weights.store.is_collective:
        guidance.rounds = GatherRounds(comm, mesh.of_one_image(), mesh["cfg"])
        guidance.rounds.weights = weights
    guidance.reset()
    for _ in range(STEPS):
        outputs = []
        for given in branches:
            clock.next_call()
            outputs.append(tensors(guidance.denoise(weights.network, **given)))
        yield [a + 2 * b for a, b in zip(*outputs, strict=True)]
        clock.tick()
    guidance.finish()
    weights.settle()


@torch.no_grad()
def step_cache(this: PoolRank, name: str) -> dict[str, Any]:
    """Calls of which the second leaves out all blocks but the first, if the first-block cache runs with the class."""
    try:
        outputs = {"whole": _cached(this, name, None)}
    except (AttributeError, ValueError, NotImplementedError, LookupError, TypeError, RuntimeError) as error:
        return {"none": f"{type(error).__name__}: {error}"}  # of diffusers alone
    outputs |= {kind: _cached(this, name, kind) for kind in KINDS}
    without, call = built(name)
    plain = [x for given in _inputs(name, call()) for x in tensors(without(**given))]
    return {
        **{kind: equal(outputs[kind], outputs["whole"]) for kind in KINDS},
        "skips": not equal(outputs["whole"], plain),
    }


def _cached(this: PoolRank, name: str, kind: str | None) -> list[Tensor]:
    network, call = built(name)
    network.enable_cache(FirstBlockCacheConfig(threshold=SKIPS_ALL))  # type: ignore[operator]
    weights = None if kind is None else _divided(this, network, call(), kind)
    with network.cache_context("image"):  # type: ignore[operator]
        outputs = [x.clone() for given in _inputs(name, call()) for x in tensors(network(**given))]
    if weights is not None:
        weights.restore()
    return outputs


@torch.no_grad()
def compiled(this: PoolRank, name: str) -> dict[str, Any]:
    """By kind of weights: whether calls of compiled blocks are equal to those of whole ones, and how many graphs."""
    from torch._dynamo.utils import counters  # takes seconds

    found: dict[str, tuple[list[Tensor], int]] = {}
    for kind in ("whole", *KINDS):
        network, call = built(name)
        try:
            network.compile_repeated_blocks(backend="eager")  # type: ignore[operator]
        except (AttributeError, ValueError) as error:
            return {"none": f"{type(error).__name__}: {error}"}
        torch._dynamo.reset()
        weights = None if kind == "whole" else _divided(this, network, call(), kind)
        counters.clear()  # flex_attention makes a graph where it runs uncompiled, in the check before the first call
        outputs = [x.clone() for given in _inputs(name, call()) for x in tensors(network(**given))]
        found[kind] = outputs, counters["stats"]["unique_graphs"]
        if weights is not None:
            weights.restore()
    return {kind: (equal(outputs, found["whole"][0]), graphs) for kind, (outputs, graphs) in found.items()}
