"""Streams on the ranks of the tests' worker pool, so that no further workers have to start."""

from __future__ import annotations

from typing import Any

from patchpar.launch.engines import load_engine
from tests.conftest import POOL_SIZE, RankPool
from tests.ranks import PoolRank

ENGINES: dict[str, Any] = {}
"""On a rank: engines that have been made, by key. They stay, as those of a pool of their own would."""


def on_rank(this: PoolRank, key: str, engine: str, method: str, args: tuple[Any, ...]) -> Any:
    if key not in ENGINES:
        ENGINES[key] = load_engine(engine)(this.context)
    return getattr(ENGINES[key], method)(*args)


class PoolExecutor:
    """Stands for a LocalExecutor over all ranks of the pool. `key` tells engines apart."""

    world_size = POOL_SIZE

    def __init__(self, ranks: RankPool, key: str, engine: str) -> None:
        self._pool, self._key, self._engine = ranks._pool, key, engine

    def call(self, method: str, *args: Any, on_event: Any = None, on_start: Any = None, ranks: Any = None) -> list[Any]:
        arguments = (self._key, self._engine, method, args)
        if ranks is not None:
            where = "tests.stream.on_pool:on_rank"
            return self._pool.call("alone", where, arguments, ranks=ranks, on_event=on_event, on_start=on_start)
        return self._pool.call(
            "run", "tests.stream.on_pool:on_rank", POOL_SIZE, "auto", arguments, on_event=on_event, on_start=on_start
        )

    def close(self) -> None:
        """The pool goes on."""
