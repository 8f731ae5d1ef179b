"""Token plans that come with the package, so that common classes need no search, only verification.

A plan applies to a kind of block: the module list, the class, its parts and those of its attention layers, and the code
that they run. The number of such blocks, their width and their heads do not matter. For a model with blocks of another
kind in those lists a plan is searched as for any other model.
"""

import hashlib
import inspect
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from importlib.resources import files
from typing import Any

from torch import nn

from patchpar.plan.dataclass_json import decoded
from patchpar.shard.module_tree import modules_of
from patchpar.shard.transformer.probe.capture import block_candidates
from patchpar.shard.transformer.token_plan import BlockPlan, TokenPlan
from patchpar.shard.transformer.token_plan_json import to_json

FOLDER = files("patchpar.shard.transformer") / "plans"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockKind:
    """What the blocks of one plan have in common. `code` is a fingerprint of the functions they run."""

    list_name: str
    block: str
    parts: tuple[str, ...]
    code: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPlan:
    """A plan as it was found for one model, and the kind of each block in it, by its path.

    `patches`: entries of the configuration that set the patch size. `per_token`: for a list of blocks the entries whose
    product is the latent's elements per token; only where no argument consists of tokens alone.
    """

    plan: TokenPlan
    kinds: Mapping[str, BlockKind]
    patches: Mapping[str, Any]
    per_token: Mapping[str, tuple[str, ...]]

    def fitted(self, denoiser: nn.Module) -> TokenPlan:
        """Return the same plan for the blocks of another model, without those that it lacks."""
        there: dict[BlockKind, list[str]] = {}
        for path, kind in kinds_of(denoiser).items():
            there.setdefault(kind, []).append(path)
        blocks = []
        for block in self.plan.blocks:
            paths = tuple(there.get(self.kinds[block.paths[0]], ()))
            if paths:
                blocks.append(replace(block, paths=paths, ratio=self._ratio(block, denoiser)))
        others = {(path, signature) for one, signature in self.plan.others for path in there.get(self.kinds[one], ())}
        return replace(self.plan, blocks=tuple(blocks), others=frozenset(others))

    def _ratio(self, block: BlockPlan, denoiser: Any) -> float:
        names = self.per_token.get(block.name)
        return block.ratio if names is None else 1 / math.prod(entry(denoiser.config, name) for name in names)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShippedPlans:
    """The plans shipped for a class of denoisers. `diffusers`: the version they were found with."""

    denoiser: str
    diffusers: str
    found: tuple[FoundPlan, ...]

    def plan_for(self, denoiser: nn.Module) -> TokenPlan | None:
        """Return the plan for a model; None where its blocks are of other kinds."""
        found = [each for each in self.found if each.patches == patches_of(denoiser)]
        known = {kind for each in found for kind in each.kinds.values()}
        lists = {kind.list_name for kind in known}
        here = [kind for kind in kinds_of(denoiser).values() if kind.list_name in lists]
        if not found or not known.issuperset(here):
            return None
        first, *others = (each.fitted(denoiser) for each in found)
        for other in others:
            first = first.joined(other)
        return first if first.blocks else None

    def text(self) -> str:
        """Return the plans as JSON."""
        found = [{**asdict(each), "plan": json.loads(to_json(each.plan))} for each in self.found]
        return json.dumps({**asdict(self), "found": found}, indent=1) + "\n"


def shipped_for(denoiser: nn.Module) -> ShippedPlans | None:
    """Return the plans shipped for the class of a denoiser; None where there are none, or it is not diffusers'."""
    kind = type(denoiser)
    file = FOLDER / f"{kind.__name__}.json"
    return read(file.read_text()) if kind.__module__.startswith("diffusers.") and file.is_file() else None


def read(text: str) -> ShippedPlans:
    """Parse the text of `ShippedPlans.text`."""
    return decoded(ShippedPlans, json.loads(text))


def kinds_of(denoiser: nn.Module) -> dict[str, BlockKind]:
    """Return the kind of each item of a module list, by its path."""
    return {
        path: BlockKind(
            list_name=name,
            block=type(module).__name__,
            parts=tuple(_parts(module)),
            code=_fingerprint(module),
        )
        for path, name, module in block_candidates(denoiser)
    }


def patches_of(denoiser: Any) -> dict[str, Any]:
    """Return the entries of the configuration on patches, as read from a file."""
    return {name: _listed(value) for name, value in denoiser.config.items() if "patch" in name}


def _listed(value: Any) -> Any:
    """Return a value with lists for tuples."""
    return [_listed(each) for each in value] if isinstance(value, (list, tuple)) else value


def entry(config: Mapping[str, Any], name: str) -> int:
    """Return a number of the configuration; of several, such as the sides of a patch, their product."""
    value = config[name]
    return math.prod(value) if isinstance(value, (list, tuple)) else value


def _parts(block: nn.Module) -> Iterator[str]:
    """Yield the parts of a block and of its attention layers without norms, which mix no tokens and are optional."""
    for name, layer in block.named_children():
        yield name
        if getattr(layer, "processor", None) is not None:
            yield from (f"{name}.{part}" for part, _ in layer.named_children() if "norm" not in part)


def _fingerprint(module: nn.Module) -> str:
    """Return a hash of the code that orders and mixes tokens; empty where its source cannot be read."""
    try:
        sources = sorted({_source_of(function) for function in _functions(module)})
    except OSError:
        return ""
    return hashlib.sha256("\n".join(sources).encode()).hexdigest()[:16]


@lru_cache(maxsize=1024)  # all blocks of a kind have the same functions
def _source_of(function: Any) -> str:
    return inspect.getsource(function)


def _functions(module: nn.Module) -> Iterator[Any]:
    yield type(module).forward
    for layer in modules_of(module):
        processor = getattr(layer, "processor", None)
        if processor is not None:
            yield type(layer).forward
            yield type(processor).__call__
