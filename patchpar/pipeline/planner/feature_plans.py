"""Feature plans of transformers without values (axis `tensor`): given, or found in a narrow model of the same class.

The search perturbs features, for which it needs values. How a block is cut follows from its code and from where heads
and gates lie, not from how wide it is. So it is searched in a model of the same class with random weights, two layers
of each sort and as few heads as the ranks can share; what is found there is scaled to the width of the real one.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import gcd
from typing import Any

import torch
from torch import nn

from patchpar.errors import UnsupportedModel
from patchpar.pipeline.planner.empty_call import first_call, small_size
from patchpar.shard.tensor.feature_plan import BlockCut, Count, FeatureCut, FeaturePlan
from patchpar.shard.tensor.lookup import WAY_OUT, discover_features, shapes_of
from patchpar.shard.transformer.probe.capture import block_candidates, structure_of
from patchpar.shard.unsupported_model import in_one_line, is_of_the_split

LAYERS = 2
"""Of each sort in a narrow model."""
MOST_WEIGHTS = 200_000_000
"""Of a narrow model: a larger one is not searched, which would take minutes."""
SEED = 0


class KnownFeatures:
    """Feature plans by class of denoiser and number of ranks, once they have been searched."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, int], FeaturePlan | UnsupportedModel] = {}

    def search(self, pipe: Any, denoisers: Mapping[str, nn.Module], kwargs: Mapping[str, Any], size: int) -> None:
        """Find the plans of the `denoisers` of a pipeline on the meta device, unless they are known."""
        for denoiser in denoisers.values():
            key = type(denoiser).__name__, size
            if key in self._found:
                continue
            try:
                self._found[key] = plan_without_values(pipe, denoiser, kwargs, size)
            except UnsupportedModel as error:
                self._found[key] = error

    def of(self, denoiser: nn.Module, size: int) -> FeaturePlan:
        """Return the plan of a denoiser. Raises UnsupportedModel where there is none."""
        found = self._found[type(denoiser).__name__, size]
        if isinstance(found, UnsupportedModel):
            raise found
        return found


def plan_without_values(pipe: Any, denoiser: nn.Module, kwargs: Mapping[str, Any], size: int) -> FeaturePlan:
    """Return the plan of a denoiser of `pipe`, both on the meta device, for so many ranks. Raises UnsupportedModel."""
    kind, reasons = type(denoiser).__name__, list[str]()
    call = first_call(pipe, denoiser, {**kwargs, **small_size(pipe, kwargs)})
    for config in narrow_configs(denoiser, size):
        try:
            narrow = _with_random_weights(denoiser, config)
            own = call.map(_with_values)
            found = discover_features(narrow, narrow.forward, (own.args, own.kwargs), size)
        except Exception as error:  # a configuration that cannot be, or a call that does not go with it
            if not is_of_the_split(error):
                raise
            reasons.append(in_one_line(error))
            continue
        scaled = _scaled(found, narrow, denoiser)
        if scaled.blocks:
            return scaled
        reasons += scaled.refused
    why = "; ".join(dict.fromkeys(reasons)) or f"its heads cannot be shared by {size} ranks"
    raise UnsupportedModel(
        f"how the features of {kind} are divided between {size} ranks is found by values, which a recording has not, "
        f"and not in a narrow model of this class either ({why}): {WAY_OUT}"
    )


