"""Suppression of repeated messages of libraries, which every rank would print."""

import importlib
import logging
import threading

from patchpar.launch.devices import resolve_devices
from patchpar.launch.torchrun import torchrun_world
from patchpar.plan.plan import Plan

IMAGE_PROCESSORS = "transformers.utils.import_utils"
"""The logger that says, of each image processor that is imported, that there is no torchvision."""
EMPTY_LIST = "should be kept in float32: []"
"""End of a diffusers warning with an empty list of modules, printed with every encoded image."""


def silence_libraries() -> None:
    """Turn off progress bars of components and warnings of image processors without torchvision. Idempotent.

    For workers and commands: in the user's own process the user decides what libraries print.
    """
    import diffusers
    import transformers

    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    _silence_loggers()


def silence_command(devices: object, plan: Plan | str = "auto") -> None:
    """Silence libraries in the process of a command for `devices`, as `ParallelPipeline` takes them. Idempotent.

    Where only its workers import the libraries, which takes seconds, it does not either. Raises PlanError for devices
    that are not there.
    """
    wanted = plan.world_size if isinstance(plan, Plan) and devices == "auto" else devices
    if torchrun_world() is None and len(resolve_devices(wanted).names) > 1:
        _silence_loggers()
    else:
        silence_libraries()


def import_quietly(module: str) -> None:
    """Import a module of diffusers in the user's process, without warnings of image processors from this thread."""
    logger, thread = logging.getLogger(IMAGE_PROCESSORS), threading.get_ident()

    def is_of_others(record: logging.LogRecord) -> bool:
        return record.thread != thread

    logger.addFilter(is_of_others)
    try:
        importlib.import_module(module)
    finally:
        logger.removeFilter(is_of_others)


def _silence_loggers() -> None:
    logging.getLogger(IMAGE_PROCESSORS).setLevel(logging.ERROR)
    logging.getLogger("diffusers.models.modeling_utils").addFilter(_is_informative)


def _is_informative(record: logging.LogRecord) -> bool:
    return EMPTY_LIST not in record.getMessage()
