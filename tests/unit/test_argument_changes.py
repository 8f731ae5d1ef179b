"""Calls that write to their arguments: they matter where a later call reads what was written."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from patchpar.shard.argument_changes import ArgumentChanges


def matters(changes: ArgumentChanges, sample: Any, call: Any, write: Any) -> bool:
    changes.begin(call)
    write()
    return changes.matter(sample, call)


def test_copies_for_one_call_do_not_matter() -> None:
    changes, whole = ArgumentChanges(), torch.zeros(4)
    for _ in range(3):
        sample, residual = torch.ones(4), whole.clone()
        assert not matters(changes, sample, ((sample,), {"residual": residual}), lambda x=residual: x.add_(1))


@pytest.mark.parametrize("part", [slice(None), slice(2, 4)])
def test_memory_that_is_given_again_matters(part: slice) -> None:
    changes, kept = ArgumentChanges(), torch.zeros(4)
    sample = torch.ones(2)
    assert not matters(changes, sample, ((sample, kept[:2]), {}), lambda: kept[:2].add_(1))
    assert matters(changes, sample, ((sample, kept[part]), {}), lambda: None)


def test_a_sample_that_is_written_to_matters() -> None:
    sample = torch.ones(2)
    assert matters(ArgumentChanges(), sample, ((sample,), {}), lambda: sample.add_(1))


def test_objects_that_hold_tensors_matter() -> None:
    sample, cache = torch.ones(2), SimpleNamespace(keys=torch.zeros(2))
    assert matters(ArgumentChanges(), sample, ((sample,), {"cache": cache}), lambda: cache.keys.add_(1))
    assert not matters(ArgumentChanges(), sample, ((sample,), {"cache": cache}), lambda: None)
