"""Pipelines that are loaded straight into shards: what ranks of the pool run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from patchpar.models.loading import load_pipeline, with_dtype
from patchpar.pipeline.runner import PipelineRunner
from patchpar.plan.plan import Plan
from tests import tiny
from tests.ranks import PoolRank
from tests.weights.pipelines import _run, _weights

FILES = torch.float32  # the dtype of their weights


def saved(name: str, folder: Path) -> str:
    """The folder of a tiny pipeline."""
    tiny.build(name).pipe.save_pretrained(folder)
    return str(folder)


def loaded(this: PoolRank, name: str, folder: str, dtype: torch.dtype, plan: str) -> dict[str, Any] | None:
    """Latents of a pipeline that was loaded into shards, against the same plan with whole weights."""
    arguments, latents = tiny.build(name).call_kwargs, []
    plain = load_pipeline(folder, with_dtype({"torch_dtype": dtype}))
    for text in (_whole(plan), plan):
        runner = this.runner()
        runner.load(folder, {"torch_dtype": dtype}, 0, Plan.parse(text))
        if dtype != FILES or "sharded" not in plan:  # else all are where whole weights are
            _in_own_memory(runner)
        held = len([x for x in runner._held._held.values() if x is not None])
        latents.append(_run(runner, arguments, text))
        runner.restore()
    if latents[0] is None or latents[1] is None:
        return None
    found, wanted = _weights(runner.pipe), _weights(plain)
    return {
        "held": held,
        "equal": [torch.equal(a, b) for a, b in zip(latents[1]["latents"], latents[0]["latents"], strict=True)],
        "restored": all(x.dtype == found[key].dtype and torch.equal(x, found[key]) for key, x in wanted.items()),
    }


def _in_own_memory(runner: PipelineRunner) -> None:
    """Copy what is in pages of a file, at addresses for which kernels of the CPU may add up in another order."""
    held = [each for each in runner._held._held.values() if each is not None]
    in_slots = {id(packed.tensor) for each in held for block in each.blocks for packed in block.tensors}
    networks = [each for each in runner.pipe.components.values() if isinstance(each, torch.nn.Module)]
    for x in (x for network in networks for x in network.parameters() if id(x) not in in_slots):
        x.data = x.data.clone()


def _whole(plan: str) -> str:
    return ",".join(part for part in plan.split(",") if not part.startswith(("weights=", "resident="))) or "single"


def changed_before_the_first_call(this: PoolRank, folder: str, plan: str) -> dict[str, Any]:
    """Methods between loading and the first call, and a first call with another plan: weights are as they were."""
    plain, kept = load_pipeline(folder, with_dtype({"torch_dtype": torch.float32})), {}
    runner = this.runner()
    for what, method in {"needs none": "disable_lora", "needs all": "transformer.eval"}.items():
        runner.load(folder, {"torch_dtype": torch.float32}, 0, Plan.parse(plan))
        if what == "needs none":
            runner._held.give_back_for(method)
        else:
            runner.apply(method, (), {})
        kept[what] = bool(runner._held._held)
    whole = all(torch.equal(x, _weights(runner.pipe)[key]) for key, x in _weights(plain).items())
    runner.load(folder, {"torch_dtype": torch.float32}, 0, Plan.parse(plan))
    runner.install(Plan.parse(_whole(plan)))
    other = all(torch.equal(x, _weights(runner.pipe)[key]) for key, x in _weights(plain).items())
    runner.restore()
    return {"kept": kept, "whole": whole, "other plan": other}
