"""What VAEs decode in a call of one rank, so that ranks that split them learn from it alone what a first call shows."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, update_wrapper
from typing import Any

from torch import Tensor, nn

from patchpar.pipeline.planner.block_forms import PLAIN
from patchpar.pipeline.planner.call_log import MetaForm
from patchpar.shard.hooks import HookSet


@dataclass(frozen=True, slots=True)
class Decoding:
    """A call of a VAE with a latent of this form, and arguments that are texts and numbers."""

    vae: nn.Module
    latent: MetaForm
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def again(self) -> None:
        """Decode such a latent, without values."""
        decode: Any = self.vae.decode
        decode(self.latent.empty(), *self.args, **self.kwargs)


def note_decodings(hooks: HookSet, networks: Mapping[str, nn.Module]) -> list[Decoding | None]:
    """Return a list that gets what VAEs decode until `hooks` are removed; None for calls with other arguments."""
    found: list[Decoding | None] = []
    for network in networks.values():
        decode = getattr(network, "decode", None)
        if callable(decode) and callable(getattr(network, "encode", None)):
            hooks.replace(network, "decode", update_wrapper(partial(_noted, found, network, decode), decode))
    return found


def _noted(found: list[Decoding | None], vae: nn.Module, decode: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    found.append(_decoding(vae, args, kwargs))
    return decode(*args, **kwargs)


def _decoding(vae: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Decoding | None:
    if not args or type(args[0]) is not Tensor or not args[0].is_meta:
        return None
    if not all(type(each) in PLAIN for each in (*args[1:], *kwargs.values())):
        return None
    return Decoding(vae, MetaForm.of(args[0]), args[1:], dict(kwargs))
