"""Presets of plan and strategy for a number of devices, with explanations."""

from dataclasses import dataclass, replace

from patchpar import Plan, PlanError
from patchpar.strategies import parse_strategy

AUTOMATIC = "auto"
SINGLE = "single"
CUSTOM = "Custom plan"
CUSTOM_MEANING = "Plan and strategy as written below. Exact, unless the strategy is approximate."


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """An entry of the list. `degrees`: "auto", "single", or as in Plan.parse. `meaning`: an explanation.

    `purpose`: what it is the first choice for; empty for the others.
    """

    label: str
    degrees: str
    strategy: str = "exact"
    meaning: str = ""
    purpose: str = ""

    @property
    def title(self) -> str:
        """The label, after the purpose."""
        return f"{self.purpose}: {self.label}" if self.purpose else self.label

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
    return Preset(
        label="One device", degrees=SINGLE, meaning="Plain diffusers on the first device; the others are idle."
    )


def automatic(count: int) -> Preset:
    """The plan that the package chooses for the call."""
    return Preset(
        label=f"Automatic, {count} devices",
        degrees=AUTOMATIC,
        meaning="The plan is chosen for each image and never approximate: any number of devices gives the same image.",
        purpose="Exact",
    )


def presets_for(count: int) -> tuple[Preset, ...]:
    """All presets for `count` devices, the automatic one first."""
    if count == 1:
        return (plain(), large_image(count))
    return (automatic(count), plain(), *_guided(count), *_bands(count), large_image(count))


def large_image(count: int, options: str = "") -> Preset:
    """Structure guidance on all devices, with options as on the command line."""
    return Preset(
        label="Large image, structure guidance",
        degrees=f"patch={count}",
        strategy=f"structure:{options}" if options else "structure",
        meaning="For 1.5 times the model's native size and more, where a model repeats objects: the image is generated "
        "from patches of native size. It differs from that of plain diffusers.",
    )


def _guided(count: int) -> list[Preset]:
    if count % 2:
        return []
    rest = count // 2
    bands = f", the image in {rest} bands" if rest > 1 else ""
    return [
        Preset(
            label=f"Guidance branches{bands}",
            degrees="cfg=2" + (f",patch={rest}" if rest > 1 else ""),
            meaning="One half of the devices follows the prompt, the other the negative prompt. They exchange one "
            "prediction in a step. Exact.",
        )
    ]


def _bands(count: int) -> list[Preset]:
    bands = f"patch={count}"
    return [
        Preset(
            label=f"{count} bands, exact",
            degrees=bands,
            meaning="Each device computes a band and gets what it needs of the others layer by layer. Exact.",
            purpose="Fast links",
        ),
        Preset(
            label=f"{count} bands, fresh edges",
            degrees=bands,
            strategy="fresh-edges",
            meaning="Halo rows are exchanged at once; keys and values are one step old, so no rank waits. "
            "Approximate, and close. With guidance, guidance branches send less still.",
            purpose="Slow links",
        ),
        Preset(
            label=f"{count} bands, pooled context",
            degrees=bands,
            strategy="fresh-edges:context=pooled,bits=4",
            meaning="Fresh edges; of distant keys and values only averages are sent, as changes in 4 bits. "
            "Approximate. Fewest bytes of all that divide the image.",
            purpose="Fewest bytes",
        ),
        Preset(
            label=f"{count} bands, displaced",
            degrees=bands,
            strategy="displaced",
            meaning="All that comes from other bands is one step old; means and variances are corrected by the own "
            "band's change. Approximate.",
        ),
        Preset(
            label=f"{count} bands, DistriFusion",
            degrees=bands,
            strategy="displaced:preset=paper",
            meaning="Displaced bands as DistriFusion's code computes and sends them. Approximate.",
        ),
        Preset(
            label=f"{count} bands, partially conditioned",
            degrees=bands,
            strategy="pcpp",
            meaning="PCPP: a band attends only to the nearest part of its neighbours, one step old. "
            "Approximate, with the lowest accuracy.",
        ),
    ]


def custom_preset(degrees: str, strategy: str, count: int) -> Preset | None:
    """A custom preset, None if both texts are empty. Raises PlanError that names the valid values."""
    degrees, strategy = degrees.strip(), strategy.strip()
    if not degrees and not strategy:
        return None
    preset = Preset(label=CUSTOM, degrees=degrees or f"patch={count}", strategy=strategy or "exact")
    if preset.degrees in (AUTOMATIC, SINGLE) and strategy:
        raise PlanError(f"strategy {strategy!r} needs a plan to go with, such as patch={count}")
    preset.plan(count)
    return preset


def preset_or_plan(text: str, count: int) -> Preset:
    """The preset with this label, or one for a plan such as "patch=4,strategy=fresh-edges". Raises PlanError."""
    text = (text or "").strip()
    if "=" not in text:
        return preset_named(text, count)
    degrees, _, strategy = text.partition("strategy=")
    preset = custom_preset(degrees.strip(" ,"), strategy, count)
    assert preset is not None, "there is text on one side"
    return replace(preset, label=text)


def preset_named(label: str, count: int) -> Preset:
    """The preset with this label. Raises PlanError: requests need not come from the page."""
    for preset in presets_for(count):
        if preset.label == label:
            return preset
    raise PlanError(f"there is no preset {label!r}; choose one of the list")
