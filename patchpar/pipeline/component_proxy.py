"""A proxy for a network of the pipeline, which exists in the workers only.

pipe.vae.enable_tiling()                              runs on all ranks
pipe.transformer.set_attention_backend("flash")       runs on all ranks
pipe.transformer.config.num_layers                    a copy, from rank 0
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from patchpar.errors import UnsupportedModel
from patchpar.models.info import NetworkInfo
from patchpar.pipeline.messages import MethodResult, PartName

ONE_COPY = "each worker holds a whole pipeline on its own device"
NOT_SAVED = "the workers' copies are not meant to be saved; save the pipeline before parallelising it"
NEW_PIPELINE = "it creates another pipeline; create that in this process and pass it to ParallelPipeline(pipe)"
NEW_NETWORK = "it creates another network; create that in this process and set it: pipe.vae = network"
NOT_IN_WORKERS = {
    "to": "pass devices= for the devices and torch_dtype= for the dtype",
    "enable_model_cpu_offload": ONE_COPY,
    "enable_sequential_cpu_offload": ONE_COPY,
    "enable_group_offload": "call it of a network, which acts on all ranks: pipe.transformer.enable_group_offload(...)",
    "reset_device_map": ONE_COPY,
    "save_pretrained": NOT_SAVED,
    "save_lora_weights": NOT_SAVED,
    "push_to_hub": NOT_SAVED,
    "from_pipe": NEW_PIPELINE,
    "from_single_file": NEW_PIPELINE,
    "download": "it fetches a model and needs no ranks; call it on the pipeline's class",
}
HOOKED = "its handle could not remove the hook in the workers: register it before ParallelPipeline(pipe)"
NOT_OF_NETWORKS = {
    "register_forward_hook": HOOKED,
    "register_forward_pre_hook": HOOKED,
    "buffers": "weights do not leave the workers",
    "named_buffers": "weights do not leave the workers",
    "to": "pass devices= for the devices and torch_dtype= for the dtype",
    "cuda": "pass devices= for the devices",
    "cpu": "pass devices= for the devices",
    "save_pretrained": NOT_SAVED,
    "push_to_hub": NOT_SAVED,
    "from_pretrained": NEW_NETWORK,
    "from_single_file": NEW_NETWORK,
    "from_config": NEW_NETWORK,
    "enable_parallelism": "it is parallel already, by the plan",
    "parameters": "weights do not leave the workers",
    "named_parameters": "weights do not leave the workers",
    "modules": "modules do not leave the workers",
    "named_modules": "modules do not leave the workers",
    "children": "modules do not leave the workers",
    "named_children": "modules do not leave the workers",
}
QUESTIONS = ("_repr_", "_ipython_", "_mime")  # prefixes of names that notebooks look up; no pipeline has them
Ask = Callable[..., Any]


def refuse_method(name: str, *, world_size: int) -> None:
    """Raise UnsupportedModel for a method that cannot act on all ranks."""
    if world_size > 1 and name in NOT_IN_WORKERS:
        raise UnsupportedModel(f"{name} is not for several devices: {NOT_IN_WORKERS[name]}")


def refuse_network_method(path: str) -> None:
    """Raise UnsupportedModel for a method of a network, such as "vae.to", that cannot act on all ranks."""
    reason = NOT_OF_NETWORKS.get(path.rsplit(".", 1)[-1])
    if reason is not None:
        raise UnsupportedModel(f"pipe.{path} is not for networks in workers: {reason}")


def refuse_value(path: str, value: Any) -> None:
    """Raise UnsupportedModel for what stands for a network of workers, or is compiled here to call one."""
    if isinstance(value, ComponentProxy):
        raise UnsupportedModel(f"pipe.{path} cannot be {value!r}: set a network that is in this process")
    if hasattr(value, "_torchdynamo_orig_callable") and not hasattr(value, "named_modules"):  # a compiled function
        network = path.partition(".")[0]
        raise UnsupportedModel(
            f"pipe.{path} cannot be what torch.compile has returned, which cannot be sent to workers: compile there, "
            f"as pipe.{network}.compile_repeated_blocks() does on all ranks"
        )


def with_part_names(
    args: Sequence[Any], kwargs: Mapping[str, Any], name_of: Callable[[Any], str | None]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a method with names instead of parts of the pipeline. `name_of`: None for other values.

    Ranks put their own parts there: see `failed_methods.with_parts`.
    """

    def named(value: Any) -> Any:
        name = name_of(value)
        return value if name is None else PartName(name)

    return tuple(map(named, args)), {name: named(each) for name, each in kwargs.items()}


def network_of(value: Any, *owners: Any) -> str | None:
    """Return the name of the network of one of `owners` that a proxy stands for; None for other values."""
    is_own = isinstance(value, ComponentProxy) and getattr(value._apply, "__self__", None) in owners
    return value._name if is_own else None


def on_all_ranks(owner: Any, path: str, apply: Ask) -> Callable[..., Any]:
    """Return a function that runs method `path` on all ranks; it returns `owner` where the method returns self."""

    def broadcast(*args: Any, **kwargs: Any) -> Any:
        returned: MethodResult = apply(path, args, kwargs)
        return owner if returned.itself else returned.value

    broadcast.__name__ = path.rpartition(".")[2]
    return broadcast


class ComponentProxy:
    """A proxy for the network `name`. Methods run on all ranks; attributes are read from rank 0 and set on all."""

    def __init__(self, name: str, network: NetworkInfo, ask: Ask, apply: Ask) -> None:
        for attribute, value in (("_name", name), ("_network", network), ("_ask", ask), ("_apply", apply)):
            object.__setattr__(self, attribute, value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"{self!r} has no attribute {name!r}")
        path = f"{self._name}.{name}"
        if name not in self._network.methods:
            return self._ask("get", path)
        refuse_network_method(path)
        return on_all_ranks(self, path, self._apply)

    def __setattr__(self, name: str, value: Any) -> None:
        path = f"{self._name}.{name}"
        refuse_value(path, value)
        self._ask("set", path, value, replay=path)

    def __call__(self, *_: Any, **__: Any) -> Any:
        """Raise UnsupportedModel: only the pipeline calls its networks."""
        raise UnsupportedModel(f"{self!r} is called by the pipeline only; to call it yourself, load it with diffusers")

    def __reduce__(self) -> str:
        raise TypeError(
            f"{self!r} stands for a network there, and can neither be copied nor sent: pass a network of this process"
        )

    def __dir__(self) -> list[str]:
        return sorted(self._network.methods)

    def __repr__(self) -> str:
        return f"<pipe.{self._name}, a {self._network.kind} in the workers>"
