"""Weights in slots: every rank keeps a run of bytes of each block, and brings a block into a slot when it runs.

    bytes of a block      | rank 0 | rank 1 | rank 2 |      kept for good, 1/n each
    slots                 slot 0: block 0, 2, 4 ...          slot 1: block 1, 3, 5 ...
    block 1 runs          block 2 comes into slot 0, since 2 followed 1 in the last call

Parameters are views into the slots, whose addresses never change: nothing is allocated or copied at a gather. What is
not in a block stays whole. All ranks of the axis run the same blocks in the same order; which order is not assumed.
Where the bytes are kept, and how they get into a slot, is up to a store: in the memory of the devices, or of the host.
As in ZeRO-3 (Rajbhandari et al. 2020, arXiv:1910.02054), for inference, and by bytes instead of tensors.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from patchpar.comm.collectives import Communicator
from patchpar.errors import ExchangeError, UnsupportedModel
from patchpar.shard.hooks import HookSet
from patchpar.shard.weights.left_whole import say_what_is_in_graphs, say_what_stays_whole
from patchpar.shard.weights.packed import (
    NAN_BYTE,
    CopyMemory,
    blocks_of,
    copy_memory,
    packed_blocks,
    refuse_other_layouts,
    resident_of,
)
from patchpar.shard.weights.placed import PlacedBlock
from patchpar.shard.weights.stores import BlockStore, Transfer

SLOTS = 2
NOT_FOLLOWED = "which other guidance ranks cannot follow: use weights=whole, or cfg=1 and more ranks on axis patch"


class ShardedWeights:
    """The weights of one network, of which `store` keeps this rank's part, until `restore`.

    The constructor works on this rank alone: all ranks of the axis create it with the same weights, and `join` before
    the network is called. `resident`: how many blocks stay whole, evenly spaced. `copy`: what copies the memory
    of weights, which may be in host memory if it is given. Raises UnsupportedModel.
    """

    def __init__(
        self,
        network: nn.Module,
        store: BlockStore,
        *,
        slots: int = SLOTS,
        resident: int = 0,
        copy: CopyMemory | None = None,
    ) -> None:
        self.network, self.axis, self.store = network, store.axis, store
        self.times_whole = 1
        """How many such weights, of other ranks, make the whole ones that `restore` is for."""
        blocks = packed_blocks(network, store.device, on_the_host=copy is not None, ranks=self.axis.size)
        say_what_stays_whole(network, [block.module for block in blocks], self.axis)
        say_what_is_in_graphs(network, blocks_of(network), self.axis)
        whole = resident_of(len(blocks), resident)
        self.blocks = [block for number, block in enumerate(blocks) if number not in whole]
        largest = max(map(store.rows, self.blocks), default=0)
        count = min(slots, len(self.blocks))
        self._slots = [torch.empty(largest, dtype=torch.uint8, device=store.device) for _ in range(count)]
        self._slot = [index % len(self._slots) for index in range(len(self.blocks))]  # of each block
        self._bring: list[Callable[[], Transfer]] = []  # what starts to bring each block into its slot
        self._holds: list[int | None] = [None] * len(self._slots)
        self._pending: dict[int, tuple[int, Transfer]] = {}  # by slot
        self._next: dict[int, int] = {}  # the block that ran after each block in the last call
        self._last: int | None = None
        self._active: list[int] = []  # blocks that run now, the outer ones first
        self._order: list[int] | None = []  # blocks as they run in one call; None where they run within each other
        self._recording = False  # this order
        self._position: int | None = None  # in this order, in a round
        self._away: Mapping[int, tuple[list[Tensor], int]] = {}  # for a search: weights while not gathered, their bytes
        self._placed: list[PlacedBlock] = []
        self._hooks: dict[int, HookSet] = {}
        store.reserve(self.blocks)
        for index in range(len(self.blocks)):
            store.keep(index, copy_memory if copy is None else copy)
            self._placed.append(store.placed(index, self._slots[self._slot[index]]))
            self.into_slot(index)

    def join(self, comm: Communicator) -> None:
        """Begin to exchange bytes with the other ranks through `comm`. Collective. Raises UnsupportedModel."""
        if self.store.comm is None:
            refuse_other_layouts(self.network, self.blocks, (comm, self.axis))
            self.store.join(comm)
            at = [(index, self._slots[slot]) for index, slot in enumerate(self._slot)]
            self._bring = [self.store.bring(index, slot) for index, slot in at]
            self._placed = [self.store.placed(index, slot) for index, slot in at]
        self.store.comm = comm

    @property
    def comm(self) -> Communicator:
        """The way to the other ranks, after `join`."""
        assert self.store.comm is not None, "join comes first"
        return self.store.comm

    @property
    def num_bytes(self) -> int:
        """Bytes of this rank's shards and slots; weights that stay whole are not counted."""
        return self.store.num_bytes + sum(x.numel() for x in self._slots)

    @property
    def is_collective(self) -> bool:
        """Whether all ranks of the axis have to run the same blocks in the same order, after `join`."""
        return self.store.is_collective

    @property
    def in_slots(self) -> list[int]:
        """Indices of the blocks that come into slots, and do not stay whole."""
        return list(self._hooks)

    def restore(self) -> None:
        """Gather all blocks for good, bit for bit as they were, and remove the hooks. Idempotent. Collective.

        Raises PlanError, with nothing changed, where they do not fit a device. Raises ExchangeError.
        """
        self.settle()
        if self._hooks:
            need = self.times_whole * sum(self.blocks[index].num_bytes for index in self._hooks)
            self.store.refuse_whole(type(self.network).__name__, need)
        for index in self.in_slots:
            self.keep_whole(index)
        self._slots, self._placed, self._bring = [], [], []  # others may hold this object
        self.store.close()

    def settle(self) -> None:
        """Wait for transfers that were started in advance; no block runs. Raises ExchangeError."""
        if self._active:  # one has ended with an exception, and what follows it in the network did not run
            self._active, self._last = [], None
        for slot in list(self._pending):
            self._take(slot)

    def replaced(self) -> list[str]:
        """Return the names of blocks of which a sharded parameter or buffer is no longer in the network."""
        return [block.name for index, block in enumerate(self.blocks) if index in self._hooks and block.is_replaced()]

    # --- shards and slots ---------------------------------------------------------------------------------------

    def into_slot(self, index: int) -> None:
        """Bring a block into its slot when it runs, from now on; undoes `keep_whole` and `leave_out`."""
        self._placed[index].put()
        self._hooks[index] = hooks = HookSet()
        hooks.around(self.blocks[index].module, partial(self._enter, index), partial(self._leave, index))

    def leave_out(self, index: int) -> None:
        """Leave a block without weights: NaN in a few bytes. It is not to run."""
        self._hooks.pop(index).close()
        self.blocks[index].point_to(self.blocks[index].nan_views())

    def keep_whole(self, index: int) -> None:
        """Gather a block for good. Collective. Raises ExchangeError."""
        self._hold(index)
        self.blocks[index].point_to(self.store.whole(index, self._placed[index].views))
        self._hooks.pop(index).close()

    # --- gathers ------------------------------------------------------------------------------------------------

    def _start(self, index: int) -> None:
        """Start to bring a block into its slot."""
        slot = self._slot[index]
        self._holds[slot] = None
        self._pending[slot] = index, self._bring[index]()

    def _take(self, slot: int) -> None:
        """Wait for the gather into a slot."""
        _, work = self._pending[slot]
        work.wait()
        self._holds[slot], _ = self._pending.pop(slot)

    def _hold(self, index: int) -> None:
        """Gather a block unless its slot holds it."""
        slot = self._slot[index]
        if slot in self._pending:
            self._take(slot)
        if self._holds[slot] != index:
            self._start(index)
            self._take(slot)

    def _enter(self, index: int, *_: Any) -> None:
        """Called before a block runs."""
        if index in self._active:  # it ended with an exception
            del self._active[self._active.index(index) :]
        if self._recording and self._order is not None:
            self._order = None if self._active else [*self._order, index]
        if self._position is not None:
            self._pass_by(until=index)
        self._gather(index)
        self._placed[index].put()
        self._active.append(index)

    def _gather(self, index: int) -> None:
        """Gather a block, and start with the one that ran after it in the last call."""
        self._hold(index)
        if self._last is not None:
            self._next[self._last] = index
        self._last = index
        self._start_next(index)

    def _start_next(self, index: int) -> None:
        """Start to gather the block that ran after this one in the last call, if its slot is free.

        Not in a search, where it would bring back weights that are to be missing.
        """
        following = self._next.get(index)
        if following is None or following not in self._hooks or self._away:
            return
        slot = self._slot[following]
        in_use = slot in self._pending or slot in map(self._slot.__getitem__, (index, *self._active))
        if not in_use and self._holds[slot] != following:
            self._start(following)

    def _leave(self, index: int, *_: Any) -> None:
        """Called after a block has run. Layerwise casting has given its parameters other memory."""
        if index in self._away:
            views, byte = self._away[index]
            self.blocks[index].point_to(views)
            self._placed[index].used.fill_(byte)  # an output may be a view of a weight
            self._holds[self._slot[index]] = None
        else:
            self._placed[index].put()
        if index in self._active:
            del self._active[self._active.index(index) :]
        if self._active:  # a block that called this one, and goes on
            outer = self._active[-1]
            self._hold(outer)
            self._placed[outer].put()

    # --- calls of one rank that others take part in ---------------------------------------------------------------

    @contextmanager
    def round(self) -> Iterator[None]:
        """Context in which all blocks are gathered once, and this rank runs some of them, or none. Collective.

        Blocks are gathered in the order in which they ran when `keep_what_is_read_outside` was called, to the end also
        where a call is refused, so that no other rank waits for it. Raises UnsupportedModel, ExchangeError.
        """
        if self._order is None:
            raise UnsupportedModel(f"blocks of {type(self.network).__name__} run within each other, {NOT_FOLLOWED}")
        self._position = 0
        try:
            yield
            self._pass_by()
        except UnsupportedModel:  # of all ranks that make this call, at the same block
            self._active = []
            with suppress(ExchangeError):  # the cause is raised
                self._pass_by()
            raise
        finally:
            self._position = None

    def _pass_by(self, until: int | None = None) -> None:
        """Gather the blocks that do not run here, up to the next time that `until` does, or to the end."""
        order, position = self._order or [], self._position or 0
        if until is not None and until not in order[position:]:
            raise UnsupportedModel(
                f"{type(self.network).__name__} runs {self.blocks[until].name} in another order than in its first "
                f"call, {NOT_FOLLOWED}"
            )
        end = len(order) if until is None else order.index(until, position)
        for index in order[position:end]:
            self._gather(index)
        self._position = end + 1

    # --- what reads weights elsewhere ---------------------------------------------------------------------------

    def record(self, run: Callable[[], Any]) -> Any:
        """Return the output of `run`, and record the order in which blocks run."""
        self._order, self._active, self._recording = [], [], True
        try:
            return run()
        finally:
            self._recording = False

    def forget_order(self) -> None:
        """Discard which block ran after which: the next call may be another one."""
        self._next.clear()
        self._last = None

    @contextmanager
    def poisoned(self, group: Iterable[int]) -> Iterator[None]:
        """Context in which weights of `group` are NaN, and those of the other blocks zero, while not gathered."""
        fill = dict.fromkeys(self._hooks, 0) | dict.fromkeys(group, NAN_BYTE)
        largest = max(self.blocks[index].largest for index in self._hooks)
        filled = {byte: torch.full_like(self._slots[0][:largest], byte) for byte in set(fill.values())}
        self._away = {index: (self.blocks[index].fillers(filled[byte]), byte) for index, byte in fill.items()}
        try:
            for index, (views, _) in self._away.items():
                self.blocks[index].point_to(views)
            yield
        finally:
            self._away = {}
            for index in self._hooks:
                self._placed[index].put()
