"""How a denoiser call is split between ranks: one method per file. This module finds them by name."""

from dataclasses import fields
from typing import Any

from patchpar.errors import PlanError


def known() -> dict[str, Any]:
    """Return the options class of every patch strategy, by name."""
    from patchpar.strategies.displaced import DisplacedPatch
    from patchpar.strategies.exact import ExactPatch
    from patchpar.strategies.fresh_edges import FreshEdges
    from patchpar.strategies.pcpp import PartiallyConditioned
    from patchpar.strategies.piped import PipedStages
    from patchpar.strategies.structure.options import StructureGuidance

    strategies = (ExactPatch, FreshEdges, DisplacedPatch, PartiallyConditioned, PipedStages, StructureGuidance)
    return {found.name: found for found in strategies}


def parse_strategy(text: str) -> Any:
    """Return the strategy of a text: "exact" or "name:key=value,key=value". Raises PlanError naming what is valid."""
    name, _, rest = text.strip().partition(":")
    strategies = known()
    if name not in strategies:
        raise PlanError(f"unknown strategy {name!r}: use one of {', '.join(strategies)}")
    options = {field.name: field.type for field in fields(strategies[name])}
    given: dict[str, Any] = {}
    for part in filter(None, (piece.strip() for piece in rest.replace(":", ",").split(","))):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or key not in options:
            raise PlanError(f"strategy {name!r} does not know {part!r}: its options are {', '.join(options)}")
        if key in given:
            raise PlanError(f"strategy {name!r} has {key} twice: once is enough")
        given[key] = _value(name, key, value)
    return strategies[name](**given)


def resolve_strategy(strategy: Any) -> Any:
    """Return the options object of a plan's `strategy`, a name or an object. Raises PlanError."""
    if isinstance(strategy, str):
        return parse_strategy(strategy)
    if not any(isinstance(strategy, known_class) for known_class in known().values()):
        raise PlanError(
            f"strategy={strategy!r} is not a strategy: use a name ({', '.join(known())}) or its options object"
        )
    return strategy


def _value(strategy: str, key: str, text: str) -> Any:
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if not text:
        raise PlanError(f"strategy {strategy!r}: {key} has no value")
    return text
