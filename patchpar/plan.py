"""What to do with the devices: degrees per mesh axis, and a strategy. Frozen, printable, comparable.

Plan(cfg=2, patch=4)             8 devices: 2 guidance branches x 4 bands, exact
Plan.parse("cfg=2,patch=2")      the same from a command line
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields

from patchpar.errors import PlanError

AXIS_MEANINGS = {"data": "a share of the prompts", "cfg": "a guidance branch", "patch": "a band of rows or columns"}
SPLITS = ("auto", "rows", "columns")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Degrees multiply to the number of devices. `strategy` is a name or an options object from `strategies`.

    `split` is the side that bands are cut along: "auto" takes the longer one, because the halo then is the shorter.
    """

    data: int = 1
    cfg: int = 1
    patch: int = 1
    strategy: object = "exact"
    split: str = "auto"

    def __post_init__(self) -> None:
        for name, degree in self.degrees().items():
            if not isinstance(degree, int) or isinstance(degree, bool) or degree < 1:
                raise PlanError(f"{name}={degree!r}: the degree of an axis is a whole number of at least 1")
        if self.split not in SPLITS:
            raise PlanError(f"split={self.split!r}: use one of {', '.join(SPLITS)}")

    def degrees(self) -> dict[str, int]:
        """Degree of each axis, outermost first."""
        return {name: getattr(self, name) for name in AXIS_MEANINGS}

    @property
    def world_size(self) -> int:
        """How many ranks the plan takes."""
        return self.data * self.cfg * self.patch

    @classmethod
    def parse(cls, text: str, *, strategy: object = "exact") -> "Plan":
        """Read "cfg=2,patch=2". Raises PlanError naming the valid axes."""
        options: dict[str, object] = {"strategy": strategy}
        for name, value in _pairs(text):
            if name in AXIS_MEANINGS:
                options[name] = _degree(name, value)
            elif name in {field.name for field in fields(cls)}:
                options[name] = value
            else:
                raise PlanError(f"unknown axis {name!r} in plan {text!r}: use {', '.join(AXIS_MEANINGS)} or split")
        return cls(**options)  # type: ignore[arg-type]

    def check_devices(self, count: int) -> None:
        """Raise PlanError unless the plan takes exactly `count` devices."""
        if self.world_size != count:
            product = " x ".join(f"{name}={degree}" for name, degree in self.degrees().items() if degree > 1) or "1"
            raise PlanError(
                f"plan {product} takes {self.world_size} devices, but there are {count}: "
                f"change a degree, or use devices={self.world_size}"
            )

    def __str__(self) -> str:
        degrees = [f"{name}={degree}" for name, degree in self.degrees().items() if degree > 1]
        if not degrees:
            return "single"
        split = [f"split={self.split}"] if self.split != "auto" else []
        strategy = [f"strategy={self.strategy}"] if self.patch > 1 else []
        return ",".join([*degrees, *split, *strategy])


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, equals, value = part.partition("=")
        if not equals:
            raise PlanError(f"{part!r} in plan {text!r} is not of the form axis=degree, as in cfg=2,patch=2")
        yield name.strip(), value.strip()


def _degree(name: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise PlanError(f"{name}={value}: the degree of an axis is a whole number, as in {name}=2") from None
