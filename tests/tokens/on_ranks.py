"""What the ranks of these tests run: whole transformer pipelines, unmodified, with their tokens split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from diffusers.hooks.first_block_cache import FBCHeadBlockHook
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from patchpar.errors import PatchparError
from patchpar.pipeline.messages import CallOptions
from patchpar.pipeline.runner import PipelineRunner
from patchpar.plan.plan import Plan
from patchpar.shard.step_caches import CacheVote
from tests import tiny
from tests.ranks import PoolRank


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineCase:
    """A pipeline under a plan. `twice`: the second of two images, the first being of another seed."""

    name: str
    plan: str
    exchange: str = "on"
    steps: int = 3
    twice: bool = False
    verifications: Path | None = None
    cache: Any = None
    options: dict[str, Any] = field(default_factory=dict)


def arguments(case: PipelineCase, found: tiny.Tiny, seed: int = 0) -> dict[str, Any]:
    """What the pipeline is called with."""
    generator = torch.Generator().manual_seed(seed)
    steps = {"num_inference_steps": case.steps, "output_type": "latent"}
    return found.call_kwargs | steps | {"generator": generator} | case.options


def latents_of(output: Any) -> Tensor:
    """The final latents, or the image where a pipeline gives nothing else."""
    return torch.as_tensor(output[0] if isinstance(output, tuple) else next(iter(output.values())))


def generated(this: PoolRank, cases: Sequence[PipelineCase]) -> list[Tensor | str | None]:
    """Final latents of each drawing on the first rank, or what it raised. Needs all ranks of the pool."""
    engine = this.runner()
    try:
        return [_generated(engine, case) for case in cases]
    finally:
        engine.restore()


def _generated(engine: PipelineRunner, case: PipelineCase) -> Tensor | str | None:
    found = tiny.build(case.name)
    plan = Plan.parse(case.plan)
    engine.adopt(found.pipe)
    if case.cache is not None:
        engine.apply("transformer.enable_cache", (case.cache,), {})
    engine.install(plan, verify=case.verifications or False)
    engine.control(exchange=case.exchange)
    options = CallOptions(plan=plan, verify=case.verifications or False, quiet=True)
    try:
        for seed in (1, 0) if case.twice else (0,):
            output = getattr(engine.generate(arguments(case, found, seed), options), "output", None)
    except PatchparError as error:
        return f"{type(error).__name__}: {error}"
    return None if output is None else latents_of(output)


def with_compiled_blocks(this: PoolRank, name: str, denoiser: str) -> tuple[Any, Tensor, int]:
    """Latents of a pipeline whose blocks were compiled through the engine, plain ones, and the number of graphs."""
    counter, found = CompileCounter(), tiny.build(name)
    case, engine = PipelineCase(name=name, plan="patch=2"), this.runner()
    want = latents_of(found.pipe(**arguments(case, found)))
    plan = Plan.parse(case.plan)
    engine.adopt(found.pipe)
    try:
        engine.apply(f"{denoiser}.compile_repeated_blocks", (), {"backend": counter, "fullgraph": True})
        generated = [
            engine.generate(arguments(case, found), CallOptions(plan=plan, verify=False, quiet=True)) for _ in "ab"
        ]
        got = getattr(generated[1], "output", None)
    finally:
        engine.restore()
    return None if got is None else latents_of(got), want, counter.frame_count


def cached_past_the_engine(this: PoolRank, cache: Any, steps: int) -> list[Tensor | None]:
    """Latents of images one after the other: of a network as it is, with a cache that it is given, without again."""
    found, engine = tiny.build("flux"), this.runner()
    case, plan = PipelineCase(name="flux", plan="patch=2", steps=steps), Plan.parse("patch=2")
    engine.adopt(found.pipe)
    images = []
    try:
        for change in (lambda: None, lambda: found.denoiser.enable_cache(cache), found.denoiser.disable_cache):
            change()
            generated = engine.generate(arguments(case, found), CallOptions(plan=plan, verify=False, quiet=True))
            output = getattr(generated, "output", None)
            images.append(None if output is None else latents_of(output))
    finally:
        engine.restore()
    return images


def refusal_of_compiled(this: PoolRank, name: str, plan: str, compiled: str) -> str:
    """What is said of a call after the method `compiled` of a network."""
    found, engine = tiny.build(name), this.runner()
    engine.adopt(found.pipe)
    try:
        engine.apply(compiled, (), {"backend": "eager"})
        options = CallOptions(plan=Plan.parse(plan), verify=False, quiet=True)
        engine.generate(arguments(PipelineCase(name=name, plan=plan), found), options)
    except PatchparError as error:
        return str(error)
    finally:
        engine.restore()
    return "nothing"


def own_decisions(this: PoolRank, cache: Any, steps: int) -> list[bool]:
    """What each of two ranks would decide by its own tokens, step by step, while all do what the vote says."""
    found, plan, decided = tiny.build("flux"), Plan.parse("patch=2"), []
    alone = FBCHeadBlockHook._should_compute_remaining_blocks
    voted = CacheVote._decide

    def noted(vote: CacheVote, hook: Any, residual: Tensor) -> bool:
        decided.append(alone(hook, residual))
        return voted(vote, hook, residual)

    engine = this.runner()
    engine.adopt(found.pipe)
    try:
        engine.apply("transformer.enable_cache", (cache,), {})
        with patch.object(CacheVote, "_decide", noted):
            case = PipelineCase(name="flux", plan="patch=2", steps=steps)
            engine.generate(arguments(case, found), CallOptions(plan=plan, verify=False, quiet=True))
    finally:
        engine.restore()
    return decided


def with_adapters(this: PoolRank, folder: Path) -> list[tuple[Tensor, Tensor]]:
    """Latents of images with adapters of `folder` put on and taken off between them, split and plain."""
    found, alone, engine = tiny.build("flux"), tiny.build("flux"), this.runner()
    case, plan = PipelineCase(name="flux", plan="patch=3"), Plan.parse("patch=3")
    engine.adopt(found.pipe)

    def load(do: Any) -> None:
        for name in ("ink", "snow"):
            do("load_lora_weights", folder, weight_name=f"{name}.safetensors", adapter_name=name)

    changes = (
        lambda do: None,
        load,
        lambda do: do("set_adapters", ["snow"], [0.5]),
        lambda do: do("unload_lora_weights"),
    )
    images = []
    try:
        for change in changes:
            change(lambda name, *args, **kwargs: engine.apply(name, args, kwargs))
            change(lambda name, *args, **kwargs: getattr(alone.pipe, name)(*args, **kwargs))
            generated = engine.generate(arguments(case, found), CallOptions(plan=plan, verify=False, quiet=True))
            got = getattr(generated, "output", None)
            if got is not None:
                images.append((latents_of(got), latents_of(alone.pipe(**arguments(case, alone)))))
    finally:
        engine.restore()
    return images
