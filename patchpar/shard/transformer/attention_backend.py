"""The attention kernel that a user has chosen in diffusers, as the local kernel of split attention.

`set_attention_backend("flash")` makes the model call that kernel instead of torch's scaled_dot_product_attention, which
split attention replaces. So while tokens are split the model calls torch's function, and split attention calls the
chosen kernel with own queries and the keys of all ranks.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from torch import Tensor, nn

from patchpar.errors import PatchparError, UnsupportedModel
from patchpar.shard.hooks import HookSet
from patchpar.shard.module_tree import modules_of
from patchpar.shard.transformer.probe.latent import WAY_OUT

CHOICE = "_attention_backend"


class BackendKernel:
    """A backend of diffusers with the signature of scaled_dot_product_attention: [B, N, L, D]."""

    def __init__(self, name: AttentionBackendName) -> None:
        self.name = name
        self._function: Callable[..., Tensor] = _AttentionBackendRegistry._backends[name]
        self._takes = frozenset(inspect.signature(self._function).parameters)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Return the output [B, N, l, D]; options that the backend lacks are dropped if they are None or False."""
        given = {name: option for name, option in options.items() if name in self._takes or _is_given(option)}
        return self._function(*(x.transpose(1, 2) for x in (query, key, value)), **given).transpose(1, 2)


def _is_given(option: Any) -> bool:
    return isinstance(option, Tensor) or option not in (None, False)


class BackendChoice:
    """The backend that the user has chosen for the attention layers of a denoiser.

    A class of layers with a fixed kernel, as AnyFlow FAR's flex attention, keeps it: the user did not choose it.
    """

    def __init__(self, denoiser: nn.Module) -> None:
        self._kind = type(denoiser).__name__
        processors = [getattr(module, "processor", None) for module in modules_of(denoiser)]
        self._all = [each for each in processors if hasattr(each, CHOICE)]

    def _free(self) -> list[Any]:
        """Return the layers whose backend may be chosen."""
        return [
            each
            for each in self._all
            if getattr(each, CHOICE) is None or getattr(each, CHOICE) != getattr(type(each), CHOICE, None)
        ]

    @property
    def kernel(self) -> BackendKernel | None:
        """The chosen kernel; None for torch's function with any backend. Raises UnsupportedModel for several."""
        free = self._free()
        active, _ = _AttentionBackendRegistry.get_active_backend()
        chosen = {AttentionBackendName(name) for name in {getattr(each, CHOICE) for each in free} - {None} or {active}}
        others = [name for name in chosen if not name.value.lstrip("_").startswith("native")]
        if others and len(chosen) > 1:
            raise UnsupportedModel(
                f"attention layers of {self._kind} have different backends ({', '.join(sorted(chosen))}), of which "
                f"all split tokens would take one: set one for all by set_attention_backend(...), or {WAY_OUT}"
            )
        return BackendKernel(others[0]) if others and free else None

    @contextmanager
    def set_aside(self) -> Iterator[BackendKernel | None]:
        """Use torch's function while open, so that it can be replaced. Yields the chosen kernel."""
        kernel = self.kernel
        if kernel is None:
            yield None
            return
        with HookSet() as hooks:
            for each in self._free():
                hooks.replace(each, CHOICE, AttentionBackendName.NATIVE)
            yield kernel


@contextmanager
def needing_torch_attention(denoiser: nn.Module, chosen: BackendKernel | None) -> Iterator[None]:
    """Raise UnsupportedModel for a model that fails while torch's function replaces its kernel `chosen`."""
    try:
        yield
    except (ValueError, TypeError, NotImplementedError) as error:
        if chosen is None or isinstance(error, PatchparError):
            raise
        why = str(error).rstrip(".")
        raise UnsupportedModel(
            f"{type(denoiser).__name__} runs with {chosen.name.value} attention only ({why}), and its tokens can be "
            f"split in torch's scaled_dot_product_attention: {WAY_OUT}"
        ) from error
