"""A RankContext without processes: of a rank that is a thread, or alone."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any


@dataclass
class ThreadContext:
    """What a rank knows of its call and its caller, who hears nothing."""

    rank: int = 0
    world_size: int = 1
    device: str = "cpu"
    deadline: float = 60.0
    wait_limit: float = 60.0
    waiting: Any = field(default_factory=nullcontext)
    links: Any = None
    seal: Any = None

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(range(self.world_size))

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def emit(self, event: object) -> None: ...

    def beat(self, where: str) -> None: ...

    def pause_point(self) -> None: ...
