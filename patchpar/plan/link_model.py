"""The time of a denoising step on a given link, and the choice between fresh and stale edges. Pure Python.

A step computes for C seconds. Message i of b_i bytes is sent after s_i of them and needed after n_i of them, in the
same step (fresh) or in the next (stale). Every rank has one outgoing link of R bytes per second and latency L, and does
the same at the same time. With D the seconds waited so far and in the order of computing:

    sent            l_i = max(s_i + D, l_{i-1}) + b_i / R        one after the other
    received        a_i = l_i + L
    needed          D  <- max(D, a_i - n_i)                       wait until it is received

Repeated, the length of a step converges, and `step_seconds` is that length. Where every message is stale it is

    max(C, sum b_i / R)                                            as long as L is less than that

and where every message is awaited before the next is sent, with c_i = n_i - s_i computed meanwhile, it is

    C + sum max(0, L + b_i / R - c_i)

which for rounds without computation in between is C + rounds * L + bytes / R. A stale strategy has one such message,
the prediction at the end of the step; a strategy with fresh edges has one for each round of edges.

Latency and rate of a link as in Hockney (1994); the recursion is ours: docs/stale-patch.md.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from patchpar.errors import PlanError

EXPOSED_FRACTION = 0.1  # of a step that waiting for fresh edges may take
COVERED_FRACTION = 0.55  # of a UNet's step: the computation between sending keys and values and the next round of edges
SETTLED = 8  # steps after which the length is taken, as the mean of the second half of them


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkModel:
    """One rank's outgoing link: `latency` in seconds, `rate` in bytes per second; infinity is no limit.

    Messages of at most `overtake` bytes do not queue behind larger ones; 0 is one queue. Raises PlanError.
    """

    latency: float = 0.0
    rate: float = math.inf
    overtake: int = 0

    def __post_init__(self) -> None:
        if not self.latency >= 0 or math.isinf(self.latency) or not self.rate > 0:
            raise PlanError(
                f"latency={self.latency!r} s, rate={self.rate!r} bytes/s: use a latency >= 0 and a rate > 0"
            )

    def seconds(self, rounds: int, num_bytes: float) -> float:
        """Return the seconds of `rounds` messages of `num_bytes` in total, each awaited before the next."""
        return rounds * self.latency + num_bytes / self.rate

    def __str__(self) -> str:
        rate = "no limit" if math.isinf(self.rate) else f"{self.rate / 1e6:.3g} MB/s"
        return f"{1e3 * self.latency:g} ms, {rate}"


@dataclass(frozen=True, slots=True)
class TimedMessage:
    """Sent after `sent` and needed after `needed` seconds of computing, in the step that is `age` steps later."""

    sent: float
    needed: float
    num_bytes: float
    age: int = 0


def link_seconds(messages: Sequence[TimedMessage], link: LinkModel) -> float:
    """Return the seconds of a step's messages if each is awaited when it is sent."""
    return link.seconds(len(messages), sum(message.num_bytes for message in messages))


def step_seconds(compute: float, messages: Sequence[TimedMessage], link: LinkModel) -> float:
    """Return the seconds of one of many steps that compute for `compute` seconds and exchange `messages`."""
    waited = free = lane = 0.0
    there: dict[tuple[int, int], float] = {}
    ends: list[float] = []
    for event in sorted(_events(compute, messages)):
        now = event.step * compute + event.at + waited
        if event.what == _SEND:
            num_bytes = messages[event.message].num_bytes
            free = left = max(now, free) + num_bytes / link.rate
            if num_bytes <= link.overtake:
                lane = left = max(now, lane) + num_bytes / link.rate
            there[event.sent_in, event.message] = left + link.latency
        elif event.what == _NEED:
            waited += max(0.0, there.pop((event.sent_in, event.message)) - now)
        else:
            ends.append(now)
    return (ends[-1] - ends[SETTLED // 2 - 1]) / (SETTLED - SETTLED // 2)


_SEND, _NEED, _END = range(3)  # in this order where they are at the same time


class _LinkEvent(NamedTuple):
    step: int
    at: float
    what: int
    message: int
    sent_in: int


def _events(compute: float, messages: Sequence[TimedMessage]) -> Iterator[_LinkEvent]:
    for step in range(SETTLED):
        yield _LinkEvent(step, compute, _END, 0, step)
        for number, message in enumerate(messages):
            yield _LinkEvent(step, message.sent, _SEND, number, step)
            if step >= message.age:
                yield _LinkEvent(step, message.needed, _NEED, number, step - message.age)


class EdgeChoice(NamedTuple):
    """Whether halos and moments are fresh or stale, and the reason."""

    edges: Literal["fresh", "stale"]
    reason: str


def edges_for(
    link: LinkModel,
    *,
    rounds: int,
    edge_bytes: float,
    step_seconds: float,
    queued_bytes: float = 0.0,
    covered: float = COVERED_FRACTION,
) -> EdgeChoice:
    """Return "fresh" edges if waiting for them takes at most 10 % of a step, else "stale".

    A step has `rounds` rounds of edges, of `edge_bytes` in total from each rank, and computes for `step_seconds`. The
    rounds follow one another with little computation in between, so that their time on the link is exposed. On a link
    with one queue so is what remains of the `queued_bytes` of stale keys and values in front of them, after the
    fraction `covered` of the step that is computed between sending them and the next round:

        rounds * latency + edge_bytes / rate + max(0, queued_bytes / rate - covered * step) <= 0.1 * step

    Pass no `queued_bytes` where small messages overtake large ones: keys and values then cost the same either way.
    Fresh edges are worth 10 %: stale edges cause most of the loss of quality. Raises PlanError.
    """
    if not step_seconds > 0 or rounds < 0 or edge_bytes < 0 or queued_bytes < 0 or not 0 <= covered <= 1:
        raise PlanError(
            f"{rounds} rounds of {edge_bytes:g} bytes behind {queued_bytes:g}, {covered:g} of a step of "
            f"{step_seconds:g} s between: use a positive time, a fraction of at most 1, and no negative numbers"
        )
    queue = max(0.0, queued_bytes / link.rate - covered * step_seconds)
    exposed = link.seconds(rounds, edge_bytes) + queue
    edges: Literal["fresh", "stale"] = "fresh" if exposed <= EXPOSED_FRACTION * step_seconds else "stale"
    why = "at most" if edges == "fresh" else "more than"
    return EdgeChoice(
        edges,
        f"{edges} edges: {rounds} rounds wait {1e3 * exposed:.3g} ms on a link of {link}, {why} "
        f"{EXPOSED_FRACTION:.0%} of a step of {1e3 * step_seconds:.4g} ms",
    )
