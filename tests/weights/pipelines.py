"""Whole pipelines with sharded weights, against the same plan with whole ones: what ranks of the pool run."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from numpy import ndarray
from torch import Tensor

from patchpar.comm.pytree import leaves
from patchpar.errors import PatchparError, UnsupportedModel
from patchpar.launch.remote_errors import take_down
from patchpar.pipeline.messages import CallOptions, CallResult
from patchpar.pipeline.runner import PipelineRunner
from patchpar.plan.plan import Plan
from patchpar.shard.weights.device_shards import DeviceShards
from patchpar.shard.weights.packed import blocks_of, packed_blocks
from patchpar.shard.weights.sharded import ShardedWeights
from tests import tiny
from tests.ranks import PoolRank

SEED, STEPS = 7, 4
STEPS_OF_CACHE = 12
"""In some of which a step cache skips blocks, and in some not."""


def both(this: PoolRank, name: str, plan: str, cache: Any = None, kind: str = "sharded") -> dict[str, Any] | None:
    """Two calls with whole weights and two with divided ones; whether they are equal, and what was sent."""
    built = tiny.build(name)
    pipe, arguments = built.pipe, built.call_kwargs
    if cache is not None:
        built.denoiser.enable_cache(cache)
        arguments = {**arguments, "num_inference_steps": STEPS_OF_CACHE}
    runner = this.runner()
    runner.adopt(pipe)
    before = {key: x.clone() for key, x in _weights(pipe).items()}
    runs = [_run(runner, arguments, text) for text in (plan, f"{plan},weights={kind}")]
    held = runner._installed.weights
    sharded = {} if held is None else {type(net).__name__: w for net, w in held._sharded.items() if w is not None}
    blocks = {kind: (weights.axis.size, len(weights.blocks)) for kind, weights in sharded.items()}
    runner.restore()
    restored = all(torch.equal(x, before[key]) for key, x in _weights(pipe).items())
    if runs[0] is None or runs[1] is None:
        return None
    wanted, found = runs
    return {
        "equal": [torch.equal(a, b) for a, b in zip(found["latents"], wanted["latents"], strict=True)],
        "sent": found["sent"],
        "received": found["received"],
        "whole sent": wanted["sent"],
        "blocks": blocks,
        "restored": restored,
    }


def _run(runner: PipelineRunner, arguments: dict[str, Any], plan: str) -> dict[str, Any] | None:
    latents, sent, received = [], {}, {}
    options = CallOptions(plan=Plan.parse(plan), verify=False)
    if options.plan.data > 1:
        arguments = {**arguments, "prompt": [f"{arguments['prompt']} {number}" for number in range(options.plan.data)]}
    for _ in range(2):
        seeded = {"output_type": "latent", "generator": torch.Generator().manual_seed(SEED)}
        kwargs = {"num_inference_steps": STEPS, **arguments, **seeded}
        result = runner.generate(kwargs, options)
        if not isinstance(result, CallResult):
            return None
        sent, received = dict(result.figures[0].bytes_sent), dict(result.figures[0].bytes_received)
        latents += [torch.as_tensor(x) for x in leaves(result.output) if isinstance(x, (Tensor, ndarray))]  # DiT's
    return {"latents": latents, "sent": sent, "received": received}


def _weights(pipe: Any) -> dict[str, Tensor]:
    networks = {name: net for name, net in pipe.components.items() if isinstance(net, torch.nn.Module)}
    return {f"{name}.{key}": x for name, net in networks.items() for key, x in net.state_dict().items()}


def in_turn(this: PoolRank, name: str, plans: list[str]) -> dict[str, Any] | None:
    """Calls by several plans in turn, where whole weights do not fit, against the same plans with whole weights."""
    built, whole = tiny.build(name), tiny.build(name)
    before = {key: x.clone() for key, x in _weights(built.pipe).items()}
    runners = [this.runner() for _ in range(2)]
    for runner, each in zip(runners, (built, whole), strict=True):
        runner.adopt(each.pipe)
    equal, made = [], []
    init = ShardedWeights.__init__

    def count(weights: ShardedWeights, network: Any, *args: Any, **kwargs: Any) -> None:
        made.append(type(network).__name__)
        init(weights, network, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardedWeights, "__init__", count)
        patch.setattr("patchpar.shard.weights.stores.free_bytes", lambda device: 1000)
        for plan in plans:
            runs = [_run(runners[0], built.call_kwargs, f"{plan},weights=sharded")]
            runs.append(_run(runners[1], built.call_kwargs, plan))
            if runs[0] is not None and runs[1] is not None:
                equal += [torch.equal(a, b) for a, b in zip(runs[0]["latents"], runs[1]["latents"], strict=True)]
    for runner in runners:
        runner.restore()
    restored = all(torch.equal(x, before[key]) for key, x in _weights(built.pipe).items())
    return {"equal": equal, "made": made, "restored": restored}


def compiled(this: PoolRank, name: str, plan: str, kind: str, backend: str) -> dict[str, Any] | None:
    """Latents of compiled blocks with divided weights, against the same blocks with whole ones; and what was traced."""
    from torch._dynamo.utils import counters  # takes seconds

    latents: list[Any] = []
    graphs = []
    for text in (plan, f"{plan},weights={kind}"):
        built = tiny.build(name)
        runner = this.runner()
        runner.adopt(built.pipe)
        built.pipe.transformer.compile_repeated_blocks(backend=backend, fullgraph=True)
        block = next(iter(blocks_of(built.pipe.transformer).values()))
        before = dict(vars(block))
        torch._dynamo.reset()
        counters.clear()
        latents.append(_run(runner, built.call_kwargs, text))
        graphs.append(counters["stats"]["unique_graphs"])
        held = runner._installed.weights
        most = 0 if held is None else max(len(each.blocks) for each in held._sharded.values() if each is not None)
        runner.restore()
        graph = "_compiled_call_impl"
        restored = vars(block).keys() == before.keys() and vars(block)[graph] is before[graph]
    if latents[0] is None or latents[1] is None:
        return None
    whole, found = latents
    return {
        "equal": [torch.equal(a, b) for a, b in zip(found["latents"], whole["latents"], strict=True)],
        "graphs": graphs,
        "kinds": sorted({*found["sent"], *found["received"]}),
        "most blocks": most,
        "restored": restored,
    }


def refused_midway(this: PoolRank, case: str) -> dict[str, Any]:
    """A refusal where a pipeline is adopted, or with "first call" in that, and the next plan.

    "together": each rank has host memory for its own part, and not for those of the others beside it. "one rank": which
    alone finds that its networks cannot be divided.
    """
    built, world = tiny.build("flux"), this.context.world_size
    pipe, message = built.pipe, "not refused"
    before = {key: x.clone() for key, x in _weights(pipe).items()}
    runner, plan = this.runner(), Plan(patch=world, weights="hosted")
    networks = (
        [pipe.transformer] if case == "first call" else [pipe.transformer, pipe.text_encoder, pipe.text_encoder_2]
    )
    blocks = [block for each in networks for block in packed_blocks(each, torch.device("cpu"))]
    own = sum(block.shard_bytes(world) for block in blocks)
    with pytest.MonkeyPatch.context() as patch:
        if case == "one rank":
            patch.setattr(
                "patchpar.pipeline.divided_networks.packed_blocks", _refuse if this.rank == 1 else packed_blocks
            )
        else:
            patch.setattr("patchpar.shard.weights.host_store.free_memory", lambda: 2 * own)
        try:
            runner.adopt(pipe, None if case == "first call" else plan)
            _run(runner, built.call_kwargs, str(plan))
        except PatchparError as error:
            message = f"{type(error).__name__}: {error}"
    if case == "first call":  # a text encoder before the transformer had room
        runner.restore()
    whole = all(torch.equal(x, before[key]) for key, x in _weights(pipe).items())
    hooked = [path for path, module in pipe.transformer.named_modules() if module._forward_pre_hooks]
    runner.adopt(pipe, replace(plan, weights="sharded"))
    held = len(runner._held._held)
    runner.restore()
    return {"message": message, "whole": whole and not hooked, "held next": held}


def failed_midway(this: PoolRank, case: str) -> tuple[str, bool]:
    """What each rank raises where rank 1 has no memory for a block that moves into shards; whether changes are left."""
    built = tiny.build("flux")
    runner, plan = this.runner(), Plan(patch=this.context.world_size, weights="sharded")

    def keep(store: DeviceShards, index: int, copy: Any) -> None:
        raise torch.OutOfMemoryError(f"no memory for block {index}")

    with pytest.MonkeyPatch.context() as patch:
        if this.rank == 1:
            patch.setattr(DeviceShards, "keep", keep)
        try:
            runner.adopt(built.pipe, None if case == "first call" else plan)
            _run(runner, built.call_kwargs, str(plan))
        except (PatchparError, torch.OutOfMemoryError) as error:
            return f"{type(error).__name__}: {error}", take_down(error).left_changes
    return "it has not failed", False


def _refuse(*_: Any, **__: Any) -> Any:
    raise UnsupportedModel("no blocks")


def undivided_features(this: PoolRank) -> dict[str, Any]:
    """Features that cannot be divided, where whole weights do not fit: what is in host memory stays there."""
    built, plan, other = tiny.build("flux"), "tensor=2,weights=hosted", "patch=2,weights=hosted"
    before, message = {key: x.clone() for key, x in _weights(built.pipe).items()}, "not refused"
    runner = this.runner()
    runner.adopt(built.pipe, Plan.parse(plan))

    def refuse(denoiser: Any, mesh: Any, forward: Any, call: Any, verifications: Any, take: Any) -> Any:
        take(built.pipe.transformer.transformer_blocks[0])
        raise UnsupportedModel("no features")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("patchpar.shard.tensor.denoiser.find_plan", refuse)
        patch.setattr("patchpar.shard.weights.stores.free_bytes", lambda device: 1000)
        try:
            _run(runner, built.call_kwargs, plan)
        except PatchparError as error:
            message = f"{type(error).__name__}: {error}"
        held = message != "not refused" and _run(runner, built.call_kwargs, other) is not None
    runner.restore()
    restored = all(torch.equal(x, before[key]) for key, x in _weights(built.pipe).items())
    return {"message": message, "next": held, "restored": restored}


def adapted(this: PoolRank, plan: str, folder: str, kind: str = "sharded") -> dict[str, Any]:
    """Latents with adapters loaded, scaled, exchanged and unloaded, against the same plan with whole weights."""
    built, sharded = [tiny.build("flux") for _ in range(2)], f"{plan},weights={kind}"
    files = [_save_adapter(tiny.build("flux").pipe, Path(folder), this.rank, seed) for seed in range(2)]
    runners = [this.runner() for _ in built]
    for runner, each in zip(runners, built, strict=True):
        runner.adopt(each.pipe)
    latents: list[list[Tensor]] = []
    held: list[int] = []
    for methods in _stages(*files):
        for name, args in methods:
            for runner in runners:
                runner.apply(name, args, {"adapter_name": Path(args[0]).stem} if name == "load_lora_weights" else {})
        weights = runners[1]._installed.weights
        held += [] if weights is None else [len(weights._sharded)]
        runs = [_run(*each) for each in zip(runners, [built[0].call_kwargs] * 2, (plan, sharded), strict=True)]
        latents += [run["latents"] for run in runs if run is not None]
    for runner in runners:
        runner.restore()
    whole, found = latents[::2], latents[1::2]
    return {
        "equal": [torch.equal(a, b) for pair in zip(found, whole, strict=True) for a, b in zip(*pair, strict=True)],
        "differ": [not torch.equal(one[0], found[0][0]) for one in found if one],
        "held": held,
    }


def _stages(first: str, second: str) -> list[list[tuple[str, tuple[Any, ...]]]]:
    names = [Path(file).stem for file in (first, second)]
    return [
        [],
        [("load_lora_weights", (first,))],
        [("set_adapters", (names[0], 0.5))],
        [("load_lora_weights", (second,)), ("set_adapters", (names[1],))],
        [("unload_lora_weights", ())],
    ]


def initialised(this: PoolRank, weights: str, folder: str, kind: str) -> dict[str, Any]:
    """Latents before and after an adapter of that kind is loaded, with whole and with divided weights."""
    runners, latents = [], []
    file = _save_adapter(tiny.build("flux").pipe, Path(folder), this.rank, 0, kind)
    for text in ("patch=2", f"patch=2,weights={weights}"):
        built = tiny.build("flux")
        runner = this.runner()
        runner.adopt(built.pipe)
        runs = [_run(runner, built.call_kwargs, text)]
        on_meta = {} if kind == "dora" else {"low_cpu_mem_usage": False}  # where PEFT cannot initialise from weights
        runner.apply("load_lora_weights", (file,), on_meta)
        runs.append(_run(runner, built.call_kwargs, text))
        runners.append(runner)
        latents.append([x for run in runs if run is not None for x in run["latents"]])
    held = runners[1]._installed.weights
    in_shards = 0 if held is None else len(held._sharded)
    for runner in runners:
        runner.restore()
    whole, found = latents
    return {
        "equal": [torch.equal(a, b) for a, b in zip(whole, found, strict=True)],
        "differ": not torch.equal(found[0], found[-1]) if found else None,
        "held": in_shards,
    }


def refused_adapter(this: PoolRank, folder: str, is_called: bool) -> dict[str, Any]:
    """The message where weights that an adapter is initialised from do not fit; the next call is as before."""
    built, plan = tiny.build("flux"), "patch=2,weights=sharded"
    file = _save_adapter(tiny.build("flux").pipe, Path(folder), this.rank, 0, "pissa")
    runner, message = this.runner(), "not refused"
    runner.adopt(built.pipe, Plan.parse(plan))
    before = _run(runner, built.call_kwargs, plan) if is_called else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("patchpar.shard.weights.stores.free_bytes", lambda device: 1000)
        try:
            if this.rank < 2:  # another rank has no part of the weights
                runner.apply("load_lora_weights", (file,), {})
        except PatchparError as error:
            message = str(error)
    after = _run(runner, built.call_kwargs, plan)
    runner.restore()
    whole = _run(runner, built.call_kwargs, "patch=2")
    runner.restore()
    wanted = (whole or {"latents": []})["latents"]
    found = [x for run in (before, after) if run is not None for x in run["latents"]]
    return {"message": message, "equal": [torch.equal(x, wanted[0]) for x in found]}


def _save_adapter(pipe: Any, folder: Path, rank: int, seed: int, kind: str = "plain") -> str:
    """`kind`: "plain", "dora", or one of PEFT that is initialised from weights, as its metadata say."""
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        targets = ["to_q", "to_k", "to_v", "proj_mlp"]
        plain = kind in ("plain", "dora")
        config = LoraConfig(
            r=2,
            lora_alpha=4,
            init_lora_weights=False if plain else kind,
            use_dora=kind == "dora",
            target_modules=targets,
        )
        pipe.transformer.add_adapter(config)
    name = f"{kind}{seed}_{rank}.safetensors"
    layers = {key: x * (1 if plain else 1.5) for key, x in get_peft_model_state_dict(pipe.transformer).items()}
    metadata = {} if plain else {"transformer_lora_adapter_metadata": pipe.transformer.peft_config["default"].to_dict()}
    pipe.save_lora_weights(folder, transformer_lora_layers=layers, weight_name=name, **metadata)
    return str(folder / name)


def replaced(this: PoolRank) -> str:
    """The message where a method puts other weights in place of sharded ones."""
    built, plan = tiny.build("sd3"), "cfg=2,weights=sharded"
    runner = this.runner()
    runner.adopt(built.pipe)
    _run(runner, built.call_kwargs, plan)
    block = built.pipe.transformer.transformer_blocks[0]
    block.attn.to_q.weight = torch.nn.Parameter(block.attn.to_q.weight.clone())
    try:
        _run(runner, built.call_kwargs, plan)
    except PatchparError as error:
        return str(error)
    return "not refused"


def killed(this: PoolRank, kind: str = "sharded") -> None:
    """Rank 1 ends in the middle of a call, at a gather, before it has sent its part to the others."""
    built, gathers = tiny.build("flux"), []
    runner = this.runner()
    runner.adopt(built.pipe)
    start = ShardedWeights._start

    def start_or_end(weights: ShardedWeights, index: int) -> None:
        gathers.append(index)
        if this.rank == 1 and len(gathers) == 20:
            weights.comm.beat(f"weights of {weights.blocks[index].name}")
            os.kill(os.getpid(), signal.SIGKILL)
        start(weights, index)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardedWeights, "_start", start_or_end)
        _run(runner, built.call_kwargs, f"patch=2,weights={kind}")
