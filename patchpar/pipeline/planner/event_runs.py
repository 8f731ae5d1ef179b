"""Events of a recorded call, with all operators and changes of memory between two others as one.

They are noted again many times, for plans that differ in exact attention alone, and most of them are such.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from patchpar.pipeline.planner.call_log import Event, LoggedAttention, Noted
from patchpar.plan.replay.tape import Operator


@dataclass(frozen=True, slots=True)
class EventRun:
    """Operators, and changes of memory: bytes in all, and the most after an allocation; None without one."""

    operators: tuple[Operator, ...]
    num_bytes: int
    most: int | None


def in_runs(events: Iterable[Event]) -> Iterator[EventRun | Noted | LoggedAttention]:
    """Yield the events in order, those of a run as one."""
    operators, alive, most = list[Operator](), 0, None
    is_empty = True
    for event in events:
        if isinstance(event, Operator):
            operators.append(event)
            is_empty = False
        elif isinstance(event, int):
            alive, is_empty = alive + event, False
            if event > 0 and (most is None or alive > most):
                most = alive
        else:
            if not is_empty:
                yield EventRun(tuple(operators), alive, most)
                operators, alive, most, is_empty = [], 0, None, True
            yield event
    if not is_empty:
        yield EventRun(tuple(operators), alive, most)
