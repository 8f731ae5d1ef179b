"""What one guidance call of a denoiser keeps for its next step: the values of its exchange points.

entry     one exchange point: values last received, the rank's own last value, pending exchange
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from patchpar.comm.exchange_part import Received
from patchpar.comm.transport.message_memory import MessageMemory
from patchpar.shard.stale.message_bucket import BucketMemories
from patchpar.shard.stale.send_window import SendWindow

NEVER = -2  # as the number of the last evaluation: none in this image. -1 would be the one before evaluation 0


@dataclass(slots=True)
class StaleEntry:
    """One exchange point in one guidance call. `received` and `own` are of the previous evaluation.

    `state` belongs to the exchange point. `memory`: of its messages for the next step, unless these are in a bucket.
    `evaluation`: in which it ran last. Of its latest run, `is_first`: whether none was before in this image, or since a
    step was missed; `continues`: whether one was in the evaluation before.
    """

    received: Received = field(default_factory=dict)
    own: Tensor | None = None
    state: Any = None
    pending: Callable[[], Received] | None = None
    memory: MessageMemory = field(default_factory=MessageMemory)
    evaluation: int = NEVER
    is_first: bool = True
    continues: bool = False

    def wait(self) -> Received:
        """Wait for the pending exchange, if any, and return the stale values received. Raises ExchangeError."""
        if self.pending is not None:
            pending, self.pending = self.pending, None
            self.received = pending()
        return self.received

    def pop(self) -> Received:
        """As `wait`, and store nothing here: the state of the exchange point has the values."""
        received, self.received = self.wait(), {}
        return received

    def drop(self) -> None:
        """Wait for the pending exchange and discard its values."""
        if self.pending is not None or self.received:  # neither, nearly always
            self.pop()

    def put(self, received: Received, own: Tensor | None = None) -> None:
        """Store fresh values for the next step.

        `received`: tensors of any shape by global rank; `own`: this rank's value, of any shape.
        """
        self.drop()
        self.received, self.own = received, own

    def tensors(self) -> Iterator[Tensor]:
        """Yield every stored tensor, of any shape."""
        yield from (x for tensors in self.received.values() for x in tensors)
        if self.own is not None:
            yield self.own
        if self.state is not None:
            yield from self.state.tensors()

    def arriving(self) -> Iterator[Tensor]:
        """Yield the buffers, of any shape, that hold nothing but what the exchange in flight will bring."""
        if self.state is not None:
            yield from self.state.arriving()


@dataclass(slots=True)
class GuidanceCall:
    """One guidance call of the step: its entries, and the evaluation and form they belong to.

    `memories` of its buckets. `generation`: a number that no other has had.
    """

    window: SendWindow
    generation: int = 0
    entries: dict[tuple[str, int], StaleEntry] = field(default_factory=dict)
    memories: BucketMemories = field(default_factory=dict)
    evaluation: int = NEVER
    form: Any = None

    def clear(self) -> None:
        """Forget all exchange points. None may be in flight."""
        self.entries.clear()
        self.memories.clear()
        self.window.clear()

    def rest(self) -> None:
        """Use no value of the steps so far again. Buffers are kept."""
        self.evaluation = NEVER
        for entry in self.entries.values():
            entry.own = None  # or drift of the first step would be measured against the last image

    def settle(self) -> None:
        """Wait for every pending exchange. Raises ExchangeError."""
        for entry in self.entries.values():
            entry.wait()
