"""Before a method of the pipeline runs, weights whose values it may need are made whole; refused where they do not fit.

Adapters are put beside weights that are in shards or hosted, since most read none. Some are initialised from the
weights beside them, and change these: PiSSA (arXiv:2404.02948), OLoRA, CorDA, LoftQ, by `init_lora_weights` of PEFT's
LoraConfig, which a file of an adapter may have among its metadata.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from patchpar.errors import PlanError
from patchpar.pipeline.held_weights import HeldWeights
from patchpar.pipeline.installed_plan import InstalledPlan

READ_NO_WEIGHT = (None, True, False, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that take nothing from the weights beside an adapter."""
OPTION = "init_lora_weights"
NOT_OF_FILES = ("adapter_name", "hotswap", "low_cpu_mem_usage")  # arguments of load_lora_weights


def make_whole_for(
    pipe: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], installed: InstalledPlan, held: HeldWeights
) -> None:
    """Discard what is known of the modules that a method may change, and make weights whole if it needs their values.

    Collective. Raises PlanError, with its name and the way out, where they do not fit a device.
    """
    is_divided = installed.weights is not None or held.is_divided
    how = initialised_from_weights(pipe, name, args, kwargs) if is_divided else ""
    method = "" if how else name  # "" may need all
    try:
        installed.forget(method)
        held.give_back_for(method)
    except PlanError as error:
        if not how:
            raise PlanError(f"{name}() may read or change any weight: {error}") from error
        raise PlanError(
            f"{name}() initialises an adapter from the weights beside it ({OPTION}={how!r}): {error}; or load a plain "
            "LoRA, into which PEFT converts such an adapter (path_initial_model_for_weight_conversion)"
        ) from error


def initialised_from_weights(pipe: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return how a method initialises adapters, if that takes the weights beside them; else an empty text."""
    if name != "load_lora_weights":
        return ""
    options = {key: value for key, value in kwargs.items() if key not in NOT_OF_FILES}
    source = [dict(each) if isinstance(each, Mapping) else each for each in args[:1]]  # it may take entries out
    read = pipe.lora_state_dict(*source, **options, return_lora_metadata=True)
    metadata = read[-1] if isinstance(read, tuple) else None
    found = (value for key, value in (metadata or {}).items() if key.rpartition(".")[2] == OPTION)
    return next((str(value) for value in found if value not in READ_NO_WEIGHT), "")
