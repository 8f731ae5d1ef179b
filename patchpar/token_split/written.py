"""A token plan as text, to be kept, shipped, or told to other ranks."""

import json
from dataclasses import asdict
from typing import Any

from patchpar.token_split.plan import AttentionCall, BlockPlan, Origin, Rows, TokenPlan


def to_json(plan: TokenPlan) -> str:
    """The same text for the same plan, wherever it was found."""
    return json.dumps(asdict(plan), indent=1, default=sorted)


def from_json(text: str) -> TokenPlan:
    """The plan that was written. Raises ValueError, KeyError or TypeError for anything else."""
    raw = json.loads(text)
    blocks = tuple(_block(each) for each in raw["blocks"])
    others = frozenset((path, tuple(signature)) for path, signature in raw["others"])
    return TokenPlan(**{**raw, "blocks": blocks, "others": others})


def _block(raw: dict[str, Any]) -> BlockPlan:
    return BlockPlan(
        name=raw["name"],
        kind=raw["kind"],
        paths=tuple(raw["paths"]),
        signature=tuple(raw["signature"]),
        inputs={name: Rows(**rows) for name, rows in raw["inputs"].items()},
        counts=tuple(raw["counts"]),
        attentions=tuple(_call(each) for each in raw["attentions"]),
        outputs={int(number): Rows(**rows) for number, rows in raw["outputs"].items()},
        ratio=raw["ratio"],
        origin=None if raw["origin"] is None else _origin(raw["origin"]),
    )


def _origin(raw: dict[str, Any]) -> Origin:
    return Origin(dims=tuple(raw["dims"]), patches=tuple(raw["patches"]), table=raw["table"])


def _call(raw: dict[str, Any]) -> AttentionCall:
    queries, keys = (None if raw[name] is None else Rows(**raw[name]) for name in ("queries", "keys"))
    return AttentionCall(queries, keys, raw["mask_dims"])
