"""Whole pipelines in stages, against plain diffusers or the same plan without stages: what ranks of the pool run."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from patchpar.comm.pytree import tensors_in
from patchpar.errors import PatchparError
from patchpar.pipeline.messages import CallOptions, CallResult
from patchpar.pipeline.runner import PipelineRunner
from patchpar.plan.plan import Plan
from patchpar.shard.stages.block_hooks import BlockHooks
from patchpar.shard.stages.stage_pass import StagePass
from tests import tiny
from tests.ranks import PoolRank

SEED, STEPS = 7, 4
DEEP = {"flux": {"num_layers": 2, "num_single_layers": 10}, "lumina2": {"num_layers": 9}}
"""How many blocks the transformers of pipelines have whose names begin with "deep"."""


def in_stages(this: PoolRank, name: str, plan: str, without: str, folder: str) -> dict[str, Any] | None:
    """Two calls in stages; whether they give the latents `without` them ("" is plain diffusers), and what was sent."""
    pipe, arguments = _built(name)
    return _compared(this, pipe, arguments, plan, without, folder)


def beside_a_borrower(this: PoolRank, plan: str, folder: str) -> dict[str, Any] | None:
    """The same of a pipeline whose ControlNet runs blocks of the transformer, in every step before that does."""
    from benchmarks.coverage.pipelines.zoo import ZOO  # takes seconds to import

    pipe, arguments = ZOO["ZImageControlNetPipeline"].make()
    return _compared(this, pipe, arguments | {"num_inference_steps": STEPS}, plan, "", folder)


def _compared(
    this: PoolRank, pipe: Any, arguments: dict[str, Any], plan: str, without: str, folder: str
) -> dict[str, Any] | None:
    before = {key: x.clone() for key, x in _weights(pipe).items()}
    plain = tensors_in(pipe(**_kwargs(arguments)))
    runner = this.runner()
    runner.adopt(pipe)
    wanted = _run(runner, arguments, without, folder) if without else {"latents": plain * 2}
    found = _run(runner, arguments, plan, folder)
    runner.restore()
    restored = all(torch.equal(x, before[key]) for key, x in _weights(pipe).items())
    if found is None:
        return None
    without_stages = [] if wanted is None else wanted["latents"]  # by fewer ranks
    pairs = zip(found["latents"], without_stages[: len(found["latents"])], strict=True)
    return {"equal": [torch.equal(a, b) for a, b in pairs], "sent": found["sent"], "restored": restored}


def decoded(this: PoolRank, vae: str) -> float | None:
    """By how much the decoded image differs from that of plain diffusers; None on ranks that return none."""
    pipe, arguments = _built("flux")
    wanted = pipe(**_kwargs(arguments) | {"output_type": "pt"}).images
    runner = this.runner()
    runner.adopt(pipe)
    options = CallOptions(plan=Plan(stage=2), verify=False, vae=vae)
    output = getattr(runner.generate(_kwargs(arguments) | {"output_type": "pt"}, options), "output", None)
    runner.restore()
    return None if output is None else float((output.images - wanted).abs().max())


def refused(this: PoolRank, name: str, plan: str) -> str:
    """The message for a pipeline that cannot run with the plan."""
    built = tiny.build(name)
    runner = this.runner()
    runner.adopt(built.pipe)
    try:
        _run(runner, built.call_kwargs, plan, None)
    except PatchparError as error:
        return str(error)
    return "not refused"


def killed(this: PoolRank, plan: str = "stage=2") -> None:
    """Rank 0, of the first stage, ends in its second call or later, before it has sent what its last block returned."""
    built, passed = tiny.build("flux"), []
    runner = this.runner()
    runner.adopt(built.pipe)
    pass_on = StagePass._pass_on

    def pass_on_or_end(stage: StagePass, *args: Any) -> None:
        passed.append(args)
        if this.rank == 0 and len(passed) == 4:
            stage._comm.beat("output of a block")
            os.kill(os.getpid(), signal.SIGKILL)
        pass_on(stage, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StagePass, "_pass_on", pass_on_or_end)
        _run(runner, built.call_kwargs, plan, None)


def _run(runner: PipelineRunner, arguments: dict[str, Any], plan: str, folder: str | None) -> dict[str, Any] | None:
    latents, sent = [], {}
    verify = Path(folder) if folder else False
    options = CallOptions(plan=Plan.parse(plan), verify=verify, vae="rank0")  # images in bands have other last bits
    for _ in range(2):
        result = runner.generate(_kwargs(arguments), options)
        if not isinstance(result, CallResult):
            return None
        sent = dict(result.figures[0].bytes_sent)
        latents += tensors_in(result.output)
    return {"latents": latents, "sent": sent}


def _kwargs(arguments: dict[str, Any]) -> dict[str, Any]:
    seeded = {"output_type": "latent", "generator": torch.Generator().manual_seed(SEED)}
    return {"num_inference_steps": STEPS, **arguments, **seeded}


def _weights(pipe: Any) -> dict[str, Tensor]:
    networks = {name: net for name, net in pipe.components.items() if isinstance(net, torch.nn.Module)}
    return {f"{name}.{key}": x for name, net in networks.items() for key, x in net.state_dict().items()}


def hosted(this: PoolRank, plan: str) -> dict[str, Any] | None:
    """Two calls with blocks in host memory from the start, a method, and two more: and the memory of the denoiser."""
    pipe, arguments = deep("flux")
    network = pipe.transformer
    before, whole = {key: x.clone() for key, x in _weights(pipe).items()}, memory_of(network)
    plain, most = tensors_in(pipe(**_kwargs(arguments))), [0]
    runner = this.runner()
    runner.adopt(pipe, Plan.parse(plan))
    run = BlockHooks._run

    def measured(hooks: BlockHooks, *args: Any) -> Any:
        most.append(memory_of(network))
        found = run(hooks, *args)
        most.append(memory_of(network))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockHooks, "_run", measured)
        runs = [_run(runner, arguments, plan, None)]
        runner.apply("unload_lora_weights", (), {})
        runs.append(_run(runner, arguments, plan, None))
    held, weights = memory_of(network), runner._installed.weights
    slots = 0 if weights is None else sum(x.nbytes for each in weights._sharded.values() if each for x in each._slots)
    runner.restore()
    latents = [x for run in runs if run is not None for x in run["latents"]]
    return {
        "equal": [torch.equal(x, plain[0]) for x in latents],
        "most": max(most),
        "held": held,
        "whole": whole,
        "slots": slots,
        "restored": all(torch.equal(x, before[key]) for key, x in _weights(pipe).items()),
    }


def _built(name: str) -> tuple[Any, dict[str, Any]]:
    if name.startswith("deep "):
        return deep(name.removeprefix("deep "))
    built = tiny.build(name)
    return built.pipe, built.call_kwargs


def deep(name: str) -> tuple[Any, dict[str, Any]]:
    """A pipeline with a transformer of many blocks, and arguments of its call."""
    built = tiny.build(name)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = {**built.denoiser.config, **DEEP[name]}
        built.pipe.transformer = type(built.denoiser).from_config(config).eval().requires_grad_(False)
    return built.pipe, built.call_kwargs


def memory_of(network: torch.nn.Module) -> int:
    """Bytes of the memory that weights of a network are in, slots included."""
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in network.parameters()}
    return sum(each.nbytes() for each in storages.values())
