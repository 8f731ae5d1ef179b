"""Write the token plans that come with the package, as they are found for small models of each class.

python -m tests.tokens.ship              all of them, and what of the configuration they depend on; minutes
python -m tests.tokens.ship --only Flux  those with this in their name

A class is watched in the calls of `tests.tiny.transformers` and in those that its pipelines make. It is left out where
blocks stay whole, or where no plan serves a deeper model of it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement, product
from math import prod
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import nn

from patchpar.shard.transformer.probe.capture import CallArguments
from patchpar.shard.transformer.probe.discover import discover_tokens
from patchpar.shard.transformer.shipped_plans import FoundPlan, ShippedPlans, entry, kinds_of, patches_of
from patchpar.shard.transformer.token_plan import BlockPlan, TokenPlan, TokenRows
from tests import tiny
from tests.tiny.transformers import TRANSFORMERS, Tiny

FOLDER = Path(__file__).parents[2] / "patchpar" / "shard" / "transformer" / "plans"
PIPED: dict[str, tuple[str, ...]] = {
    "AuraFlowTransformer2DModel": ("auraflow",),
    "ChromaTransformer2DModel": ("chroma",),
    "CogVideoXTransformer3DModel": ("cogvideox",),
    "CogView4Transformer2DModel": ("cogview4",),
    "DiTTransformer2DModel": ("dit",),
    "Flux2Transformer2DModel": ("flux2",),
    "FluxTransformer2DModel": ("flux",),
    "HiDreamImageTransformer2DModel": ("hidream",),
    "HunyuanVideoTransformer3DModel": ("hunyuan_video",),
    "LTXVideoTransformer3DModel": ("ltx", "ltx_image", "ltx_condition"),
    "LTX2VideoTransformer3DModel": ("ltx2", "ltx2_image", "ltx2_condition"),
    "Lumina2Transformer2DModel": ("lumina2",),
    "PixArtTransformer2DModel": ("pixart",),
    "QwenImageTransformer2DModel": ("qwen", "qwen_edit"),
    "SD3Transformer2DModel": ("sd3",),
    "WanTransformer3DModel": ("wan", "wan_i2v", "wan_i2v_two", "wan_ti2v", "wan_ti2v_image"),
    "ZImageTransformer2DModel": ("zimage",),
}
"""Class -> pipelines that call it."""
CLASSES = (
    *PIPED,
    "CogView3PlusTransformer2DModel",
    "EasyAnimateTransformer3DModel",
    "HunyuanDiT2DModel",
    "HunyuanVideo15Transformer3DModel",
    "HunyuanVideoFramepackTransformer3DModel",
    "Krea2Transformer2DModel",
    "MochiTransformer3DModel",
    "OmniGenTransformer2DModel",
    "SanaTransformer2DModel",
    "SanaVideoTransformer3DModel",
    "SkyReelsV2Transformer3DModel",
    "WanVACETransformer3DModel",
)
VARIANTS = {"HiDreamImageTransformer2DModel": (0, 1)}
"""Calls that differ by more than their sizes."""
OTHER_PATCHES: dict[str, tuple[dict[str, Any], ...]] = {
    "SD3Transformer2DModel": ({"patch_size": 4, "dual_attention_layers": ()},),
}
"""Patches beside those of the small model, in common models of the class: the embedded transformer's."""
PATCH = 2
"""Rows and columns of a latent's patch in these small models."""
OTHER_DEPTHS: dict[str, dict[str, Any]] = {
    "HiDreamImageTransformer2DModel": {"num_layers": 3, "num_single_layers": 3, "llama_layers": [0, 1, 2, 3, 0, 1]},
    "HunyuanDiT2DModel": {"num_layers": 6},
}
"""Where the number of layers is not free."""
DEPTHS = ("num_layers", "num_single_layers", "n_layers", "num_mmdit_layers", "num_single_dit_layers")
PARTS = ("channel", "patch")
MOST_SIDES = 3


@dataclass(frozen=True, slots=True)
class Watched:
    """A model, one call of it, and the plan that was found."""

    model: Any
    plan: TokenPlan


