"""Tiny transformers with their tokens split over ranks that are threads, beside the same in one piece."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from patchpar.comm.collectives import Communicator
from patchpar.plan.mesh import Axis
from patchpar.shard.attention.all_gather import attend_gathered
from patchpar.shard.transformer.attention import Mode, TokenSplit
from patchpar.shard.transformer.install import TransformerSharder
from patchpar.shard.transformer.probe.discover import discover_tokens
from patchpar.shard.transformer.token_plan import TokenPlan
from tests.tensors import relative
from tests.tiny.transformers import TRANSFORMERS
from tests.unit.threads import on_threads

LIMIT = 1e-5
VARIANTS = (0, 1)


def plan_of(name: str, variant: int = 0) -> TokenPlan:
    """What is found by watching one call."""
    tiny = TRANSFORMERS[name]
    model = tiny.build()
    return discover_tokens(model, model.forward, (), tiny.call(variant))


def predictions(output: Any) -> list[Tensor]:
    """The tensors a denoiser returned."""
    leaves = tree_flatten(output.to_tuple() if hasattr(output, "to_tuple") else output)[0]
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def plain(name: str, variant: int) -> list[Tensor]:
    """The prediction in one piece."""
    tiny = TRANSFORMERS[name]
    with torch.no_grad():
        return predictions(tiny.build()(**tiny.call(variant)))


def split(
    name: str, plan: TokenPlan, ranks: int, variant: int, mode: Mode | None = attend_gathered
) -> list[list[Tensor]]:
    """The prediction on every rank. Raises the first rank's error."""

    tiny = TRANSFORMERS[name]
    models = [tiny.build() for _ in range(ranks)]  # threads share torch's random state

    def on_rank(transport: Any) -> list[Tensor]:
        model = models[transport.rank]
        axis = Axis("patch", transport.rank, ranks, tuple(range(ranks)))
        shard = TransformerSharder(model, plan, TokenSplit(Communicator(transport), axis, mode))
        with torch.no_grad():
            return predictions(shard.denoise(model.forward, **tiny.call(variant)))

    found = on_threads(ranks, on_rank, deadline=30.0)
    errors = [each for each in found if isinstance(each, Exception)]
    if errors:
        raise errors[0]
    return found


def error(got: list[list[Tensor]], want: list[Tensor]) -> float:
    """Largest relative error of any rank's tensors; each is compared by norm."""
    return max(relative(x, y) for rank in got for x, y in zip(rank, want, strict=True))


def hooks_of(model: nn.Module) -> list[str]:
    """Modules that carry a hook of diffusers."""
    return [path for path, module in model.named_modules() if hasattr(module, "_diffusers_hook")]
