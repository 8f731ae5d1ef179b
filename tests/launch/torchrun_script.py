"""Run under torchrun by test_torchrun: writes what it saw to a file per rank."""

import atexit
import importlib
import json
import os
import sys
from pathlib import Path

import torch.distributed as dist

from patchpar.launch.torchrun import TorchrunExecutor, torchrun_world
from tests.launch.conftest import TOY
from tests.launch.plain import Strange


def outcome(work):
    try:
        return work()
    except Exception as error:  # noqa: BLE001
        return [type(error).__name__, str(error).partition("\n")[0]]


def refuse(question):
    raise Strange("the caller's own")


def use_everything():
    events, questions = [], []

    def double(question):
        questions.append(question["step"])
        return question["value"] * 2

    with TorchrunExecutor(TOY, deadline=20.0, device="cpu") as executor:
        return executor.rank, {
            "world": torchrun_world(),
            "kind": executor.kind,
            "devices": executor.devices,
            "rank": executor.call("rank"),
            "add_up": executor.call("add_up", 3),
            "events": (executor.call("count", 3, on_event=lambda *event: events.append(event)), events)[1],
            "converse": executor.call("converse", 2, on_ask=double),
            "questions": questions,
            "all raise": outcome(lambda: executor.call("fail", "ValueError", "alike")),
            "rank 1 raises": outcome(lambda: executor.call("fail", "ValueError", "only one", [1])),
            "caller raises": outcome(lambda: executor.call("converse", 1, on_ask=refuse)),
            "again": executor.call("add_up", 4),
        }


def threads():
    """Names of all of this process's threads, those that Python does not know of as well."""
    return [Path(task, "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]


def main(folder):
    # What is registered first runs last, after everybody else has let go.
    at_the_end = Path(folder, f"{os.environ['RANK']}.threads.json")
    atexit.register(lambda: at_the_end.write_text(json.dumps(threads())))
    assert not dist.is_initialized()
    rank, first = use_everything()  # makes the default group
    assert dist.is_initialized()
    importlib.import_module("torch.distributed.nn.functional")  # as diffusers does: it keeps a default group it finds
    _, second = use_everything()  # finds it
    Path(folder, f"{rank}.json").write_text(json.dumps([first, second]))
    assert any("gloo" in name for name in threads())
    globals()["never closed"] = left_open = TorchrunExecutor(TOY, deadline=20.0, device="cpu")
    left_open.call("add_up", 5)


main(sys.argv[1])
