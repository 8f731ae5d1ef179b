"""What libraries would say in every rank, each time, though it is no news to anybody."""

import logging

import diffusers
import transformers

EMPTY_LIST = "should be kept in float32: []"
"""The end of a warning of diffusers whose list of modules is empty, with every picture that is encoded."""


def silence_libraries() -> None:
    """For this process: no bars for each component, no word of image processors without torchvision. Idempotent.

    For workers and commands. In a program of the user's it is the user who decides what libraries say.
    """
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("transformers.utils.import_utils").setLevel(logging.ERROR)
    logging.getLogger("diffusers.models.modeling_utils").addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    return EMPTY_LIST not in record.getMessage()
