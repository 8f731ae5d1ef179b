"""A small engine to launch: no diffusion, every kind of behaviour."""

import os
import sys
import time
from pathlib import Path

import torch

from patchpar.comm.transport import Incoming, Outgoing, TensorSpec, connect, watched
from tests.launch.plain import PlainEngine


class ToyEngine(PlainEngine):
    def __init__(self, context):
        super().__init__(context)
        with context.waiting:
            self.transport = watched(connect(context), context)

    def facts(self):
        return {
            "rank": self.context.rank,
            "world_size": self.context.world_size,
            "device": self.context.device,
            "deadline": self.context.deadline,
            "threads": torch.get_num_threads(),
            "omp": os.environ.get("OMP_NUM_THREADS"),
            "pid": os.getpid(),
            "path": list(sys.path),
            "cwd": str(Path.cwd()),
        }

    def has_links(self):
        return bool(self.context.links)

    def add_up(self, value):
        total = torch.tensor([float(value + self.context.rank)])
        self.context.beat("all-reduce")
        others = tuple(rank for rank in range(self.context.world_size) if rank != self.context.rank)
        incoming = [Incoming(rank, (TensorSpec.of(total),)) for rank in others]
        received = self.transport.send_recv([Outgoing(others, (total,))], incoming, "all-reduce").wait()
        return total.item() + sum(x.item() for (x,) in received)

    def fail_before_collective(self, rank):
        self.context.beat("before")
        if self.context.rank == rank:
            raise KeyError("missing")
        return self.add_up(1)

    def die(self, rank, how):
        """Rank `rank` dies while the others wait for it."""
        self.crash(rank, how)
        return self.add_up(1)

    def stall(self, rank, seconds=600):
        self.context.beat("the last good place")
        if self.context.rank == rank:
            time.sleep(seconds)
        return self.add_up(1)

    def wait_for_rank_0(self, seconds):
        if self.context.rank == 0:
            time.sleep(seconds)
        return self.add_up(1)

    def exchange(self, burner, seconds):
        """A value from the other rank, which burns so long before it sends it; from nobody if there is no burner."""
        this_rank = self.context.rank
        with self.context.waiting:
            transport = watched(connect(self.context), self.context)
        try:
            self.context.beat("an exchange")
            if this_rank == burner:
                self.burn(seconds)
            sent = [Outgoing((1 - this_rank,), (torch.tensor([float(this_rank)]),))] if burner is not None else []
            found = transport.send_recv(
                sent, [Incoming(1 - this_rank, (TensorSpec((1,), torch.float32),))], "an exchange"
            ).wait()
            return found[0][0].item()
        finally:
            transport.close()

    def converse(self, steps):
        """Every rank takes the caller's word for the value."""
        value = torch.zeros(2)
        for step in range(steps):
            value = value + self.context.rank + 1 if step == 0 else value
            value = self.context.ask({"step": step, "value": value})
        return value.tolist()

    def generate(self, generator):
        return torch.randn(4, generator=generator)

    def change_in_place(self, tensor, array):
        tensor += self.context.rank
        array += self.context.rank
        self.add_up(0)
        return tensor.sum().item(), float(array.sum())

    def module_output(self, module, x):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter += self.context.rank
            self.add_up(0)
            return module(x)
