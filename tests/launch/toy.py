"""A small engine to launch: no diffusion, every kind of behaviour."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from patchpar.errors import PlanError


class ToyEngine:
    def __init__(self, context):
        self.context = context
        self.loaded = []

    def rank(self):
        return self.context.rank

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

    def echo(self, *args, **kwargs):
        return args, kwargs

    def add_up(self, value):
        total = torch.tensor([float(value + self.context.rank)])
        self.context.mark("all-reduce")
        dist.all_reduce(total)
        return total.item()

    def load(self, name):
        self.loaded.append(name)

    def what_is_loaded(self):
        return self.loaded

    def fail(self, kind, text, ranks=None):
        if ranks is None or self.context.rank in ranks:
            raise {"ValueError": ValueError, "PlanError": PlanError, "Strange": Strange, "Key": StrangeKey}[kind](text)
        return "fine"

    def fail_before_collective(self, rank):
        self.context.mark("before")
        if self.context.rank == rank:
            raise KeyError("missing")
        return self.add_up(1)

    def out_of_step(self):
        """All answer, but one rank is a seam ahead."""
        if self.context.rank == 0:
            self.context.mark("ahead")
            raise ValueError("late")
        raise ValueError("early")

    def die(self, rank, how):
        """Rank `rank` dies while the others wait for it."""
        self.context.mark("before the end")
        if self.context.rank == rank:
            sys.stderr.write("these are my last words\n")
            sys.stderr.flush()
            if how == "exit":
                os._exit(7)
            os.kill(os.getpid(), getattr(signal, how))
            time.sleep(60)
        return self.add_up(1)

    def stall(self, rank, seconds=600):
        self.context.mark("the last good place")
        if self.context.rank == rank:
            time.sleep(seconds)
        return self.add_up(1)

    def hold_interpreter(self, rank, seconds):
        """Sleep without letting other threads of the process run."""
        import ctypes

        if self.context.rank == rank:
            ctypes.PyDLL(None).usleep(int(seconds * 1e6))

    def work(self, steps, seconds):
        for step in range(steps):
            time.sleep(seconds)
            self.context.mark(f"step {step}")
        return steps

    def sleep(self, seconds):
        time.sleep(seconds)

    def count(self, number):
        for index in range(number):
            self.context.emit({"index": index})
        return number

    def emit_unsendable(self):
        self.context.emit(lambda: 0)

    def converse(self, steps):
        """Every rank takes the caller's word for the value."""
        value = torch.zeros(2)
        for step in range(steps):
            value = value + self.context.rank + 1 if step == 0 else value
            value = self.context.ask({"step": step, "value": value})
        return value.tolist()

    def draw(self, generator):
        return torch.randn(4, generator=generator)

    def change_in_place(self, tensor, array):
        tensor += self.context.rank
        array += self.context.rank
        if self.context.world_size > 1:
            dist.barrier()
        return tensor.sum().item(), float(array.sum())

    def module_output(self, module, x):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter += self.context.rank
            if self.context.world_size > 1:
                dist.barrier()
            return module(x)

    def unsendable(self):
        return lambda: 0

    def leave(self):
        sys.exit(3)

    def talk(self, words):
        sys.stdout.write(f"{words}\n")
        sys.stderr.write(f"{words} from {self.context.rank}\n")


class Strange(Exception):
    pass


class StrangeKey(KeyError):
    pass


class BadEngine:
    def __init__(self, context):
        raise ValueError("this engine cannot be built")


class HalfBadEngine(ToyEngine):
    def __init__(self, context):
        super().__init__(context)
        if context.rank == 1:
            os._exit(9)
