"""Copies of parts of a pipeline that a script has read, such as `pipe.scheduler`: changes of them reach no rank.

In diffusers they would act on the pipeline. So the log says, before the next call, which copies have been changed.
"""

import logging
from collections.abc import Mapping
from typing import Any

from patchpar.launch.argument_mismatch import described

log = logging.getLogger(__name__)


class AttributeCopies:
    """The latest copy of each tokenizer and part with a `config` (schedulers, processors of images), and how it was."""

    def __init__(self) -> None:
        self._read: dict[str, tuple[Any, bytes]] = {}

    def note(self, name: str, value: Any) -> None:
        """Keep the copy of an attribute that a script gets."""
        if isinstance(getattr(value, "config", None), Mapping) or _is_tokenizer(value):
            self._read[name] = value, _state_of(value)

    def name_of(self, value: Any) -> str | None:
        """Return the name of the tokenizer of which a script has got `value`, unless that was changed; else None."""
        read = self._read.items() if _is_tokenizer(value) else ()
        return next((name for name, (copy, before) in read if copy is value and _state_of(copy) == before), None)

    def forget(self, name: str) -> None:
        """Keep nothing of an attribute that is set on all ranks."""
        self._read.pop(name, None)

    def warn_of_changes(self) -> None:
        """Log which copies have been changed, each once."""
        for name, (value, before) in list(self._read.items()):
            if _state_of(value) != before:
                self.forget(name)
                log.warning(
                    "pipe.%s was changed, but what is read is a copy of it: the ranks keep theirs until another one is "
                    "set, as in scheduler = pipe.scheduler; ...; pipe.scheduler = scheduler",
                    name,
                )


def _state_of(value: Any) -> bytes:
    return described("state", (_of_tokenizer(value) if _is_tokenizer(value) else vars(value),), {})


def _is_tokenizer(value: Any) -> bool:
    return hasattr(value, "add_tokens")


def _of_tokenizer(tokenizer: Any) -> dict[str, Any]:
    """Return what a script changes of a tokenizer; others of its attributes are notes on its calls."""
    settings = ("model_max_length", "padding_side", "truncation_side", "special_tokens_map", "chat_template")
    return {"tokens": len(tokenizer), **{name: getattr(tokenizer, name, None) for name in settings}}
