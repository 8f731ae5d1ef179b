"""Run under torchrun by test_torchrun: writes what it saw to a file per rank."""

import json
import os
import sys
from pathlib import Path

import torch.distributed as dist

from patchpar.launch.torchrun import TorchrunExecutor
from patchpar.launch.torchrun_variables import torchrun_world
from tests.launch.conftest import TOY
from tests.launch.plain import Strange
from tests.launch.test_links import listening


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
            "other prompts": outcome(lambda: executor.call("echo", 1, prompt=["a dog", "a cat"][executor.rank])),
            "other methods": outcome(lambda: executor.call(["rank", "load"][executor.rank])),
            "listening": sorted(listening([os.getpid()])),
            "has group": dist.is_initialized(),
            "is told": outcome(lambda: executor.call("rank", on_start=lambda report: report(0, "word"))),
            "again": executor.call("add_up", 4),
        }


def main(folder):
    rank, first = use_everything()  # without a group
    dist.init_process_group("gloo")
    _, second = use_everything()  # beside one
    dist.destroy_process_group()
    Path(folder, f"{rank}.json").write_text(json.dumps([first, second]))
    globals()["never closed"] = left_open = TorchrunExecutor(TOY, deadline=20.0, device="cpu")
    left_open.call("add_up", 5)
    if rank == 0:
        Path(folder, "left.json").write_text(json.dumps(outcome(lambda: left_open.call("add_up", 6))))


if __name__ == "__main__":
    main(sys.argv[1])
