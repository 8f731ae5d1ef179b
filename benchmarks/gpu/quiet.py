"""Output of a benchmark's process: its own rows, without the logs and warnings of libraries."""

import logging
import warnings


def quiet_process(*, threads: int | None = None) -> None:
    """Silence logs below errors and all warnings. `threads`: of torch on the CPU, None for as many as it chooses."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
