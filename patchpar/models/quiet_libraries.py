"""Suppression of repeated messages of libraries, which every rank would print."""

import importlib
import logging
import threading

from patchpar.launch.devices import resolve_devices
from patchpar.launch.torchrun_variables import torchrun_world
from patchpar.plan.plan import Plan

IMAGE_PROCESSORS = "transformers.utils.import_utils"
"""The logger that says, of each image processor that is imported, that there is no torchvision."""
TOKENIZERS = "transformers.tokenization_utils_base"
NO_NEWS = ("should be kept in float32: []", "Token indices sequence length is longer than")
"""Of a diffusers warning with an empty list of modules, printed with every encoded image; and of one that tells of
errors which do not come: diffusers counts the tokens of the whole prompt only to say what it cuts off."""


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
    for name in ("diffusers.models.modeling_utils", TOKENIZERS):
        logging.getLogger(name).addFilter(_is_informative)


def _is_informative(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    return not any(each in message for each in NO_NEWS)
