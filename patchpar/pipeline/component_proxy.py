"""A proxy for a network of the pipeline, which exists in the workers only.

pipe.vae.enable_tiling()                              runs on all ranks
pipe.transformer.set_attention_backend("flash")       runs on all ranks
pipe.transformer.config.num_layers                    a copy, from rank 0
"""

from collections.abc import Callable
from typing import Any

from patchpar.errors import UnsupportedModel
from patchpar.models.info import NetworkInfo
from patchpar.pipeline.attributes import refuse_network_method
from patchpar.pipeline.messages import MethodResult

Ask = Callable[..., Any]


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
        self._ask("set", path, value, replay=path)

    def __call__(self, *_: Any, **__: Any) -> Any:
        """Raise UnsupportedModel: only the pipeline calls its networks."""
        raise UnsupportedModel(f"{self!r} is called by the pipeline only; to call it yourself, load it with diffusers")

    def __dir__(self) -> list[str]:
        return sorted(self._network.methods)

    def __repr__(self) -> str:
        return f"<pipe.{self._name}, a {self._network.kind} in the workers>"
