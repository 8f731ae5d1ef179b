"""Suppression of repeated messages of libraries, which every rank would print."""

import logging

import diffusers
import transformers

EMPTY_LIST = "should be kept in float32: []"
"""End of a diffusers warning with an empty list of modules, printed with every encoded image."""


def silence_libraries() -> None:
    """Turn off progress bars of components and warnings of image processors without torchvision. Idempotent.

    For workers and commands: in the user's own process the user decides what libraries print.
    """
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("transformers.utils.import_utils").setLevel(logging.ERROR)
    logging.getLogger("diffusers.models.modeling_utils").addFilter(_is_informative)


def _is_informative(record: logging.LogRecord) -> bool:
    return EMPTY_LIST not in record.getMessage()
