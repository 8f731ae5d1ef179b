"""Whole pipelines whose features are divided, against one process: what ranks of the pool run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from patchpar.comm.pytree import tensors_in
from patchpar.pipeline.messages import CallOptions, CallResult
from patchpar.pipeline.runner import PipelineRunner
from patchpar.plan.plan import Plan
from tests import tiny
from tests.ranks import PoolRank
from tests.tensors import relative

SEED = 7


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
    runner = PipelineRunner(this.context)
    runner.adopt(pipe)
    options = CallOptions(plan=Plan.parse(plan), verify=Path(verifications))
    right = runner.generate(_call(arguments), options)
    part = sum(x.numel() for x in denoiser.parameters()) / held
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
        "restored": restored,
    }


def _call(arguments: dict[str, Any]) -> dict[str, Any]:
    return {**arguments, "output_type": "latent", "generator": torch.Generator().manual_seed(SEED)}


def _error(found: list[Tensor], wanted: list[Tensor]) -> float:
    return max(relative(x, y) for x, y in zip(found, wanted, strict=True))


def _adapt(denoiser: Any) -> None:
    """Add an adapter to the attention's Linears, alive."""
    from peft import LoraConfig

    with torch.random.fork_rng():
        torch.manual_seed(0)
        denoiser.add_adapter(LoraConfig(r=4, init_lora_weights=False, target_modules=["to_q", "to_v", "to_out.0"]))
