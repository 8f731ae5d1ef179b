"""Run as ranks by test_torchrun: rank 2 ends in the middle of a call, the others write what they are told."""

import json
import sys
from pathlib import Path

from patchpar.errors import WorkerDied
from patchpar.launch.torchrun import TorchrunExecutor
from tests.launch.conftest import TOY


def main(folder):
    executor = TorchrunExecutor(TOY, deadline=60.0, device="cpu")
    assert executor.call("rank")[executor.rank] == executor.rank
    found = {}
    for name, call in (("first", ("die", 2, "exit")), ("next", ("rank",))):
        try:
            executor.call(*call)
        except WorkerDied as error:
            found[name] = [type(error).__name__, str(error), error.rank]
    Path(folder, f"{executor.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
