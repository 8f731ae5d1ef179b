"""Blocks of a list that do the same are recorded twice; what they noted is noted again for the others.

Blocks of a list are of one kind if their modules, the forms of their weights, all their numbers and texts, their hooks
and the forms of their arguments are equal. If then two of them have noted the same, but for the path of each, and have
changed nothing but what they return, the next ones are not run: their events are noted, and such results made.
"""

from collections.abc import Iterator, Mapping
from functools import partial, update_wrapper
from typing import Any
from weakref import ref

from torch import Tensor, nn

from patchpar.pipeline.planner.block_events import Block, Kind, NotedBlocks
from patchpar.pipeline.planner.block_forms import argument_form, block_form, hooks_form
from patchpar.pipeline.planner.call_log import CallLog, LoggedBytes, LoggedTape
from patchpar.shard.hooks import HookSet
from patchpar.shard.module_tree import named_modules_of

FEWEST = 4
"""Blocks of a list in which some may be left out."""


class RepeatedBlocks(NotedBlocks):
    """Notes blocks of networks again on a tape and memory. `forms`: of blocks, which many recordings may share."""

    def __init__(
        self, log: CallLog, tape: LoggedTape, memory: LoggedBytes, forms: dict[nn.Module, tuple[Any, ...]]
    ) -> None:
        super().__init__(log, tape, memory)
        self._forms, self._kinds, self._call = forms, dict[Any, Kind](), 0

    def install(self, hooks: HookSet, networks: Mapping[str, nn.Module]) -> None:
        """Let blocks that do the same be noted again, until `hooks` are removed."""
        for network in networks.values():
            for path, blocks in _lists(network):
                for name, module in blocks.named_children():
                    if module not in self._forms:
                        self._forms[module] = block_form(module)
                    block = Block(f"{path}.{name}", module, (blocks, self._forms[module]), module.forward)
                    hooks.replace(module, "forward", update_wrapper(partial(self._run, block), module.forward))

    def _run(self, block: Block, *args: Any, **kwargs: Any) -> Any:
        """Replaces the forward of a block."""
        if self._call != self._log.calls:  # a first call may do more than a next one
            self._call = self._log.calls
            self._kinds.clear()
        tensors: list[ref[Tensor]] = []
        try:
            form = argument_form((args, kwargs), {}, tensors)
        except TypeError:
            return block.forward(*args, **kwargs)
        kind = self._kinds.setdefault((block.form, hooks_form(block.module), form), Kind())
        return self._as_kind(kind, block, args, kwargs, form, tensors)


def _lists(network: nn.Module) -> Iterator[tuple[str, nn.ModuleList]]:
    """Yield the lists of so many blocks that some may be left out."""
    for path, module in named_modules_of(network):
        if type(module) is nn.ModuleList and len(module) >= FEWEST:
            yield path, module
