"""Whole pipelines with sharded weights, against the same plan with whole ones: what ranks of the pool run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from patchpar.comm.pytree import tensors_in
from patchpar.errors import PatchparError
from patchpar.pipeline.messages import CallOptions, CallResult
from patchpar.pipeline.runner import PipelineRunner
from patchpar.plan.plan import Plan
from tests import tiny
from tests.ranks import PoolRank

SEED = 7


def both(this: PoolRank, name: str, plan: str, verifications: str) -> dict[str, Any] | None:
    """Two calls with whole weights and two with sharded ones; whether they are equal, and what was sent."""
    built = tiny.build(name)
    pipe, arguments = built.pipe, built.call_kwargs
    runner = PipelineRunner(this.context)
    runner.adopt(pipe)
    before = {key: x.clone() for key, x in _weights(pipe).items()}
    runs = [_run(runner, arguments, text) for text in (plan, f"{plan},weights=sharded")]
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
        "whole sent": wanted["sent"],
        "blocks": blocks,
        "restored": restored,
    }


def _run(runner: PipelineRunner, arguments: dict[str, Any], plan: str) -> dict[str, Any] | None:
    latents, sent = [], {}
    options = CallOptions(plan=Plan.parse(plan), verify=False)
    for _ in range(2):
        kwargs = {**arguments, "output_type": "latent", "generator": torch.Generator().manual_seed(SEED)}
        result = runner.generate(kwargs, options)
        if not isinstance(result, CallResult):
            return None
        sent = dict(result.figures[0].bytes_sent)
        latents += tensors_in(result.output)
    return {"latents": latents, "sent": sent}


def _weights(pipe: Any) -> dict[str, Tensor]:
    networks = {name: net for name, net in pipe.components.items() if isinstance(net, torch.nn.Module)}
    return {f"{name}.{key}": x for name, net in networks.items() for key, x in net.state_dict().items()}


def refused(this: PoolRank, plan: str) -> str:
    """The message where the denoiser's blocks are compiled after the plan was made."""
    built = tiny.build("flux")
    pipe, arguments = built.pipe, built.call_kwargs
    runner = PipelineRunner(this.context)
    runner.adopt(pipe)
    pipe.transformer.transformer_blocks[0].compile()
    try:
        _run(runner, arguments, plan)
    except PatchparError as error:
        return str(error)
    return "not refused"
