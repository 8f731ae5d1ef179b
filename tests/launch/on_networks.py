"""Run by torchrun in two network namespaces, by test_two_networks: writes what each rank saw to a file."""

import json
import os
import sys
from pathlib import Path

from tests.launch.distant_hosts import start, used
from tests.launch.torchrun_script import outcome


def main(folder):
    rank = os.environ["RANK"]
    secret = {"secret_file": str(Path(folder, "secret"))}
    found = {"nothing given": outcome(lambda: start({})), "secret": used(secret)}
    Path(folder, f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
