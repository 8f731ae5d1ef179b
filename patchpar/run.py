"""What happened in a call: the plan, the time, and what each rank sent."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from patchpar.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Figures of one call. Bytes are those that left each rank per denoising step, in rank order.

    `bytes_by_kind` and `seconds_waited` are rank 0's, for the whole call, by kind of exchange. `seconds` are the
    caller's own, from the call to the picture.
    """

    plan: Plan
    seconds: float
    steps: int
    bytes_per_step: tuple[int, ...]
    bytes_by_kind: Mapping[str, int] = field(default_factory=dict)
    seconds_waited: Mapping[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "plan": str(self.plan),
            "seconds": round(self.seconds, 4),
            "steps": self.steps,
            "bytes_per_step": list(self.bytes_per_step),
            "bytes_by_kind": dict(self.bytes_by_kind),
            "seconds_waited": {kind: round(seconds, 4) for kind, seconds in self.seconds_waited.items()},
        }

    def __str__(self) -> str:
        sent = (
            f", {readable_bytes(max(self.bytes_per_step))} sent per step and rank" if any(self.bytes_per_step) else ""
        )
        return f"plan {self.plan}: {self.steps} steps in {self.seconds:.1f} s{sent}"


def readable_bytes(count: float) -> str:
    """A number of bytes for people: 1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
