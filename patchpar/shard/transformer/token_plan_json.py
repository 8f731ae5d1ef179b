"""A token plan as text, to be kept, shipped, or told to other ranks."""

import json
from dataclasses import asdict
from typing import Any, TypeVar

from patchpar.plan.json_files import object_of
from patchpar.shard.transformer.token_mixing import TokenMixing
from patchpar.shard.transformer.token_plan import (
    AttentionTokens,
    BlockPlan,
    GridSource,
    Replicated,
    TokenPlan,
    TokenRows,
)

T = TypeVar("T")


def to_json(plan: TokenPlan) -> str:
    """The same text for the same plan, wherever it was found."""
    raw = asdict(plan)
    for block in raw["blocks"]:
        if block["mixing"] is None:  # in most plans tokens meet in attention alone
            del block["mixing"]
        for name in ("bounds", "replicated"):
            if not block[name]:
                del block[name]
    return json.dumps(raw, indent=1, default=sorted)


def from_json(text: str) -> TokenPlan:
    """The plan that was written. Raises ValueError, KeyError or TypeError for anything else."""
    raw = object_of(text, "a token plan")
    return TokenPlan(
        denoiser=_of(str, raw["denoiser"]),
        latent=_of(str, raw["latent"]),
        blocks=tuple(_block(_of(dict, each)) for each in _of(list, raw["blocks"])),
        whole={name: _of(str, reason) for name, reason in _of(dict, raw["whole"]).items()},
        others=frozenset((_of(str, path), _tuple(str, signature)) for path, signature in _of(list, raw["others"])),
    )


def _of(kind: type[T], value: Any) -> T:
    """A value of that kind. Raises TypeError."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"{value!r:.80} where a {kind.__name__} was written")
    return value


def _tuple(kind: type[T], values: Any) -> tuple[T, ...]:
    return tuple(_of(kind, value) for value in _of(list, values))


def _whole(value: Any) -> int | None:
    return None if value is None else _of(int, value)


def _block(raw: dict[str, Any]) -> BlockPlan:
    return BlockPlan(
        name=_of(str, raw["name"]),
        kind=_of(str, raw["kind"]),
        paths=_tuple(str, raw["paths"]),
        signature=_tuple(str, raw["signature"]),
        inputs=_inputs(raw),
        counts=_tuple(str, raw["counts"]),
        attentions=tuple(_call(_of(dict, each)) for each in _of(list, raw["attentions"])),
        outputs=_outputs(raw),
        ratio=_ratio(raw["ratio"]),
        origin=None if raw["origin"] is None else _origin(_of(dict, raw["origin"])),
        mixing=None if raw.get("mixing") is None else _mixing(_of(dict, raw["mixing"])),
        bounds=_tuple(str, raw.get("bounds", [])),
        replicated=tuple(_replicated(_of(dict, each)) for each in _of(list, raw.get("replicated", []))),
    )


def _inputs(raw: dict[str, Any]) -> dict[str, TokenRows]:
    return {name: _rows(rows) for name, rows in _of(dict, raw["inputs"]).items()}


def _outputs(raw: dict[str, Any]) -> dict[int, TokenRows]:
    return {int(number): _rows(rows) for number, rows in _of(dict, raw["outputs"]).items()}


def _replicated(raw: dict[str, Any]) -> Replicated:
    return Replicated(path=_of(str, raw["path"]), inputs=_inputs(raw), outputs=_outputs(raw))


def _mixing(raw: dict[str, Any]) -> TokenMixing:
    sums, convolutions, over_frames = (
        _tuple(int, raw[name]) for name in ("sums", "convolutions", "frame_convolutions")
    )
    row_counts, frame_counts = (_tuple(str, raw[name]) for name in ("row_counts", "frame_counts"))
    return TokenMixing(sums, convolutions, row_counts, over_frames, frame_counts, of_video=_of(bool, raw["of_video"]))


def _ratio(value: Any) -> float:
    try:
        return float(_of(int, value)) if isinstance(value, int) else _of(float, value)
    except OverflowError as error:
        raise ValueError("a ratio beyond all numbers") from error


def _rows(raw: Any) -> TokenRows:
    raw = _of(dict, raw)
    return TokenRows(dim=_of(int, raw["dim"]), before=_whole(raw["before"]), after=_whole(raw["after"]))


def _origin(raw: dict[str, Any]) -> GridSource:
    table = None if raw["table"] is None else _of(str, raw["table"])
    return GridSource(dims=_tuple(int, raw["dims"]), patches=_tuple(int, raw["patches"]), table=table)


def _call(raw: dict[str, Any]) -> AttentionTokens:
    queries, keys = (None if raw[name] is None else _rows(raw[name]) for name in ("queries", "keys"))
    return AttentionTokens(queries, keys, _whole(raw["mask_dims"]))
