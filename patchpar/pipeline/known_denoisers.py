"""What plans have found out about the denoisers of a pipeline on one rank, so that the next plan need not find it."""

from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from patchpar.shard.denoiser import SharedDenoiser
from patchpar.shard.watched_network import NetworkRecord

States = tuple[tuple[NetworkRecord, Any], ...]


class KnownDenoisers:
    """By network. Ranks that go on without a lost one, or with others than before, install their plan at once."""

    def __init__(self) -> None:
        self._states: WeakKeyDictionary[nn.Module, States] = WeakKeyDictionary()

    def keep(self, patched: Iterable[object]) -> None:
        """Keep what is known of these denoisers, whose plan is removed."""
        for each in patched:
            if isinstance(each, SharedDenoiser) and each.known_states:
                self._states[each.denoiser] = each.known_states

    def pass_on(self, to: SharedDenoiser, *, alone: bool) -> None:
        """Let the same denoiser with another plan know it, where a rank that does not can search it `alone`."""
        if alone:
            to.know(self._states.get(to.denoiser, ()))

    def forget(self) -> None:
        """Keep nothing, since networks may change now."""
        self._states.clear()