def main() -> int:
    """1 where a class gave no plan."""
    parser = argparse.ArgumentParser(prog="python -m tests.tokens.ship", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", action="append", metavar="NAME", help="classes with this in their name")
    wanted = parser.parse_args().only or [""]
    torch.set_num_threads(1)
    failed = 0
    for name in sorted(each for each in CLASSES if any(part in each for part in wanted)):
        try:
            text = made(name).text()
        except (NotImplementedError, ValueError) as error:
            failed += 1
            sys.stderr.write(f"{name}: {error}\n")
        else:
            (FOLDER / f"{name}.json").write_text(text)
            sys.stderr.write(f"{name}: {len(text)} bytes\n")
    return int(failed > 0)


def made(name: str) -> ShippedPlans:
    """What is to be shipped for a class. Raises ValueError where nothing can be."""
    watched = sorted(_watched(name), key=lambda each: -sum(len(block.inputs) for block in each.plan.blocks))
    factors = _factors(watched)
    found: list[FoundPlan] = []
    for each in watched:
        new = _pruned(each, found, factors)
        if new is not None:
            found.append(new)
    return ShippedPlans(denoiser=name, diffusers=diffusers.__version__, found=tuple(found))


def deeper(found: Tiny) -> Tiny:
    """The same class with one layer more of every sort."""
    more = {name: found.config[name] + 1 for name in DEPTHS if name in found.config}
    return replace(found, config={**found.config, **OTHER_DEPTHS.get(found.name, more)})


def with_other_patches(name: str) -> Iterator[Tiny]:
    """The small model of a class with other patches, and latents of as many of them."""
    small = TRANSFORMERS[name]
    for changes in OTHER_PATCHES.get(name, ()):
        sides = changes["patch_size"] // PATCH

        def call(variant: int, sides: int = sides) -> dict[str, Any]:
            given = small.call(variant)
            return {**given, small.tokens: given[small.tokens].repeat(1, 1, sides, sides)}

        yield replace(small, config={**small.config, **changes}, call=call)


def _watched(name: str) -> Iterator[Watched]:
    """Small models of the class, in the calls that are made of them."""
    for small in (TRANSFORMERS[name], *with_other_patches(name)):
        for variant in VARIANTS.get(name, (0,)):
            model = small.build()
            yield Watched(model, discover_tokens(model, model.forward, (), small.call(variant)))
    for pipeline in PIPED.get(name, ()):
        yield from _watched_in(pipeline)


def _watched_in(pipeline: str) -> Iterator[Watched]:
    found, calls = tiny.build(pipeline), {}

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        calls.setdefault(CallArguments.of(module, args, kwargs).signature(), (args, dict(kwargs)))

    handle = found.denoiser.register_forward_pre_hook(note, with_kwargs=True)
    try:
        tiny.latents(found, steps=2)
    finally:
        handle.remove()
    for args, kwargs in calls.values():
        yield Watched(found.denoiser, discover_tokens(found.denoiser, found.denoiser.forward, args, kwargs))


def _pruned(watched: Watched, before: Sequence[FoundPlan], factors: Mapping[str, tuple[str, ...]]) -> FoundPlan | None:
    """What this model adds to what others have told. Raises ValueError where they disagree."""
    plan, kinds = watched.plan, kinds_of(watched.model)
    if plan.whole:
        raise ValueError(f"some of its blocks stay whole: {dict(plan.whole)}")
    known = [each.fitted(watched.model) for each in before if each.patches == patches_of(watched.model)]
    blocks = [block for block in plan.blocks if not _is_reported(block, known)]
    others = {(kinds[path], signature): path for path, signature in sorted(plan.others, reverse=True)}
    others = {key: path for key, path in others.items() if not any((path, key[1]) in each.others for each in known)}
    if not blocks and not others:
        return None
    blocks = [replace(block, paths=block.paths[:1]) for block in blocks]
    paths = {block.paths[0] for block in blocks} | set(others.values())
    return FoundPlan(
        plan=replace(plan, blocks=tuple(blocks), others=frozenset((path, key[1]) for key, path in others.items())),
        kinds={path: kinds[path] for path in sorted(paths)},
        patches=patches_of(watched.model),
        per_token={block.name: factors[block.name] for block in blocks if block.name in factors},
    )


def _is_reported(block: BlockPlan, known: Sequence[TokenPlan]) -> bool:
    """Whether a plan says this already. Raises ValueError where one says something else."""
    for plan in known:
        for other in plan.blocks:
            if other.signature == block.signature and set(other.paths) & set(block.paths):
                if not (same(other, block) or covers(other, block)):
                    raise ValueError(f"blocks of one kind are split in two ways:\n{other}\n{block}")
                return True
    return False


def same(one: BlockPlan, other: BlockPlan) -> bool:
    """Whether two plans say the same of a block, but for how many tokens a latent has where that is not asked."""
    ratio = other.ratio if one.ratio and not _asks_for_ratio(one) else one.ratio
    return replace(one, paths=other.paths, ratio=ratio) == other


def covers(one: BlockPlan, other: BlockPlan) -> bool:
    """Whether the other is what `one` says where there happens to be nothing beside the tokens, or no grid.

    Or where an argument with a row for each token, such as their times, happens to have one row for all.
    """

    def covered(rows: TokenRows | None, special: TokenRows | None) -> bool:
        return rows == special or (rows is not None and special == TokenRows(rows.dim) and not rows.amid)

    one = replace(
        one, inputs={name: rows for name, rows in one.inputs.items() if not rows.alone or name in other.inputs}
    )
    positions = [(one.inputs[name], other.inputs.get(name)) for name in one.inputs]
    positions += [(one.outputs[number], other.outputs.get(number)) for number in one.outputs]
    for call, special in zip(one.attentions, other.attentions, strict=False):
        positions += [(call.queries, special.queries), (call.keys, special.keys)]
    alike = replace(
        other,
        inputs=one.inputs,
        outputs=one.outputs,
        attentions=one.attentions,
        origin=one.origin if other.origin is None else other.origin,
        text=one.text if other.text is None and _is_beside(one) else other.text,
    )
    counts = [len(each.inputs) + len(each.outputs) + len(each.attentions) for each in (one, other)]
    return counts[0] == counts[1] and same(one, alike) and all(covered(*each) for each in positions)


def _is_beside(block: BlockPlan) -> bool:
    """Whether the text, or padding, is in one argument with the tokens, where there may be none of it."""
    return block.text is not None and next(iter(block.text.inputs)) in block.inputs


def _asks_for_ratio(block: BlockPlan) -> bool:
    return not any(rows.alone for rows in block.inputs.values())


def _factors(watched: Sequence[Watched]) -> dict[str, tuple[str, ...]]:
    """For lists of blocks that ask how many numbers of the latent make a token: what to multiply, in every model."""
    numbers: dict[str, list[tuple[Any, int]]] = {}
    for each in watched:
        for block in each.plan.blocks:
            if _asks_for_ratio(block):
                numbers.setdefault(block.name, []).append((each.model.config, round(1 / block.ratio)))
    return {name: _product(name, wanted) for name, wanted in numbers.items()}


def _product(name: str, wanted: Sequence[tuple[Any, int]]) -> tuple[str, ...]:
    """A number of channels, and sides of a patch, which may come more than once."""
    config = wanted[0][0]
    channels, sides = ([key for key in config if part in key and _is_number(config[key])] for part in PARTS)
    for count in range(MOST_SIDES + 1):
        for factors in product(channels, combinations_with_replacement(sides, count)):
            chosen = (factors[0], *factors[1])
            if all(prod(entry(each, factor) for factor in chosen) == number for each, number in wanted):
                return chosen
    raise ValueError(f"{name}: no product of its configuration is {[number for _, number in wanted]}")


def _is_number(value: Any) -> bool:
    values = value if isinstance(value, (list, tuple)) else (value,)
    return bool(values) and all(type(each) is int for each in values)


if __name__ == "__main__":
    sys.exit(main())
