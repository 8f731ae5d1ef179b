"""What flags change about a pipeline before its call: `--lora PATH[:scale]` and `--scheduler NAME`."""

import math
import re
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from patchpar.errors import PlanError

ENDING = "Scheduler"
CLASS = re.compile(rf"^class (\w+{ENDING})\(", re.MULTILINE)


class LoraFlag(NamedTuple):
    """A LoRA: a file, a folder or a repository of the hub, and its scale."""

    source: str
    scale: float = 1.0

    @classmethod
    def parse(cls, text: str) -> "LoraFlag":
        """Return the LoRA of `PATH[:scale]`. Raises PlanError for what has no safetensors, or a scale that is none."""
        from patchpar.models.adapters import check_source
        from patchpar.models.files import HUB_NAME, path_of

        source, colon, scale = text.rpartition(":")
        if not colon or path_of(text).exists():
            source, scale = text, "1"
        try:
            found = cls(source, float(scale))
        except ValueError:
            raise PlanError(f"--lora {text}: the scale after the colon is a number, such as {source}:0.8") from None
        if not math.isfinite(found.scale):
            raise PlanError(f"--lora {text}: the scale must be finite")
        if not path_of(source).exists() and not HUB_NAME.fullmatch(source):
            raise PlanError(
                f"--lora {source}: there is no such file or folder, and it is no name of the hub (org/name)"
            )
        check_source("--lora", source, None, None)
        return found


def loras_of(texts: Sequence[str] | None) -> list[LoraFlag]:
    """Return the LoRAs of the flags. Raises PlanError."""
    return [LoraFlag.parse(text) for text in texts or ()]


def scheduler_name(text: str) -> str:
    """Return the name of a scheduler class of diffusers; its ending may be left out. Raises PlanError."""
    from patchpar.models.task import diffusers_folder

    files = diffusers_folder("schedulers").glob("scheduling_*.py")
    known = {name for file in files for name in CLASS.findall(file.read_text(encoding="utf-8"))}
    stem = text.removesuffix(ENDING)
    name = stem + ENDING
    if name not in known:
        stems = {each.removesuffix(ENDING) for each in known}  # the ending alone would make all names near
        near = get_close_matches(stem, stems, n=2, cutoff=0.5)
        way_out = f"use {' or '.join(each + ENDING for each in near)}" if near else "its docs list them"
        raise PlanError(f"--scheduler {text}: diffusers has none of that name; {way_out}")
    return name


def change_pipeline(pipe: Any, lora: Sequence[str] | None, scheduler: str | None) -> None:
    """Load the LoRAs and set the scheduler on all ranks. Raises PlanError, and what diffusers raises for either."""
    from patchpar.models.adapters import load_lora

    found = loras_of(lora)
    names = [f"lora{number}" for number in range(len(found))]
    for name, each in zip(names, found, strict=True):
        load_lora(pipe, each.source, name)
    if found:
        pipe.set_adapters(names, [each.scale for each in found])
    if scheduler is not None:
        pipe.scheduler = _compatible(pipe.scheduler, scheduler_name(scheduler))


def _compatible(now: Any, name: str) -> Any:
    """Return a scheduler of that class with the settings of the pipeline's own. Raises PlanError for another family."""
    import diffusers

    kind = getattr(diffusers, name)
    usable = [type(now), *now.compatibles]
    if kind not in usable:
        names = ", ".join(sorted({each.__name__ for each in usable}))
        raise PlanError(f"--scheduler {name}: this model is for schedulers of another kind: use one of {names}")
    return kind.from_config(now.config)


def check_prompts(prompts: Sequence[str]) -> None:
    """Raise PlanError for one of several prompts that is a file: what a shell has made of a flag's pattern."""
    for each in prompts if len(prompts) > 1 else ():
        if Path(each).suffix and _is_file(each):
            raise PlanError(
                f"prompt {each!r} is a file here: a flag takes one value, so name it before each, as in --lora A "
                "--lora B; and give a prompt in quotes"
            )


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):  # what can be no path
        return False
