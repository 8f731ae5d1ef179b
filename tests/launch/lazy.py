"""An engine whose ranks connect when they exchange something, with those of the call, so that one is replaced alone."""

import time
from pathlib import Path

import torch

from patchpar.comm.transport import Incoming, Outgoing, TensorSpec, connect, extend, watched
from tests.launch.plain import PlainEngine


class LazyEngine(PlainEngine):
    def __init__(self, context):
        super().__init__(context)
        self.transport = None

    def ranks(self):
        return self.context.ranks

    def add_up(self, value, number=1):
        """The sum of value + rank over the ranks of the call, so often."""
        self.reach()
        for _ in range(number):
            total = self.exchange(float(value + self.context.rank))
        return total

    def reach(self):
        if self.transport is None:
            self.transport = connect(self.context, ranks=self.context.ranks)
        else:
            extend(self.transport, self.context, self.context.ranks)
        watched(self.transport, self.context)

    def exchange(self, value):
        own = torch.tensor([value])
        self.context.beat("all-reduce")
        others = tuple(rank for rank in self.context.ranks if rank != self.context.rank)
        incoming = [Incoming(rank, (TensorSpec.of(own),)) for rank in others]
        received = self.transport.send_recv([Outgoing(others, (own,))], incoming, "all-reduce").wait()
        return value + sum(x.item() for (x,) in received)

    def lines(self):
        """The kind of connection to each other rank."""
        return {peer: type(line).__name__ for peer, line in sorted(self.transport._lines.items())}

    def lose(self, rank, how, before=1):
        """Rank `rank` dies, stops, raises or loses its device after so many exchanges, while the others wait for it."""
        self.add_up(0, before)
        if self.context.rank == rank and how == "breaks":
            raise RuntimeError("CUDA error: device-side assert triggered")
        if self.context.rank == rank and how == "raises":
            raise KeyError("missing")
        if self.context.rank == rank:
            self.crash(rank, how)
        return self.add_up(0, 2)

    def meet(self, value, seconds=20.0):
        """Say that this call has begun, and go on when the caller says so."""
        self.context.emit("begun")
        assert self.context.receive(seconds) == "go on"
        return self.add_up(value)

    def converse_in_turn(self, steps):
        return [self.context.ask((self.context.rank, step)) for step in range(steps)]

    def steps(self, number, seconds, *, together=True):
        """The steps it took of so many, each after a pause point, with an exchange or without; rank 1 is slow."""
        self.reach()
        self.taken = 0
        for _ in range(number):
            self.context.pause_point()
            self.taken += 1
            self.context.beat("step")
            time.sleep(seconds if self.context.rank == 1 else seconds / 5)
            if together:
                self.exchange(0.0)
        return self.taken

    def steps_taken(self):
        return self.taken

    def traces(self):
        """Open descriptors of this process, and its threads."""
        return len(list(Path("/proc/self/fd").iterdir())), len(list(Path("/proc/self/task").iterdir()))

    def compute(self, rank, seconds):
        """Rank `rank` computes for so long; the others wait for it."""
        self.reach()
        if self.context.rank == rank:
            time.sleep(seconds)
        return self.exchange(0.0)
