"""Encoders that were recorded twice with the same texts are noted again in recordings of other ranks and plans.

Where every rank holds whole encoders, none knows of the others: each has the events of the first, to the byte.
"""

from collections.abc import Mapping
from functools import partial, update_wrapper
from typing import Any
from weakref import ref

from torch import Tensor, nn

from patchpar.pipeline.planner.block_events import Block, Kind, NotedBlocks
from patchpar.pipeline.planner.block_forms import argument_form, hooks_form
from patchpar.pipeline.planner.call_log import CallLog, LoggedBytes, LoggedTape
from patchpar.shard.hooks import HookSet

KnownEncoders = dict[Any, Kind]
"""What encoders have noted, by network, hooks and arguments."""


class RepeatedEncoders(NotedBlocks):
    """Notes encoders again on a tape and memory. `known`: what they have noted, which many recordings may share."""

    by_value = True

    def __init__(self, log: CallLog, tape: LoggedTape, memory: LoggedBytes, known: KnownEncoders) -> None:
        super().__init__(log, tape, memory)
        self._known = known

    def install(self, hooks: HookSet, encoders: Mapping[str, nn.Module]) -> None:
        """Let encoders that do the same as before be noted again, until `hooks` are removed."""
        for name, module in encoders.items():
            block = Block(name, module, (), module.forward)
            hooks.replace(module, "forward", update_wrapper(partial(self._run, block), module.forward))

    def _run(self, block: Block, *args: Any, **kwargs: Any) -> Any:
        """Replaces the forward of an encoder."""
        tensors: list[ref[Tensor]] = []
        try:
            form = argument_form((args, kwargs), {}, tensors, by_value=self.by_value)
        except TypeError:
            return block.forward(*args, **kwargs)
        kind = self._known.setdefault((block.module, hooks_form(block.module), form), Kind())
        return self._as_kind(kind, block, args, kwargs, form, tensors)
