"""The plan: degrees per mesh axis, and a strategy. Frozen, printable, comparable.

Plan(cfg=2, patch=4)                                            8 devices: 2 guidance branches x 4 bands, exact
Plan.parse("cfg=2,patch=4")                                     the same from a command line
Plan.parse("patch=4,strategy=fresh-edges:bits=4,quality=40")    options follow their strategy
Plan(patch=4, weights="sharded")                                a quarter of the blocks' weights on each rank
Plan(patch=2, ratio=(3, 1))                                     three quarters of the rows on the first rank
Plan(patch=2, ratio="measured")                                 in proportion to how fast each rank is
Plan(weights="hosted")                                          blocks in host memory, copied to the device to run
Plan(tensor=4)                                                  a quarter of the features of the blocks' Linears
Plan(stage=2)                                                   half of the blocks on each rank
Plan(stage=2, weights="hosted")                                 the same of a model that no device holds whole
Plan(stage=2, strategy="piped:pieces=4")                        the same, both at work at the same time
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from patchpar.errors import PlanError
from patchpar.plan.mesh import Mesh
from patchpar.plan.names_elsewhere import advice
from patchpar.plan.scalars import is_whole, make_plain, plain, whole_in

AXIS_MEANINGS = {
    "data": "a part of the prompts",
    "cfg": "a guidance branch",
    "stage": "a part of the blocks",
    "patch": "a band of rows or columns",
    "tensor": "a part of the features",
}
SPLITS = ("auto", "rows", "columns")
WEIGHTS = ("whole", "sharded", "hosted")
NUMBERS = (*AXIS_MEANINGS, "resident")
ENCODERS = ("auto", "all", "one")
MOST_DEGREE = 100_000
"""More than any machine has; lists of what divides a degree, and the like, stay short."""
MOST_PART = 1000
MEASURED = "measured"
"""The ratio that a pipeline finds by a short run of its first call."""
AUTO = "auto"
SINGLE = "single"
"""How a plan for one device prints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Degrees multiply to the number of devices. `strategy` is an options object from `strategies`, or its text.

    A text is parsed at once, so that equal plans compare equal. `parse` reads `str(plan)` as the same plan. `split` is
    the side that bands are split along: "auto" takes the longer one, because the halo then is shorter. `weights`: whole
    on every rank; sharded: a part of each block, gathered when the block runs; or hosted: that part in host memory,
    from which a stage takes its own blocks. With the last two `resident` blocks of each network stay whole. `encoders`:
    which ranks of an image hold and run its text and image encoders, "all" or "one"; "auto" is "all". `ratio`: the rows
    or tokens of each rank of axis patch in proportion, for devices of different speed; of equal ones nothing remains.
    "measured": a pipeline times some denoiser calls on each rank alone and takes the ratio of their speeds.
    Raises PlanError for fields that are invalid or exclude each other.
    """

    data: int = 1
    cfg: int = 1
    stage: int = 1
    patch: int = 1
    tensor: int = 1
    strategy: Any = "exact"
    split: str = "auto"
    weights: str = "whole"
    resident: int = 0
    encoders: str = "auto"
    ratio: tuple[int, ...] | str = ()

    def __post_init__(self) -> None:
        from patchpar.strategies import resolve_strategy  # imported late: strategies import this package

        make_plain(self)
        object.__setattr__(self, "strategy", resolve_strategy(self.strategy))
        for name, degree in self.degrees().items():
            if not is_whole(degree, most=MOST_DEGREE):
                raise PlanError(
                    f"{name}={degree!r}: the degree of an axis is a whole number of at least 1, and at most "
                    f"{MOST_DEGREE:,}"
                )
        if self.split not in SPLITS:
            raise PlanError(f"split={self.split!r}: use one of {', '.join(SPLITS)}")
        if self.encoders not in ENCODERS:
            raise PlanError(f"encoders={self.encoders!r}: use one of {', '.join(ENCODERS)}")
        if self.encoders == "one" and self.weights != "whole":
            raise PlanError(
                f"encoders=one holds the encoders on one rank, and weights={self.weights} on all: leave one of them out"
            )
        self._check_ratio()
        self._check_stages()
        self._check_weights()

    def _check_ratio(self) -> None:
        if self.ratio == MEASURED:
            self._check_measured()
            return
        if not isinstance(self.ratio, (tuple, list)):
            raise PlanError(
                f"ratio={self.ratio!r}: use one number for each rank of axis 'patch', as in (3, 1), or 'measured'"
            )
        ratio = tuple(plain(part) for part in self.ratio)
        if not all(is_whole(part, most=MOST_PART) for part in ratio):
            raise PlanError(f"ratio={self.ratio!r}: each is a whole number from 1 to {MOST_PART}, as in (3, 1)")
        if ratio and len(ratio) != self.patch:
            raise PlanError(
                f"ratio={self.ratio!r} are {len(ratio)} numbers, and axis 'patch' has {self.patch} rank"
                f"{'s' * (self.patch > 1)}: use one for each, or patch={len(ratio)}"
            )
        if ratio and self.strategy.name == "structure":
            raise PlanError(
                "strategy structure gives each rank whole patches, and no part of the rows: leave ratio out"
            )
        object.__setattr__(self, "ratio", ratio if len(set(ratio)) > 1 else ())

    def _check_measured(self) -> None:
        if self.patch == 1:
            raise PlanError("ratio=measured divides rows or tokens, and patch=1 has them on one rank: use patch=2")
        if self.strategy.name == "structure" or self.divides_weights:
            raise PlanError(
                "ratio=measured times the whole model on each rank alone, which strategy=structure, stages, axis "
                "tensor and divided weights exclude: give numbers, as in ratio=3:1"
            )

    def _check_stages(self) -> None:
        if self.stage == 1:
            if self.strategy.axis == "stage":
                raise PlanError(
                    f"strategy={self.strategy} is of axis 'stage', and stage=1 has all blocks on one rank: use stage=2 "
                    "or more, or strategy=exact"
                )
            return
        if self.patch > 1 and self.strategy.axis == "stage":
            raise PlanError(
                f"strategy={self.strategy} computes pieces of the image one after the other, and patch={self.patch} "
                f"computes parts of it at the same time: use stage={self.stage * self.patch}, or strategy=exact"
            )
        if self.tensor > 1:
            raise PlanError(
                f"stage={self.stage} divides the blocks between ranks, and tensor={self.tensor} their features: use "
                f"one of them, stage={self.stage * self.tensor} or tensor={self.stage * self.tensor}"
            )
        if self.weights == "sharded":
            raise PlanError(
                f"weights=sharded divides every block between ranks that all run it, and stage={self.stage} leaves "
                "each block to one stage: use weights=hosted where a device has no room for the whole model, "
                f"weights=whole, or patch={self.stage} instead of stage"
            )

    def _check_weights(self) -> None:
        if self.weights not in WEIGHTS:
            raise PlanError(f"weights={self.weights!r}: use one of {', '.join(WEIGHTS)}")
        if self.weights == "sharded" and self.patch * self.cfg == 1:
            raise PlanError(
                "weights=sharded divides the weights between the ranks of one image (axes 'cfg' and 'patch'), which is "
                "1 rank: use patch=2 or cfg=2 or more, weights=hosted (in host memory), or weights=whole"
            )
        if not is_whole(self.resident, 0):
            raise PlanError(f"resident={self.resident!r}: it is a number of blocks of each network, at least 0")
        if self.resident and self.weights == "whole":
            raise PlanError(
                f"resident={self.resident} is for weights=sharded and weights=hosted: with weights=whole all blocks are"
            )

    def degrees(self) -> dict[str, int]:
        """Return the degree of each axis, outermost first."""
        return {name: getattr(self, name) for name in AXIS_MEANINGS}

    @property
    def world_size(self) -> int:
        """Number of ranks of the plan."""
        return math.prod(self.degrees().values())

    def mesh(self, rank: int, ranks: Sequence[int] | None = None) -> Mesh | None:
        """Return the mesh of the plan on `ranks`, seen from `rank`; None where that is none of them.

        `ranks`: global ranks in the order of the mesh; None for the first ones.
        """
        members = range(self.world_size) if ranks is None else ranks
        return Mesh(rank, members, **self.degrees()).with_ratio(self.parts) if rank in members else None

    @property
    def parts(self) -> tuple[int, ...]:
        """The ratio in numbers. Raises PlanError for one that a pipeline has still to measure."""
        if isinstance(self.ratio, str):
            raise PlanError(f"plan {self}: the ratio is measured by a call of a ParallelPipeline: give numbers here")
        return self.ratio

    @property
    def divides_weights(self) -> bool:
        """Whether its ranks hold different weights of the model, so that one of them cannot do without the others."""
        return self.stage > 1 or self.tensor > 1 or self.weights != "whole" or self.encoders == "one"

    def held_bytes(self, weight_bytes: int) -> int:
        """Return about how many bytes of a model's weights the device of a rank keeps."""
        return {"whole": weight_bytes, "sharded": weight_bytes * self.data // self.world_size, "hosted": 0}[
            self.weights
        ]

    @classmethod
    def parse(cls, text: str, *, strategy: object = None) -> "Plan":
        """Read "cfg=2,patch=2" or "single", with `strategy` where the text has none. Raises PlanError."""
        if text.strip() == AUTO:
            raise PlanError(
                "plan 'auto' is chosen for a call of a pipeline: name a plan here, as in cfg=2,patch=2; `patchpar "
                "plan` finds the fastest one for a machine"
            )
        options: dict[str, Any] = {}
        for name, value in () if text.strip() == SINGLE else _pairs(text):
            if name in options:
                raise PlanError(f"plan {text!r} has {name} twice: once is enough")
            options[name] = _value(name, value)
        if strategy is not None:
            if "strategy" in options:
                raise PlanError(f"plan {text!r} has a strategy, and strategy={strategy} is another: give one of them")
            options["strategy"] = strategy
        return cls(**options)

    def check_strategy(self) -> None:
        """Raise PlanError for a strategy that has no effect with these degrees, or does not allow them.

        Of what somebody asks for: a call that has lost ranks goes on with one, whatever its strategy.
        """
        self.strategy.check_group_size(self.patch)
        is_of_patches = self.strategy.axis == "patch" and self.strategy.name != "exact"
        if self.patch == 1 and is_of_patches and not self.strategy.for_one_rank:
            raise PlanError(
                f"plan {self}: strategy={self.strategy} says what ranks of axis 'patch' exchange, which with patch=1 "
                "are one: use patch=2 or more, or leave the strategy out"
            )

    def check_devices(self, count: int) -> None:
        """Raise PlanError unless the plan takes exactly `count` devices."""
        if self.world_size != count:
            product = " x ".join(f"{name}={degree}" for name, degree in self.degrees().items() if degree > 1)
            devices = f"{self.world_size} device{'s' * (self.world_size > 1)}"
            raise PlanError(
                f"plan {product or SINGLE} takes {devices}, but there are {count}: change a degree, or use {devices}"
            )

    def __str__(self) -> str:
        parts = [f"{name}={degree}" for name, degree in self.degrees().items() if degree > 1]
        if self.split != "auto":
            parts.append(f"split={self.split}")
        if self.weights != "whole":
            parts.append(f"weights={self.weights}")
        if self.resident:
            parts.append(f"resident={self.resident}")
        if self.ratio:
            parts.append(f"ratio={self.ratio if isinstance(self.ratio, str) else ':'.join(map(str, self.ratio))}")
        if self.encoders != "auto":
            parts.append(f"encoders={self.encoders}")
        if self.patch > 1 or str(self.strategy) != "exact":
            parts.append(f"strategy={self.strategy}")
        return ",".join(parts) or SINGLE


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    """Yield fields of a plan and their values. Names after the strategy that are no fields are its options."""
    names = {field.name for field in fields(Plan)}
    strategy: str | None = None
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if name == "strategy" and strategy is None:
            strategy = value
        elif name in names and equals:
            yield name, value
        elif strategy is not None:
            strategy += f",{part}" if ":" in strategy else f":{part}"
        elif equals:
            raise PlanError(
                f"unknown axis {name!r} in plan {text!r}: use {', '.join(AXIS_MEANINGS)}, split, weights, resident, "
                f"ratio, encoders or strategy; options of a strategy come after it{advice(name)}"
            )
        else:
            raise PlanError(
                f"{part!r} in plan {text!r} is not of the form axis=degree, as in cfg=2,patch=2{advice(part)}"
            )
    if strategy is not None:
        yield "strategy", strategy


def _value(name: str, value: str) -> int | str | tuple[int, ...]:
    if name == "ratio" and value != MEASURED:
        parts = tuple(part for each in value.split(":") if (part := whole_in(each)) is not None)
        if len(parts) <= value.count(":"):
            raise PlanError(f"ratio={value:.80}: numbers with colons between, as in patch=2,ratio=3:1, or measured")
        return parts
    return _number(name, value) if name in NUMBERS else value


def _number(name: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        what = "the degree of an axis" if name in AXIS_MEANINGS else "the number of resident blocks"
        raise PlanError(f"{name}={value:.80}: {what} is a whole number, as in {name}=2") from None
