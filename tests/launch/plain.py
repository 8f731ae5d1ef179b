"""A small engine to launch, which needs no torch and so starts at once."""

import ctypes
import gc
import hashlib
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

from patchpar.errors import ExchangeError, PlanError
from patchpar.launch.remote_errors import say_changes_left


class PlainEngine:
    def __init__(self, context):
        self.context = context
        self.loaded = []

    def rank(self):
        return self.context.rank

    def echo(self, *args, **kwargs):
        return args, kwargs

    def load(self, name):
        self.loaded.append(name)

    def load_on_others(self, name, rank):
        """Fails on this rank."""
        if self.context.rank == rank:
            raise ValueError("not on this one")
        self.loaded.append(name)

    def what_is_loaded(self):
        return self.loaded

    def fail(self, kind, text, ranks=None):
        if ranks is None or self.context.rank in ranks:
            raise {"ValueError": ValueError, "PlanError": PlanError, "Strange": Strange, "Key": StrangeKey}[kind](text)
        return "fine"

    def load_half(self, name):
        """Fails on all ranks, when it has changed something."""
        self.loaded.append(name)
        error = ValueError("half of it")
        say_changes_left(error)
        raise error

    def out_of_step(self):
        """All answer, but one rank is an exchange ahead."""
        if self.context.rank == 0:
            self.context.beat("ahead")
            raise ValueError("late")
        raise ValueError("early")

    def wait_in_vain(self, seconds):
        """Rank 0 fails at once, the others when they have waited for it."""
        if self.context.rank == 0:
            raise ValueError("early")
        time.sleep(seconds)
        raise ExchangeError("rank 0 has sent nothing")

    def crash(self, rank, how):
        self.context.beat("before the end")
        if self.context.rank == rank:
            sys.stderr.write("these are my last words\n")
            sys.stderr.flush()
            if how == "exit":
                os._exit(7)
            os.kill(os.getpid(), getattr(signal, how))

    def load_once(self, name):
        """Fails in every process but the first that loads."""
        path = Path(os.environ["TMPDIR"]) / name
        if path.exists():
            raise ValueError("loaded a second time")
        path.touch()

    def stall_one(self, rank, seconds):
        if self.context.rank == rank:
            time.sleep(seconds)

    def hold_interpreter(self, rank, seconds):
        """Sleep without letting other threads of the process run."""
        if self.context.rank == rank:
            ctypes.PyDLL(None).usleep(int(seconds * 1e6))

    def burn(self, seconds):
        """One long kernel: it uses the processor, leaves the interpreter to other threads, and makes no mark."""
        give_up = time.monotonic() + seconds
        while time.monotonic() < give_up:
            hashlib.pbkdf2_hmac("sha256", b"", b"", 100_000)
        return "done"

    def spin(self, seconds):
        """Wait for another rank as some libraries do."""
        with self.context.waiting:
            return self.burn(seconds)

    def spin_on_gpu(self, seconds):
        """The same, by a kernel in the stream of a GPU, while the process does anything else."""
        self.context.waiting.set_stream_waiting(True)
        return self.burn(seconds)

    def work(self, steps, seconds):
        for step in range(steps):
            time.sleep(seconds)
            self.context.beat(f"step {step}")
        return steps

    def sleep(self, seconds):
        time.sleep(seconds)

    def count(self, number):
        for index in range(number):
            self.context.emit({"index": index})
        return number

    def emit_unsendable(self):
        self.context.emit(threading.Lock())

    def emit_then_sleep(self, seconds):
        self.context.emit("going to sleep")
        time.sleep(seconds)

    def start_child(self):
        """A process of the worker's own, which would sleep for ten minutes; its id."""
        return subprocess.Popen(["sleep", "600"]).pid

    def variables(self):
        """All that a process has got from the one that started it, or that Python has made of it."""
        status = Path("/proc/self/status").read_text()
        descriptors = [int(path.name) for path in Path("/proc/self/fd").iterdir()]
        targets = {number: str(Path(f"/proc/self/fd/{number}").readlink()) for number in descriptors if is_open(number)}
        return {
            "environment": dict(os.environ),
            "folder": str(Path.cwd()),
            "path": list(sys.path),
            "arguments": [sys.argv[:2], sys.orig_argv[:4], len(sys.argv), len(sys.orig_argv)],
            "flags": [str(sys.flags), sys.warnoptions, str(warnings.filters), gc.isenabled()],
            "leads": [os.getpid() == os.getsid(0) == os.getpgrp()],
            "descriptors": sorted((target.split("[")[0], os.get_inheritable(n)) for n, target in targets.items()),
            "stdin": targets[0],
            "output": targets[1] == targets[2],
            "streams": [(x.encoding, x.errors, x.write_through) for x in (sys.stdout, sys.stderr)],
            "handlers": [str(signal.getsignal(number)).split(" at ")[0] for number in signal.valid_signals()],
            "status": re.findall(r"^(?:Umask|Sig(?:Blk|Ign|Cgt)|Cpus_allowed):.*$", status, re.MULTILINE),
            "limits": Path("/proc/self/limits").read_text(),
            "priority": os.getpriority(os.PRIO_PROCESS, 0),
            "threads": sorted(thread.name for thread in threading.enumerate()),
            "main": sorted(vars(sys.modules["__main__"])),
        }

    def sample(self):
        """Of each global generator, the next number."""
        import numpy as np
        import torch

        return random.random(), float(np.random.rand()), float(torch.rand(()))

    def unsendable(self):
        return threading.Lock()

    def leave(self):
        sys.exit(3)

    def talk(self, words):
        sys.stdout.write(f"{words}\n")
        sys.stderr.write(f"{words} from {self.context.rank}\n")


def is_open(number):
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


class Strange(Exception):
    pass


class StrangeKey(KeyError):
    pass


class BadEngine:
    def __init__(self, context):
        raise ValueError("this engine cannot be built")


class DyingEngine:
    def __init__(self, context):
        os._exit(9)


COUNTED = []
GUARD = threading.Lock()


def guarded():
    """A function inside a function of this module, which uses a list and a lock of the module."""

    def count(word):
        with GUARD:
            COUNTED.append(word)
        return len(COUNTED)

    return count
