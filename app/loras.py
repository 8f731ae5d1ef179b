"""LoRAs of a request: loaded on all ranks for its call; the next call has its own, or none."""

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from patchpar import PlanError
from patchpar.models.adapters import SUFFIX, check_source
from patchpar.plan.scalars import is_number
from patchpar.serving.lora_registry import METHOD, RegisteredLora

MAX_LORAS = 3  # of a request
MAX_WEIGHT = 2.0  # of the sliders
UNKNOWN = (("", "", 0),)  # as long as some may have been loaded and others not
Loaded = tuple[tuple[str, str, int], ...]


def loras_of(values: Sequence[Any]) -> tuple[RegisteredLora, ...]:
    """The LoRAs that fields describe: in turn a file, folder or hub name, and its weight. Empty ones are left out.

    Raises PlanError for what is none of these, for a pickle, and for a weight that is no number.
    """
    pairs = [((source or "").strip(), weight) for source, weight in zip(values[::2], values[1::2], strict=True)]
    return tuple(_lora(number, *pair) for number, pair in enumerate(pairs, 1) if pair[0])


def text_of(loras: Sequence[RegisteredLora]) -> str:
    """Their names and weights. A file goes by its name, not by its path."""
    return ", ".join(f"{Path(lora.source).name}:{lora.scale:g}" for lora in loras)


class LoadedLoras:
    """Which LoRAs each open pipeline has loaded: those of its last call."""

    def __init__(self) -> None:
        self._last: WeakKeyDictionary[Any, Loaded] = WeakKeyDictionary()

    def prepare(self, pipe: Any, wanted: Sequence[RegisteredLora]) -> None:
        """Let these act in the next call, and no others. Raises PlanError, after which none is loaded."""
        files = tuple((lora.name, lora.source, _modified(lora.source)) for lora in wanted)
        if files != self._last.get(pipe, ()):
            self._unload(pipe)
            self._last[pipe] = UNKNOWN
            try:
                for lora in wanted:
                    lora.load_into(pipe)
            except BaseException:
                with suppress(Exception):  # the next call unloads again
                    self._unload(pipe)
                raise
            self._last[pipe] = files
        if wanted:
            pipe.set_adapters([lora.name for lora in wanted], [lora.scale for lora in wanted])
            pipe.enable_lora()  # `load_into` has disabled them

    def _unload(self, pipe: Any) -> None:
        if self._last.get(pipe, ()):
            if METHOD in pipe.description.methods:
                pipe.unload_lora_weights()
            self._last[pipe] = ()


def _lora(number: int, source: str, weight: Any) -> RegisteredLora:
    if not is_number(weight):
        raise PlanError(f"LoRA {source}: weight {weight!r}: it is a number, such as 0.8")
    check_source("LoRA", source, None, None)
    stem = re.sub(r"[^A-Za-z0-9_-]", "-", Path(source).stem)
    return RegisteredLora(name=f"{number}-{stem}"[:64], source=source, scale=float(weight))


def _modified(source: str) -> int:
    """When a file, or one of a folder, was written last, in nanoseconds; 0 for a hub name. It is loaded again then."""
    path = Path(source).expanduser()
    files = path.glob(f"*{SUFFIX}") if path.is_dir() else [path]
    return max((file.stat().st_mtime_ns for file in files if file.exists()), default=0)
