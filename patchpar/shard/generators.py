"""Random generators among the arguments of a call. Does not import torch, so that callers need not either."""

from collections.abc import Mapping, Sequence
from typing import Any

from patchpar.errors import PlanError
from patchpar.plan.scalars import is_whole

SAMPLE_ON_CPU = "let the CPU sample it, generator=torch.Generator().manual_seed(...), or use equal GPUs"
"""What to do where GPUs of different kinds would sample different noise."""


def generators_of(kwargs: Mapping[str, Any], args: Sequence[Any] = ()) -> list[Any]:
    """Return every torch.Generator among the arguments, in order, also those in lists."""
    lists = (value if isinstance(value, (list, tuple)) else [value] for value in (*args, *kwargs.values()))
    return [item for each in lists for item in each if _is_generator(item)]


def check_generator(value: Any) -> None:
    """Raise PlanError for what diffusers cannot sample noise with."""
    given = value if isinstance(value, list) else [value]
    if not all(each is None or _is_generator(each) for each in given):
        seed = value if is_whole(value, 0) else 0
        raise PlanError(
            f"generator={value!r:.80}: give a torch.Generator, as torch.Generator().manual_seed({seed}), or a list of "
            "them, one for each image"
        )


def refuse_shared(generators: Sequence[Any], parts: Sequence[slice]) -> None:
    """Raise PlanError for a generator that is in several of these parts of a list, each of which a rank samples from.

    What it gives the second one comes after what it has given the first one, which is on another rank.
    """
    of_parts = [{*map(id, generators[part])} for part in parts]
    for number, generator in enumerate(generators):
        if sum(id(generator) in each for each in of_parts) > 1:
            raise PlanError(
                f"generator {number + 1} of {len(generators)} is the same one as that of another prompt, which is on "
                "another rank, so that data ranks would give other images: give each prompt a generator of its own, "
                "one generator for all prompts and not a list, or use data=1"
            )


def _is_generator(value: Any) -> bool:
    return type(value).__module__.startswith("torch") and type(value).__name__ == "Generator"
