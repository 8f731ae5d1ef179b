"""Copies of parts of a pipeline that a script has read, such as `pipe.scheduler`: what it does to them reaches no rank.

In diffusers it would act on the pipeline, so that it is said, before the next call.
"""

import logging
from collections.abc import Mapping
from typing import Any

from patchpar.launch.argument_mismatch import described

log = logging.getLogger(__name__)


class LentCopies:
    """The latest copy of each part that has a `config` (schedulers, processors of images), and how it was."""

    def __init__(self) -> None:
        self._lent: dict[str, tuple[Any, bytes]] = {}

    def note(self, name: str, value: Any) -> None:
        """Keep the copy of an attribute that a script gets."""
        if isinstance(getattr(value, "config", None), Mapping):
            self._lent[name] = value, _state_of(value)

    def forget(self, name: str) -> None:
        """Keep nothing of an attribute that is set on all ranks."""
        self._lent.pop(name, None)

    def warn_of_changes(self) -> None:
        """Log which copies have been changed, each once."""
        for name, (value, before) in list(self._lent.items()):
            if _state_of(value) != before:
                self.forget(name)
                log.warning(
                    "pipe.%s was changed, but what is read is a copy of it: the ranks keep theirs until another one is "
                    "set, as in scheduler = pipe.scheduler; ...; pipe.scheduler = scheduler",
                    name,
                )


def _state_of(value: Any) -> bytes:
    return described("state", (vars(value),), {})
