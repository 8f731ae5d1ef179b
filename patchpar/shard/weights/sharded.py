"""Sharded weights: every rank keeps a run of bytes of each block, and gathers a block when it runs.

    bytes of a block      | rank 0 | rank 1 | rank 2 |      kept for good, 1/n each
    slots                 slot 0: block 0, 2, 4 ...          slot 1: block 1, 3, 5 ...
    block 1 runs          gather of block 2 into slot 0, since 2 followed 1 in the last call

Parameters are views into the slots, whose addresses never change: nothing is allocated or copied at a gather. What is
not in a block stays whole. All ranks of the axis run the same blocks in the same order; which order is not assumed.

As in ZeRO-3 (Rajbhandari et al. 2020, arXiv:1910.02054), for inference, and by bytes instead of tensors.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from patchpar.comm.collectives import AllGather, Communicator
from patchpar.comm.transport import Work
from patchpar.errors import PlanError, UnsupportedModel
from patchpar.plan.mesh import Axis
from patchpar.shard.hooks import HookSet
from patchpar.shard.verification import fails_or_has_nan, uncounted
from patchpar.shard.weights.packed import PackedBlock, packed_blocks, refuse_other_layouts, resident_of

KIND = "weights"  # of all gathers, in statistics
SLOTS = 2
NAN_BYTE = 0xFF  # a NaN in every floating-point dtype of torch, when all bytes have this value
log = logging.getLogger(__name__)


class ShardedWeights:
    """The weights of one network, sharded over the ranks of `axis`, until `restore`.

    All ranks of the axis create it together, with the same weights, and call each of its methods together. `resident`:
    how many blocks stay whole, evenly spaced. Raises PlanError, UnsupportedModel.
    """

    def __init__(
        self, network: nn.Module, comm: Communicator, axis: Axis, *, slots: int = SLOTS, resident: int = 0
    ) -> None:
        if axis.size == 1:
            raise PlanError("weights=sharded takes at least 2 ranks, but the plan has 1: use weights=whole")
        self.network, self.comm, self.axis = network, comm, axis
        blocks = packed_blocks(network, comm.transport.device)
        whole = resident_of(len(blocks), resident)
        self.blocks = [block for number, block in enumerate(blocks) if number not in whole]
        refuse_other_layouts(network, self.blocks, (comm, axis))
        largest = max((self._rows(block) for block in self.blocks), default=0)
        empty = partial(torch.empty, dtype=torch.uint8, device=comm.transport.device)
        self._slots = [empty(largest) for _ in range(min(slots, len(self.blocks)))]
        self._holds: list[int | None] = [None] * len(self._slots)
        self._pending: dict[int, tuple[int, Work[Tensor]]] = {}  # by slot
        self._next: dict[int, int] = {}  # the block that ran after each block in the last call
        self._last: int | None = None
        self._active: list[int] = []  # blocks that run now, the outer ones first
        self._order: list[int] | None = []  # blocks as they run in one call; None where they run within each other
        self._recording = False  # this order
        self._position: int | None = None  # in this order, in a round
        self._away: Mapping[int, list[Tensor]] = {}  # what weights are while not gathered, for a search
        self._fill: Mapping[int, int] = {}  # what the slot of a block is filled with when it has run, for a search
        self._shards: list[Tensor] = []
        self._views: list[list[Tensor]] = []
        self._hooks: dict[int, HookSet] = {}
        for index in range(len(self.blocks)):
            self._shard(index)

    @property
    def num_bytes(self) -> int:
        """Bytes of this rank's shards and slots; weights that stay whole are not counted."""
        return sum(x.numel() for x in (*self._shards, *self._slots))

    def restore(self) -> None:
        """Gather all blocks for good, bit for bit as they were, and remove the hooks. Idempotent. Collective.

        Raises ExchangeError.
        """
        self.settle()
        for index in list(self._hooks):
            self._keep_whole(index)
        self._slots, self._shards = [], []

    def settle(self) -> None:
        """Wait for gathers that were started in advance. Raises ExchangeError."""
        for slot in list(self._pending):
            self._take(slot)

    def replaced(self) -> list[str]:
        """Return the names of blocks of which a sharded parameter or buffer is no longer in the network."""
        return [block.name for index, block in enumerate(self.blocks) if index in self._hooks and block.is_replaced()]

    # --- shards and slots ---------------------------------------------------------------------------------------

    def _shard(self, index: int) -> None:
        """Keep this rank's bytes of a block, and make its parameters views of its slot."""
        block, slot = self.blocks[index], self._slot(index)
        block.write(self._slots[slot])
        self._holds[slot] = index
        self._shards.append(self._row(index).clone())
        self._views.append(block.views(self._slots[slot]))
        block.point_to(self._views[index])
        hooks = self._hooks[index] = HookSet()
        hooks.before(block.module, partial(self._enter, index))
        hooks.after(block.module, partial(self._leave, index))

    def _keep_whole(self, index: int) -> None:
        """Gather a block for good."""
        self._hold(index)
        self.blocks[index].point_to(self.blocks[index].own_copies(self._slots[self._slot(index)]))
        self._hooks.pop(index).close()

    def _slot(self, index: int) -> int:
        return index % len(self._slots)

    def _rows(self, block: PackedBlock) -> int:
        return self.axis.size * block.shard_bytes(self.axis.size)

    def _row(self, index: int) -> Tensor:
        """Return where this rank's bytes lie in the slot of a block, [bytes]."""
        size = self.blocks[index].shard_bytes(self.axis.size)
        return self._slots[self._slot(index)].narrow(0, self.axis.rank * size, size)

    # --- gathers ------------------------------------------------------------------------------------------------

    def _start(self, index: int) -> None:
        """Start to gather a block into its slot."""
        slot, block = self._slot(index), self.blocks[index]
        self._holds[slot], own = None, self._row(index)
        own.copy_(self._shards[index])
        into = self._slots[slot][: self._rows(block)]
        work = self.comm.all_gather(self.axis, KIND, f"weights of {block.name}", own, bulk=True, into=into)
        self._pending[slot] = index, work

    def _take(self, slot: int) -> None:
        """Wait for the gather into a slot."""
        index, work = self._pending[slot]
        work.wait()
        del self._pending[slot]
        self._holds[slot] = index

    def _hold(self, index: int) -> None:
        """Gather a block unless its slot holds it."""
        slot = self._slot(index)
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
        self.blocks[index].point_to(self._views[index])
        self._active.append(index)

    def _gather(self, index: int) -> None:
        """Gather a block, and start with the one that ran after it in the last call."""
        self._hold(index)
        if self._last is not None:
            self._next[self._last] = index
        self._last = index
        self._start_next(index)

    def _start_next(self, index: int) -> None:
        """Start to gather the block that ran after this one in the last call, if its slot is free."""
        following = self._next.get(index)
        if following is None or following not in self._hooks:
            return
        slot = self._slot(following)
        in_use = slot in self._pending or slot in map(self._slot, (index, *self._active))
        if not in_use and self._holds[slot] != following:
            self._start(following)

    def _leave(self, index: int, *_: Any) -> None:
        """Called after a block has run. Layerwise casting has given its parameters other memory."""
        self.blocks[index].point_to(self._away.get(index, self._views[index]))
        if index in self._fill:  # an output may be a view of a weight
            slot = self._slot(index)
            self._slots[slot].fill_(self._fill[index])
            self._holds[slot] = None
        if index in self._active:
            del self._active[self._active.index(index) :]
        if self._active:  # a block that called this one, and goes on
            outer = self._active[-1]
            self._hold(outer)
            self.blocks[outer].point_to(self._views[outer])

    # --- calls of one rank that others take part in ---------------------------------------------------------------

    @contextmanager
    def round(self) -> Iterator[None]:
        """Context in which all blocks are gathered once, and this rank runs some of them, or none. Collective.

        Blocks are gathered in the order in which they ran when `keep_what_is_read_outside` was called. Raises
        UnsupportedModel, ExchangeError.
        """
        if self._order is None:
            raise UnsupportedModel(
                f"blocks of {type(self.network).__name__} run within each other, which other guidance ranks cannot "
                "follow: use weights=whole, or cfg=1 and more ranks on axis patch"
            )
        self._position = 0
        try:
            yield
            self._pass_by()
        finally:
            self._position = None

    def _pass_by(self, until: int | None = None) -> None:
        """Gather the blocks that do not run here, up to the next time that `until` does, or to the end."""
        order, position = self._order, self._position
        assert order is not None
        assert position is not None
        if until is not None and until not in order[position:]:
            raise UnsupportedModel(
                f"{type(self.network).__name__} runs {self.blocks[until].name} in another order than in its first "
                "call, which other guidance ranks cannot follow: use weights=whole, or cfg=1 and more ranks on axis "
                "patch"
            )
        end = len(order) if until is None else order.index(until, position)
        for index in order[position:end]:
            self._gather(index)
        self._position = end + 1

    # --- what reads weights elsewhere ---------------------------------------------------------------------------

    def keep_what_is_read_outside(self, run: Callable[[], Any]) -> list[str]:
        """Keep whole, from now on, every block whose weights are read while it does not run; return their names.

        `run` calls the network, without side effects, and returns its output. It is called once with NaN in all
        weights that are not gathered, and again for smaller and smaller groups if these reach the output. A model whose
        own output has NaN keeps all blocks whole. Only floating-point weights can be found.
        """
        found: list[int] = []
        with uncounted(self.comm):
            if self.comm.transport.device.type == "meta":  # nothing can be found without values
                self._record(run)
            elif self._hooks:
                found = self._read_outside(run, list(self._hooks))
            self.settle()
            for index in found:
                self._keep_whole(index)
            if found:
                self._record(run)
        self._next.clear()
        self._last = None
        names = [self.blocks[index].name for index in found]
        if names and self.axis.rank == 0:
            kind = type(self.network).__name__
            log.warning("%s: code outside %s reads their weights, so they stay whole", kind, ", ".join(names))
        return names

    def _read_outside(self, run: Callable[[], Any], group: list[int]) -> list[int]:
        with self._poisoned(group):
            own = fails_or_has_nan(partial(self._record, run))
        flag = torch.tensor([own], device=self.comm.transport.device)
        if not any(bool(x) for x in AllGather(self.comm, self.axis, "verify", "poisoned weights").same(flag)):
            return []
        if len(group) == 1:
            return group
        half = len(group) // 2
        return self._read_outside(run, group[:half]) + self._read_outside(run, group[half:])

    def _record(self, run: Callable[[], Any]) -> Any:
        """Return the output of `run`, and record the order in which blocks run."""
        self._order, self._active, self._recording = [], [], True
        try:
            return run()
        finally:
            self._recording = False

    @contextmanager
    def _poisoned(self, group: Iterable[int]) -> Iterator[None]:
        """Context in which weights of `group` are NaN, and those of the other blocks zero, while not gathered."""
        self._fill = dict.fromkeys(self._hooks, 0) | dict.fromkeys(group, NAN_BYTE)
        filled = {byte: torch.full_like(self._slots[0], byte) for byte in set(self._fill.values())}
        self._away = {index: self.blocks[index].views(filled[byte]) for index, byte in self._fill.items()}
        try:
            for index, views in self._away.items():
                self.blocks[index].point_to(views)
            yield
        finally:
            self._away, self._fill = {}, {}
            for index in self._hooks:
                self.blocks[index].point_to(self._views[index])
