"""A method of the pipeline that fails on a rank may have done half of its work: that is undone, or the caller is told.

of adapters     those that it has added are deleted, and those act that did before; one whose weights have been replaced
                (`hotswap`) cannot be brought back, and the rank is started anew as after any other
any other       if networks or weights are others than before, the rank is started anew, and gets the calls again that
                have succeeded; a rank that is replaced later would be another one than those that stay
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from torch import Tensor, nn

from patchpar.errors import UnsupportedModel
from patchpar.launch.remote_errors import say_changes_left
from patchpar.models.info import networks_of
from patchpar.pipeline.adapter_selection import layer_states, layers_of, restore_layers
from patchpar.pipeline.messages import PartName
from patchpar.pipeline.state_changes import LORA, change_of

SAMPLED = 1024
"""Values of a weight that are compared where it has an adapter, which fusing adds to all of them."""
NONE: Mapping[str, Any] = MappingProxyType({})
T = TypeVar("T")


def done_or_undone(
    pipe: Any, name: str, method: Callable[..., T], args: Sequence[Any] = (), kwargs: Mapping[str, Any] = NONE
) -> T:
    """Return what a method of the pipeline returns. Raises what it raises, after what it has begun is undone.

    And UnsupportedModel for parts that its class does not have.
    """
    args, kwargs = with_parts(pipe, args, kwargs)
    if name == "register_modules":
        _refuse_unknown(pipe, kwargs)
    if name.rpartition(".")[2] in LORA:
        return _of_adapters(pipe, method, args, kwargs)
    if change_of(name, (), {}) is None:
        return method(*args, **kwargs)
    before = tuple(_parts(pipe))
    try:
        return method(*args, **kwargs)
    except Exception as error:
        if tuple(_parts(pipe)) != before:
            say_changes_left(error)
        raise


def with_parts(pipe: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a method with parts of the pipeline instead of their names."""

    def part(value: Any) -> Any:
        return getattr(pipe, value.name) if isinstance(value, PartName) else value

    return [part(each) for each in args], {name: part(each) for name, each in kwargs.items()}


def _refuse_unknown(pipe: Any, parts: Mapping[str, Any]) -> None:
    """Raise UnsupportedModel for parts that the pipeline's class does not have, after which it has no `components`."""
    known = pipe.components
    for name in parts:
        if name not in known:
            kind = type(pipe).__name__
            raise UnsupportedModel(f"{kind} has no part {name} to register: it has {', '.join(sorted(known))}")


def _of_adapters(pipe: Any, method: Callable[..., T], args: Sequence[Any], kwargs: Mapping[str, Any]) -> T:
    """Of a file some networks of a pipeline may have got their part, and those of others may not fit."""
    replaces = kwargs.get("hotswap", True in args[2:3])
    before, known, weights = layer_states(pipe), _names(pipe), _adapter_weights(pipe) if replaces else []
    try:
        return method(*args, **kwargs)
    except Exception as error:
        if replaces and _adapter_weights(pipe) != weights:
            say_changes_left(error)
            raise
        added = _names(pipe) - known
        if added and hasattr(pipe, "delete_adapters"):
            pipe.delete_adapters(sorted(added))
        elif added:
            say_changes_left(error)
        restore_layers(before)
        raise


def _names(pipe: Any) -> frozenset[str]:
    """Return the names of all adapters that networks of the pipeline have."""
    return frozenset(name for each in networks_of(pipe).values() for name in getattr(each, "peft_config", None) or ())


def _adapter_weights(pipe: Any) -> list[tuple[float, ...]]:
    """Return some values of each weight of all adapters."""
    found = (layer.named_parameters() for layer in layers_of(pipe))
    return [_sample(weight) for each in found for name, weight in each if name.startswith("lora_")]


def _parts(pipe: Any) -> Iterator[tuple[int, Any]]:
    """Yield components, modules, weights [any shape] with the number of their writes, and what adapters are in them."""
    yield from ((id(each), name) for name, each in pipe.components.items())
    for network in networks_of(pipe).values():
        for module in network.modules():
            yield id(module), type(module)
            for weight in (*module._parameters.values(), *module._buffers.values()):
                if weight is not None:
                    yield id(weight), None if weight.is_inference() else weight._version
    for layer in layers_of(pipe):
        base = layer.get_base_layer()
        yield id(layer), (*layer.merged_adapters, *map(_sample, (base.weight, getattr(base, "bias", None))))


def _sample(weight: Tensor | None) -> tuple[float, ...]:
    """Return some values of a weight: PEFT writes through `data`, which `_version` does not count."""
    if type(weight) not in (Tensor, nn.Parameter) or weight is None or weight.is_meta:
        return ()  # quantised ones are replaced
    flat = weight.detach().flatten()
    return tuple(flat[:: max(1, flat.numel() // SAMPLED)].tolist())
