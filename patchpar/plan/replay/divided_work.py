"""What a part of a rank's step takes at least: each of its kernels with a part of the rows."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from patchpar.plan.replay.price import ASSUMED, CostAssumptions, Device, fused, kernel_seconds
from patchpar.plan.replay.tape import Operator, TapeEntry


@dataclass(frozen=True, slots=True)
class DividedWork:
    """The kernels of a rank's step, each with how often it runs, on a device: what a part of it takes at least."""

    kernels: tuple[tuple[Operator, int], ...]
    device: Device
    assumed: CostAssumptions = ASSUMED

    @classmethod
    def of(cls, step: Iterable[TapeEntry], device: Device, assumed: CostAssumptions = ASSUMED) -> "DividedWork":
        """Return the work of a step."""
        operators = [entry for entry in step if isinstance(entry, Operator)]
        kept = fused(operators) if assumed.fused else operators
        return cls(tuple(Counter(kept).items()), device, assumed)

    def seconds(self, parts: int) -> float:
        """Return the seconds of one of so many parts, each with as many kernels as the whole, of a part of the rows."""
        of_part = (
            count * kernel_seconds(part_of(each, parts), self.device, self.assumed) for each, count in self.kernels
        )
        return sum(of_part)

    @property
    def mixes(self) -> int:
        """The number of attentions with as many keys as queries, as far as their dims tell: those of image tokens."""
        dims = [(each.dims, count) for each, count in self.kernels if each.name == "attention"]
        return sum(count for (queries, keys, _), count in dims if queries % keys == 0)


def part_of(operator: Operator, parts: int) -> Operator:
    """Return an operator with a part of the rows, rounded up; its bytes are divided too, those of weights as well."""
    dims = (-(-operator.dims[0] // parts), *operator.dims[1:]) if operator.dims else ()
    return Operator(operator.name, operator.dtype, operator.flops // parts, operator.num_bytes // parts, dims)
