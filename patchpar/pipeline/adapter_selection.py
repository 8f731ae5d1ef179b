"""Which of the loaded adapters act in a call, set on this rank alone; afterwards they are as `set_adapters` left them.

Nothing is loaded or verified anew: a denoiser that comes back to adapters it has had is known again, see
`shard.denoiser`. PEFT's layers are set one by one, since `set_adapters` of a pipeline does not touch networks that
have none of the adapters.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from patchpar.errors import PlanError
from patchpar.models.info import networks_of
from patchpar.pipeline.call_placement import Adapters
from patchpar.pipeline.encoder_placement import EncoderPlacement
from patchpar.pipeline.installed_plan import InstalledPlan

SETS = "set_adapters"
"""The method of pipelines that this stands for."""


@dataclass(frozen=True, slots=True)
class LayerState:
    """What of a layer is as `set_adapters` has left it."""

    layer: Any
    active: tuple[str, ...]
    is_disabled: bool
    scaling: Mapping[str, float]


class AdapterSelection:
    """The adapters of one rank's pipeline. At first, and after `leave`, those that act are the pipeline's own."""

    def __init__(self) -> None:
        self.chosen: Adapters | None = None
        self._before: list[LayerState] = []

    def choose(
        self, pipe: Any, adapters: Adapters | None, installed: InstalledPlan, encoders: EncoderPlacement
    ) -> None:
        """Let these adapters act, and no others; None is the pipeline's own selection.

        Collective where features or encoders are divided. Raises PlanError for one that is not loaded, and where
        adapters are fused into the weights.
        """
        if adapters == self.chosen:
            return
        encoders.give_back_for(SETS)
        if installed.tensors:
            installed.forget(SETS)
        if installed.guidance is not None and installed.guidance.rounds is not None:
            installed.guidance.forget()  # calls are verified again, which ranks of other branches take part in
        self.leave()
        if adapters is None:
            return
        layers = list(layers_of(pipe))
        _check(layers, adapters)
        self._before = [_state_of(layer) for layer in layers]
        try:
            for layer in layers:
                _let_act(layer, adapters)
        except BaseException:  # such as ctrl-C: some layers would have them, and the next call would not set them again
            self.leave()
            raise
        self.chosen = adapters

    def leave(self) -> None:
        """Let those adapters act that did before `choose`. Idempotent."""
        before, self._before, self.chosen = self._before, [], None
        restore_layers(before)


def layer_states(pipe: Any) -> list[LayerState]:
    """Return how the layers with adapters are, of all networks."""
    return [_state_of(layer) for layer in layers_of(pipe)]


def restore_layers(states: Iterable[LayerState]) -> None:
    """Let layers be as they were at `layer_states`."""
    for state in states:
        state.layer.set_adapter(list(state.active))
        state.layer._disable_adapters = state.is_disabled
        state.layer.scaling.update(state.scaling)


def _let_act(layer: Any, adapters: Adapters) -> None:
    layer.set_adapter([name for name, _ in adapters if name in layer.scaling])
    layer._disable_adapters = False  # `enable_adapters` would select again
    for name, scale in adapters:
        layer.set_scale(name, scale)


def layers_of(pipe: Any) -> Iterator[Any]:
    """Yield the layers of all networks that have adapters, without importing PEFT where none can be loaded."""
    networks = networks_of(pipe).values()
    if any(getattr(each, "peft_config", None) for each in networks):
        from peft.tuners.lora import LoraLayer

        yield from (module for each in networks for module in each.modules() if isinstance(module, LoraLayer))


def _check(layers: list[Any], adapters: Adapters) -> None:
    known = {name for layer in layers for name in layer.scaling}
    missing = [name for name, _ in adapters if name not in known]
    if missing:
        raise PlanError(
            f"adapters: {missing[0]!r} is not loaded; there are {', '.join(sorted(known)) or 'none'}: load it with "
            "load_lora_weights(..., adapter_name=...)"
        )
    if any(layer.merged_adapters for layer in layers):
        raise PlanError("adapters of a call: fuse_lora() has put some into the weights: call unfuse_lora() first")


def _state_of(layer: Any) -> LayerState:
    return LayerState(layer, tuple(layer.active_adapters), layer.disable_adapters, dict(layer.scaling))
