"""Statistics of a call: plan, time, and what each rank sent, waited for and held."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patchpar.comm.trace import write_trace
from patchpar.errors import PlanError
from patchpar.pipeline.notebook_html import html_of_run
from patchpar.pipeline.rank_stats import VAE, RankStats
from patchpar.plan.byte_sizes import readable_bytes
from patchpar.plan.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Run:
    """Statistics of one call. `seconds` are measured at the caller, from call to image; `ranks` that took part.

    `forecast`: seconds that were predicted for it, where the machine has been measured and the call has a forecast.
    A step is a scheduler step: a scheduler of second order takes two for each denoising step but one.
    """

    plan: Plan
    seconds: float
    ranks: tuple[RankStats, ...]
    forecast: float | None = None

    @property
    def steps(self) -> int:
        """Number of steps."""
        return max((len(rank.steps) for rank in self.ranks), default=0)

    @property
    def exact_steps(self) -> int | None:
        """Steps in which no rank used stale values; None if the strategy never does."""
        if not any(rank.exact_calls or rank.stale_calls for rank in self.ranks):
            return None
        stale = {number for rank in self.ranks for number, step in enumerate(rank.steps) if step.stale_calls}
        return self.steps - len(stale)

    @property
    def bytes_per_step(self) -> tuple[int, ...]:
        """Mean bytes sent per step by each rank, in rank order, without the VAE."""
        sums = (sum(rank.bytes_sent.values()) - rank.bytes_sent.get(VAE, 0) for rank in self.ranks)
        return tuple(total // max(1, self.steps) for total in sums)

    @property
    def vae_bytes(self) -> tuple[int, ...]:
        """Bytes sent by each rank in the whole call to encode and decode with the VAE, in rank order."""
        return tuple(rank.bytes_sent.get(VAE, 0) for rank in self.ranks)

    @property
    def bytes_by_kind(self) -> Mapping[str, int]:
        """Bytes sent by the first rank in the whole call, by kind of exchange."""
        return self.ranks[0].bytes_sent

    @property
    def seconds_waited(self) -> Mapping[str, float]:
        """Seconds that the first rank waited for others in the whole call, by kind of exchange."""
        return self.ranks[0].seconds_waited

    @property
    def stale_bytes(self) -> int:
        """Bytes of stale values on the rank that held most of them."""
        return max((rank.stale_bytes for rank in self.ranks), default=0)

    def save_trace(self, path: str | Path) -> None:
        """Write the trace of all ranks, for chrome://tracing or Perfetto. Raises PlanError if none was recorded."""
        traces = [rank.trace for rank in self.ranks if rank.trace is not None]
        if not traces:
            raise PlanError("this call was not traced: set pipe.tracing = True before the call")
        write_trace(Path(path), traces)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "plan": str(self.plan),
            "seconds": round(self.seconds, 4),
            "forecast": None if self.forecast is None else round(self.forecast, 4),
            "steps": self.steps,
            "exact_steps": self.exact_steps,
            "bytes_per_step": list(self.bytes_per_step),
            "vae_bytes": list(self.vae_bytes),
            "bytes_by_kind": dict(self.bytes_by_kind),
            "seconds_waited": {kind: round(seconds, 4) for kind, seconds in self.seconds_waited.items()},
            "stale_bytes": self.stale_bytes,
            "ranks": [rank.as_dict() for rank in self.ranks],
        }

    def __str__(self) -> str:
        return f"plan {self.plan}: {self._steps_taken()} in {self.seconds:.1f} s{self._predicted()}{self._cost()}"

    def __repr__(self) -> str:
        """Return one line: the steps of all ranks would be pages. `as_dict` has them."""
        return f"<{type(self).__name__}: {self}>"

    def _repr_html_(self) -> str:
        """Return a table with a bar for each rank, which notebooks show."""
        return html_of_run(str(self), self.seconds, self.ranks)

    def _predicted(self) -> str:
        return "" if self.forecast is None else f" ({self.forecast:.1f} s predicted)"

    def _steps_taken(self) -> str:
        exact, steps = self.exact_steps, "1 step" if self.steps == 1 else f"{self.steps} steps"
        if exact is None:
            return steps
        return f"{steps}, {'all' if exact == self.steps else exact} exact,"

    def _cost(self) -> str:
        """Return traffic, waiting time and memory, each of the rank with the largest value."""
        if not any(self.bytes_per_step + self.vae_bytes):
            return ""
        waited = max(sum(rank.seconds_waited.values()) for rank in self.ranks)
        held = f", {readable_bytes(self.stale_bytes)} of stale values held" if self.stale_bytes else ""
        vae = f" and {readable_bytes(max(self.vae_bytes))} for the VAE" if any(self.vae_bytes) else ""
        sent = f", {readable_bytes(max(self.bytes_per_step))} sent per step and rank{vae}"
        return f"{sent}, {waited:.2f} s waited{held}"
