"""In which ways the devices can draw a picture together: a plan, a strategy, and what to say of them."""

from dataclasses import dataclass

from patchpar import Plan, PlanError
from patchpar.strategies import parse_strategy

AUTOMATIC = "auto"
SINGLE = "single"
OWN = "Your own plan"
OWN_MEANS = "What you write below is what draws: exact, or approximate if its strategy is."


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A line in a list of choices. `degrees`: "auto", "single", or as in Plan.parse. `means`: what it is, in words."""

    label: str
    degrees: str
    strategy: str = "exact"
    means: str = ""

    def plan(self, count: int) -> Plan | str:
        """As `ParallelPipeline` takes it, for `count` devices. Raises PlanError."""
        if self.degrees == AUTOMATIC:
            return AUTOMATIC
        if self.degrees == SINGLE:
            return Plan()
        plan = Plan.parse(self.degrees, strategy=parse_strategy(self.strategy))
        plan.check_devices(count)
        return plan


def plain() -> Preset:
    """Plain diffusers, on one device."""
    return Preset(label="One device", degrees=SINGLE, means="Plain diffusers on the first device; the others are idle.")


def automatic(count: int) -> Preset:
    """Whatever the package finds best for the call."""
    return Preset(
        label=f"Automatic, {count} devices",
        degrees=AUTOMATIC,
        means="The plan is chosen for each picture and never approximate: any number of devices draws the same.",
    )


def ways_for(count: int) -> tuple[Preset, ...]:
    """Every way that `count` devices have, the automatic one first."""
    return (plain(),) if count == 1 else (automatic(count), plain(), *_guided(count), *_bands(count))


def _guided(count: int) -> list[Preset]:
    if count % 2:
        return []
    rest = count // 2
    bands = f", the picture in {rest} bands" if rest > 1 else ""
    return [
        Preset(
            label=f"Guidance branches{bands}",
            degrees="cfg=2" + (f",patch={rest}" if rest > 1 else ""),
            means="One half of the devices follows the prompt, the other the negative prompt. They exchange one "
            "prediction in a step. Exact.",
        )
    ]


def _bands(count: int) -> list[Preset]:
    bands = f"patch={count}"
    return [
        Preset(
            label=f"{count} bands, exact",
            degrees=bands,
            means="Each device draws a band and asks the others for what it needs of theirs, layer by layer. Exact.",
        ),
        Preset(
            label=f"{count} bands, fresh edges",
            degrees=bands,
            strategy="fresh-edges",
            means="Edges are exchanged at once; keys and values are one step old, so nobody waits for them. "
            "Approximate, and close.",
        ),
        Preset(
            label=f"{count} bands, displaced",
            degrees=bands,
            strategy="displaced",
            means="DistriFusion: everything that comes from other bands is one step old. Approximate.",
        ),
        Preset(
            label=f"{count} bands, partially conditioned",
            degrees=bands,
            strategy="pcpp",
            means="PCPP: a band sees only the nearest part of its neighbours, one step old. Fewest bytes, "
            "and the furthest from the exact picture.",
        ),
    ]


def own_way(degrees: str, strategy: str, count: int) -> Preset | None:
    """A way in the user's own words, None where there are none. Raises PlanError that says what is valid."""
    degrees, strategy = degrees.strip(), strategy.strip()
    if not degrees and not strategy:
        return None
    way = Preset(label=OWN, degrees=degrees or f"patch={count}", strategy=strategy or "exact")
    if way.degrees in (AUTOMATIC, SINGLE) and strategy:
        raise PlanError(f"strategy {strategy!r} needs a plan to go with, such as patch={count}")
    way.plan(count)
    return way


def way_named(label: str, count: int) -> Preset:
    """The way with this label. Raises PlanError: a page sends only what it was given, but anybody may ask."""
    for way in ways_for(count):
        if way.label == label:
            return way
    raise PlanError(f"there is no way called {label!r}; choose one of the list")
