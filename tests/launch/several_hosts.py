"""Run as ranks by test_torchrun: as far as their environment says, on several hosts. Writes what each saw to a file."""

import atexit
import importlib
import json
import os
import sys
from pathlib import Path

import torch.distributed as dist

from patchpar.launch.torchrun import TorchrunExecutor
from tests.launch.conftest import TOY
from tests.launch.torchrun_script import outcome


def threads():
    """Names of all of this process's threads, those that Python does not know of as well."""
    return [Path(task, "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]


def main(folder):
    # What is registered first runs last, after everybody else has let go.
    rank = os.environ["RANK"]
    at_the_end = Path(folder, f"{rank}.threads.json")
    atexit.register(lambda: at_the_end.write_text(json.dumps(threads())))
    assert not dist.is_initialized()
    with TorchrunExecutor(TOY, deadline=20.0, device="cpu") as executor:  # makes the default group
        found = {
            "add_up": executor.call("add_up", 3),
            "prompt": outcome(lambda: executor.call("echo", prompt=rank)),
            "converse": executor.call("converse", 2, on_ask=lambda question: question["value"] * 2),
            "links": executor.call("has_links")[executor.rank],
            "backend": dist.get_backend(),
            "threads": threads(),
        }
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    importlib.import_module("torch.distributed.nn.functional")  # as diffusers does: it keeps a default group it finds
    globals()["never closed"] = left_open = TorchrunExecutor(TOY, deadline=20.0, device="cpu")
    left_open.call("add_up", 5)


if __name__ == "__main__":
    main(sys.argv[1])
