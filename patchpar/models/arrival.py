"""What a pipeline needs that has come from another process, where its constructors ran."""

from typing import Any

import transformers
from torch import nn


def settle_in(pipe: Any) -> None:
    """Tell transformers again what its models can record (hidden states): their constructors do so, once per process.

    Without it a text encoder that was unpickled returns no hidden states. Only transformers 5 and later keep this so.
    """
    registry = getattr(getattr(transformers.utils, "output_capturing", None), "_CAN_RECORD_REGISTRY", None)
    if registry is None:
        return
    networks = [part for part in pipe.components.values() if isinstance(part, nn.Module)]
    for module in (module for network in networks for module in network.modules()):
        if isinstance(module, transformers.PreTrainedModel):
            registry[module] = module._can_record_outputs
