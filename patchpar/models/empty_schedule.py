"""Calls of which `strength` leaves no step. Few pipelines of diffusers notice: elsewhere tensors are empty.

With `denoising_start` no noise is added, so that nothing is empty: a refiner returns the latents that it was given.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from patchpar.errors import PlanError
from patchpar.shard.hooks import HookSet

METHOD = "get_timesteps"  # by which pipelines of diffusers shorten the schedule


@contextmanager
def empty_schedules_refused(pipe: Any, arguments: Mapping[str, Any]) -> Iterator[None]:
    """In the `with` block the pipeline raises PlanError where it would make no step of its schedule.

    How many steps are left of a fraction of one is for each pipeline to say. `arguments`: of its call, for the message.
    """
    shorten = getattr(pipe, METHOD, None)
    if not callable(shorten):
        yield
        return

    def shortened(*args: Any, **kwargs: Any) -> Any:
        found = shorten(*args, **kwargs)
        noisy = kwargs.get("denoising_start") is None
        if noisy and isinstance(found, tuple) and hasattr(found[0], "__len__") and not len(found[0]):
            named = {name: arguments[name] for name in ("strength", "num_inference_steps") if name in arguments}
            given = ", ".join(f"{name}={value}" for name, value in named.items()) or "these arguments"
            raise PlanError(f"{given}: no denoising step is left to make: raise strength, or num_inference_steps")
        return found

    with HookSet() as hooks:
        hooks.replace(pipe, METHOD, shortened)
        yield
