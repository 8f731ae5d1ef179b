"""Whole pipelines whose features are divided, against one process: what ranks of the pool run."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from patchpar.comm.all_reduce import all_reduce
from patchpar.comm.collectives import AxisComm
from patchpar.comm.pytree import tensors_in
from patchpar.pipeline.messages import CallOptions, CallResult
from patchpar.plan.plan import Plan
from tests import tiny
from tests.ranks import PoolRank
from tests.tensors import relative

SEED, STEPS = 7, 4


def against_one_process(this: PoolRank, name: str, plan: str, verifications: str, lora: bool) -> dict[str, Any] | None:
    """Errors of two calls, the second without sums; what a rank holds and sends; whether restoring leaves every bit."""
    built = tiny.build(name)
    pipe, arguments = built.pipe, built.call_kwargs
    denoiser = pipe.transformer
    if lora:
        _adapt(denoiser)
    before = {key: x.clone() for key, x in denoiser.state_dict().items()}
    held = sum(x.numel() for x in denoiser.parameters())
    wanted = tensors_in(pipe(**_call(arguments)))
    runner = this.runner()
    runner.adopt(pipe, Plan.parse(plan))
    options = CallOptions(plan=Plan.parse(plan), verify=Path(verifications))
    right = runner.generate(_call(arguments), options)
    weights = runner._installed.weights
    of_denoiser = None if weights is None else weights._sharded[denoiser]
    part = sum(x.numel() for x in denoiser.parameters()) / held
    in_slots = of_denoiser is not None and bool(of_denoiser.in_slots) and of_denoiser.axis.size < 4
    runner.control(exchange="off")
    wrong = runner.generate(_call(arguments), options)
    runner.restore()
    after = denoiser.state_dict()
    restored = before.keys() == after.keys() and all(torch.equal(x, after[key]) for key, x in before.items())
    if not isinstance(right, CallResult) or not isinstance(wrong, CallResult):
        return None
    return {
        "error": None if right.output is None else _error(tensors_in(right.output), wanted),
        "alone": None if wrong.output is None else _error(tensors_in(wrong.output), wanted),
        "sent": dict(right.figures[0].bytes_sent),
        "part": part,
        "in slots": in_slots,
        "restored": restored,
    }


def killed(this: PoolRank, verifications: str) -> None:
    """Rank 1 ends in the middle of a call, at a sum, before it has sent its terms."""
    built, sums = tiny.build("flux"), list[str]()
    runner = this.runner()
    runner.adopt(built.pipe)

    def add_up_or_end(mesh: AxisComm, kind: str, where: str, own: Tensor) -> Tensor:
        sums.append(where)
        if this.rank == 1 and len(sums) == 20:
            mesh[0].beat(where)
            os.kill(os.getpid(), signal.SIGKILL)
        return all_reduce(mesh, kind, where, own)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("patchpar.shard.tensor.sharder.all_reduce", add_up_or_end)
        runner.generate(_call(built.call_kwargs), CallOptions(plan=Plan(tensor=2), verify=Path(verifications)))


def _call(arguments: dict[str, Any]) -> dict[str, Any]:
    seeded = {"output_type": "latent", "generator": torch.Generator().manual_seed(SEED)}
    return {"num_inference_steps": STEPS, **arguments, **seeded}


def _error(found: list[Tensor], wanted: list[Tensor]) -> float:
    return max(relative(x, y) for x, y in zip(found, wanted, strict=True))


def _adapt(denoiser: Any) -> None:
    """Add an adapter to the attention's Linears, alive."""
    from peft import LoraConfig

    with torch.random.fork_rng():
        torch.manual_seed(0)
        denoiser.add_adapter(LoraConfig(r=4, init_lora_weights=False, target_modules=["to_q", "to_v", "to_out.0"]))