def narrow_configs(denoiser: Any, size: int) -> Iterator[dict[str, Any]]:
    """Yield configurations of narrow models of the same class, the narrowest first, and at last its own."""
    config = {name: value for name, value in denoiser.config.items() if not name.startswith("_")}
    heads = {name: value for name, value in config.items() if "heads" in name and _is_many(value)}
    common = gcd(*heads.values()) if heads else 0
    layers = {name: min(value, LAYERS) for name, value in config.items() if _counts_layers(name) and _is_many(value)}
    if common and common % size == 0:
        fewer = {name: value * size // common for name, value in heads.items()}
        every = _widths(config, heads)
        widths = {name: value * size // common for name, value in config.items() if _is_many(value) and value in every}
        for shorter in (layers, {}):
            yield {**config, **widths, **fewer, **shorter}
            yield {**config, **fewer, **shorter}
    yield {**config, **layers}
    yield config


def _counts_layers(name: str) -> bool:
    return any(part in name for part in ("layers", "depth", "blocks"))


def _is_many(value: object) -> bool:
    return type(value) is int and value > 1


def _widths(config: Mapping[str, Any], heads: Mapping[str, int]) -> set[int]:
    """Return the features of all heads together: an entry of that size is as wide as the blocks."""
    of_head = [value for name, value in config.items() if "head_dim" in name and type(value) is int]
    named = [config.get(name) for name in ("hidden_size", "dim", "inner_dim", "embed_dim")]
    of_blocks = {value for value in named if type(value) is int}
    return of_blocks | {width * count for width in of_head for count in heads.values()}


def _with_random_weights(denoiser: Any, config: dict[str, Any]) -> nn.Module:
    """Return a model of the same class on the CPU, none of whose weights are all zero. Raises UnsupportedModel."""
    kind = type(denoiser)
    with torch.device("meta"):
        count = sum(weight.numel() for weight in kind.from_config(config).parameters())
    if count > MOST_WEIGHTS:
        raise UnsupportedModel(f"a model of {count / 1e9:.1f} billion weights is too large to be searched")
    with torch.random.fork_rng([]):
        torch.default_generator.manual_seed(SEED)  # those of GPUs are the caller's
        found: nn.Module = kind.from_config(config).float().eval().requires_grad_(requires_grad=False)
        for weight in found.parameters():
            if not weight.any():
                weight.normal_(std=0.02)
    return found


def _with_values(name: str, leaf: Any) -> Any:
    """Return a leaf of a call with values: its own, or else any."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if not leaf.is_meta:
        # Schedulers with shift_terminal make a NaN of the only step of a call, as of Qwen-Image.
        return leaf.float().nan_to_num(1.0) if leaf.is_floating_point() else leaf
    if leaf.is_floating_point():
        return torch.randn(leaf.shape, generator=torch.Generator().manual_seed(SEED))
    return torch.ones(leaf.shape, dtype=leaf.dtype)


# --- from narrow to wide ----------------------------------------------------------------------------------------


def _scaled(found: FeaturePlan, narrow: nn.Module, wide: nn.Module) -> FeaturePlan:
    """Return the plan of a narrow model for a wide one. Blocks that do not scale are refused in it."""
    blocks, refused = list[BlockCut](), list(found.refused)
    for cut in found.blocks:
        try:
            blocks.append(_scaled_block(cut, narrow.get_submodule(cut.paths[0]), wide))
        except UnsupportedModel as error:
            refused.append(f"{cut.name}: {error}")
    return replace(found, blocks=tuple(blocks), refused=tuple(refused))


def _scaled_block(cut: BlockCut, narrow: nn.Module, wide: nn.Module) -> BlockCut:
    structure = structure_of(narrow)
    alike = [
        (path, block)
        for path, name, block in block_candidates(wide)
        if name == cut.name and type(block).__name__ == cut.kind and structure_of(block) == structure
    ]
    if not alike:
        raise UnsupportedModel("the model has no such block")
    block = alike[0][1]
    if cut.arguments and shapes_of(block) != shapes_of(narrow):
        raise UnsupportedModel("features of its arguments are divided, whose number in a wide model is not known")
    return replace(
        cut,
        paths=tuple(path for path, each in alike if shapes_of(each) == shapes_of(block)),
        columns=tuple(_scaled_cut(each, narrow, block, 0) for each in cut.columns),
        rows=tuple(_scaled_cut(each, narrow, block, 1) for each in cut.rows),
        norms=tuple(_scaled_cut(each, narrow, block, 0) for each in cut.norms),
        counts=tuple(_scaled_count(each, block) for each in cut.counts),
    )


def _scaled_cut(cut: FeatureCut, narrow: nn.Module, wide: nn.Module, dim: int) -> FeatureCut:
    """Return the cut of a weight along `dim`. Raises UnsupportedModel where it would divide a feature."""
    few, many = (_features(each.get_submodule(cut.path), dim) for each in (narrow, wide))
    if few is None or many is None:
        raise UnsupportedModel(f"{cut.path} has no weight that tells its features")
    ends = {end for runs in cut.runs for run in runs for end in run}
    if any(end * many % few for end in ends):
        raise UnsupportedModel(f"the {many} features of {cut.path} cannot be shared evenly")
    runs = tuple(tuple((start * many // few, end * many // few) for start, end in of_rank) for of_rank in cut.runs)
    return FeatureCut(cut.path, runs)


def _features(module: nn.Module, dim: int) -> int | None:
    weight = getattr(module, "weight", None)
    return None if weight is None else int(weight.shape[dim])


def _scaled_count(count: Count, wide: nn.Module) -> Count:
    whole, of_ranks = int(getattr(wide.get_submodule(count.path), count.name)), sum(count.values)
    if any(value * whole % of_ranks for value in count.values):
        raise UnsupportedModel(f"{count.name}={whole} cannot be shared evenly")
    return replace(count, values=tuple(value * whole // of_ranks for value in count.values))
