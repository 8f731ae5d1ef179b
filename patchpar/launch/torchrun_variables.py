"""What torchrun or accelerate launch says in the environment of each process that it starts."""

import os

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


def torchrun_world() -> int | None:
    """Return the world size of torchrun; None if torchrun has not started this process."""
    if not all(os.environ.get(name, "").isdigit() for name in RANK_VARIABLES):
        return None
    return int(os.environ["WORLD_SIZE"])


def is_first_process() -> bool:
    """Return whether this process is rank 0 of torchrun, or not started by it."""
    return torchrun_world() is None or int(os.environ["RANK"]) == 0
