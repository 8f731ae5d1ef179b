"""Run as ranks by test_torchrun: each believes that it is alone on its host. Writes what each saw to a file."""

import json
import sys
from functools import partial
from pathlib import Path

import torch.distributed as dist

from patchpar.launch import authentication
from patchpar.launch.sealed_control import SealedControl
from patchpar.launch.torchrun import TorchrunExecutor, _rank_and_world_size
from tests.launch.conftest import TOY
from tests.launch.torchrun_script import outcome

SECRET = "0123456789abcdef0123456789abcdef"
REFUSED = {
    "nothing given": ({}, {}),
    "one has none": ({"secret_file": "good"}, {}),
    "one trusts": ({"trusted_network": True}, {"secret_file": "good"}),
    "another secret": ({"secret_file": "good"}, {"secret_file": "other"}),
    "others may read it": ({"secret_file": "good"}, {"secret_file": "open"}),
    "short": ({"secret_file": "good"}, {"secret_file": "short"}),
}


def start(options):
    return TorchrunExecutor(TOY, deadline=20.0, device="cpu", **options)


def used(options):
    with start(options) as executor:
        return {
            "add_up": executor.call("add_up", 3)[executor.rank],
            "converse": executor.call("converse", 2, on_ask=lambda question: question["value"] * 2)[executor.rank],
            "rank 1 raises": outcome(lambda: executor.call("fail", "ValueError", "only one", [1])),
            "links": executor.call("has_links")[executor.rank],
            "sealed": [isinstance(executor._control, SealedControl), executor._context.seal is not None],
        }


def tampered(options, rank):
    """Rank 1 does not seal as rank 0 expects."""
    executor = start(options)
    if rank == 1:
        executor._context.seal._key = b"that of somebody else"
    found = [outcome(lambda: executor.call("rank")) for _ in range(2)]
    executor.close()
    return found


def main(folder):
    rank, _ = _rank_and_world_size()
    authentication.this_host = lambda: f"host {rank}"
    files = Path(folder, f"host{rank}")
    files.mkdir()
    for name, text in (("good", SECRET), ("other", SECRET[::-1]), ("open", SECRET), ("short", SECRET[:31])):
        Path(files, name).touch(0o644 if name == "open" else 0o600)
        Path(files, name).write_text(text)

    def with_files(options):
        return {name: str(files / value) if name == "secret_file" else value for name, value in options.items()}

    found = {name: outcome(partial(start, with_files(each[rank]))) for name, each in REFUSED.items()}
    good = with_files({"secret_file": "good"})
    found["secret"] = used(good)
    found["trusted"] = used({"trusted_network": True})
    found["tampered"] = tampered(good, rank)
    found["secret again"] = used(good)
    found["backend"] = dist.get_backend()
    dist.destroy_process_group()  # as a script may that has used the first pipeline
    found["in a new group"] = used(good)
    Path(folder, f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
