"""How a denoiser call is split between ranks: one method per file. This module finds them by name.

Other packages add strategies by entry points of the group `patchpar.strategies`, which are loaded when they are named:

    [project.entry-points."patchpar.strategies"]
    mine = "my_package:MyStrategy"
"""

from dataclasses import fields, is_dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from patchpar.errors import PlanError
from patchpar.plan.names_elsewhere import advice

GROUP = "patchpar.strategies"


def known() -> dict[str, Any]:
    """Return the options class of every strategy of this package, by name."""
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
    options_class = _class_of(name)
    options = {field.name: field.type for field in fields(options_class)}
    given: dict[str, Any] = {}
    for part in filter(None, (piece.strip() for piece in rest.replace(":", ",").split(","))):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or key not in options:
            raise PlanError(f"strategy {name!r} does not know {part!r}: its options are {', '.join(options)}")
        if key in given:
            raise PlanError(f"strategy {name!r} has {key} twice: once is enough")
        given[key] = _value(name, key, value)
    return options_class(**given)


def resolve_strategy(strategy: Any) -> Any:
    """Return the options object of a plan's `strategy`, a name or an object. Raises PlanError."""
    from patchpar.strategies.strategy import PatchStrategy

    if isinstance(strategy, str):
        return parse_strategy(strategy)
    ours = tuple(known().values())
    if isinstance(strategy, PatchStrategy) and type(strategy) not in ours:
        _check_complete(strategy)
    if isinstance(strategy, (PatchStrategy, *ours)):
        return strategy
    raise PlanError(
        f"strategy={strategy!r} is not a strategy: use a name ({', '.join(_names())}) or its options object"
    )


def _check_complete(strategy: Any) -> None:
    """Raise PlanError for a strategy without a name, or whose policy is none."""
    from patchpar.plan.exchange_policy import ExchangePolicy
    from patchpar.strategies.strategy import PatchStrategy

    kind = type(strategy)
    if not isinstance(getattr(kind, "name", None), str):
        raise PlanError(f"strategy class {kind.__name__} has no name: add one, as name: ClassVar[str] = 'mine'")
    lacks_policy = kind.policy is PatchStrategy.policy
    if lacks_policy or not isinstance(strategy.policy, ExchangePolicy):
        found = "has no policy" if lacks_policy else f"has the policy {strategy.policy!r}"
        raise PlanError(f"strategy {kind.name!r} {found}: add a property policy that returns an ExchangePolicy")


def installed() -> dict[str, EntryPoint]:
    """Return the entry points of strategies of other packages, by name. Raises PlanError for two of one name."""
    found, ours = dict[str, EntryPoint](), known()
    for each in entry_points(group=GROUP):
        other = found.setdefault(each.name, each)
        if each.name in ours or (other.value, _package(other)) != (each.value, _package(each)):
            taken = "this package" if each.name in ours else _package(other)
            raise PlanError(
                f"the package {_package(each)} registers a strategy {each.name!r}, which {taken} has too: uninstall one"
            )
    return found


def _names() -> list[str]:
    return [*known(), *installed()]


def _class_of(name: str) -> Any:
    """Return the options class of a strategy. Raises PlanError."""
    if found := known().get(name):
        return found
    entry = installed().get(name)
    if entry is None:
        raise PlanError(f"unknown strategy {name!r}: use one of {', '.join(_names())}{advice(name)}")
    from patchpar.strategies.strategy import PatchStrategy

    try:
        found = entry.load()
    except Exception as error:
        raise PlanError(
            f"strategy {name!r} of the package {_package(entry)} cannot be loaded from {entry.value!r}: {error!r}"
        ) from error
    if not (isinstance(found, type) and issubclass(found, PatchStrategy) and is_dataclass(found)):
        raise PlanError(
            f"strategy {name!r} of the package {_package(entry)} is {found!r}: it has to be a dataclass derived from "
            "patchpar.strategies.strategy.PatchStrategy"
        )
    if getattr(found, "name", None) != name:
        raise PlanError(
            f"strategy {name!r} of the package {_package(entry)} has name={getattr(found, 'name', None)!r}: a plan "
            "that prints it could not be read back. Use one name for both"
        )
    return found


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else "?"


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
