"""Adapters of one call: all layers have them or none does, and ranks of all guidance branches verify them together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from patchpar.pipeline import adapter_selection
from patchpar.pipeline.adapter_selection import AdapterSelection

ADAPTERS = (("ink", 0.5),)


class Layer:
    """What is used of a layer of PEFT. `fails`: how often its scale cannot be set."""

    def __init__(self, fails: int = 0) -> None:
        self.fails, self.active_adapters, self.scaling = fails, ["snow"], {"ink": 1.0, "snow": 1.0}
        self.disable_adapters, self.merged_adapters = False, list[str]()
        self._disable_adapters = False

    def set_adapter(self, names: list[str]) -> None:
        self.active_adapters = names

    def set_scale(self, name: str, scale: float) -> None:
        if self.fails:
            self.fails -= 1
            raise KeyboardInterrupt
        self.scaling[name] = scale


def choose(selection: AdapterSelection, guidance: Any = None) -> None:
    installed: Any = SimpleNamespace(tensors=[], guidance=guidance)
    encoders: Any = SimpleNamespace(give_back_for=lambda method: None)
    selection.choose(SimpleNamespace(components={}), ADAPTERS, installed, encoders)


def test_what_fails_half_way_is_undone_and_can_be_chosen_again(monkeypatch: pytest.MonkeyPatch) -> None:
    layers, selection = [Layer(), Layer(fails=1)], AdapterSelection()
    monkeypatch.setattr(adapter_selection, "layers_of", lambda pipe: layers)
    with pytest.raises(KeyboardInterrupt):
        choose(selection)
    assert [(layer.active_adapters, layer.scaling["ink"]) for layer in layers] == [(["snow"], 1.0)] * 2
    choose(selection)
    assert [(layer.active_adapters, layer.scaling["ink"]) for layer in layers] == [(["ink"], 0.5)] * 2


@pytest.mark.parametrize(("rounds", "forgets"), [(object(), 1), (None, 0)])
def test_ranks_of_other_branches_take_part_where_they_hold_weights(
    monkeypatch: pytest.MonkeyPatch, rounds: Any, forgets: int
) -> None:
    """The next calls are verified with these adapters, by plain calls that gather weights of all ranks."""
    forgotten = list[int]()
    monkeypatch.setattr(adapter_selection, "layers_of", lambda pipe: [Layer()])
    choose(AdapterSelection(), SimpleNamespace(rounds=rounds, forget=lambda: forgotten.append(1)))
    assert len(forgotten) == forgets
