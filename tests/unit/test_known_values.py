"""Whole numbers that code of a network makes on its device and asks for again are known without values of a network."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from patchpar.models.dry_run.known_values import MOST
from patchpar.models.dry_run.live_bytes import LiveBytes
from patchpar.models.dry_run.meta_mode import META, MetaMode
from patchpar.plan.replay.tape import Operator


def empty(run: Any, device: torch.device = META) -> Any:
    mode = MetaMode(LiveBytes(""))
    with torch.no_grad(), mode.functions(), mode:
        return run(device)


def of_sizes(device: torch.device) -> list[Any]:
    """As HiDream has the rows and columns of each image."""
    sizes = torch.tensor([6, 8], dtype=torch.int64, device=device).reshape(-1).unsqueeze(0).repeat(2, 1)
    x = torch.zeros(2, 50, 3, device=device)
    return [x[0, : rows * columns].reshape(rows, columns, -1).shape for rows, columns in sizes]


def of_masks(device: torch.device) -> list[Any]:
    """As readers of texts have it where each of them ends."""
    lengths = torch.tensor([3, 5], device=device)
    mask = torch.arange(8, device=device)[None] < lengths[:, None]
    x = torch.zeros(2, 8, 4, device=device)
    return [x[mask].shape, mask.sum(dim=1).tolist(), mask.nonzero().tolist(), bool(mask.all()), mask.cpu().tolist()]


def of_copies(device: torch.device) -> list[Any]:
    moved = torch.arange(5).to(device)
    seven, four = moved.new_tensor([7]), torch.as_tensor(4, device=device)
    return [int(moved.max()), moved.flip(0).tolist(), seven.item(), int(four + 1)]


def of_views(device: torch.device) -> list[Any]:
    """What is written to a part is in the whole, and in every other view of it."""
    x = torch.zeros(2, 3, dtype=torch.int64, device=device)
    row = x[1]
    row += 2
    x[:, 0] = torch.tensor([5, 6], device=device)
    row.mul_(torch.tensor(10, device=device))
    return [x.tolist(), row.t().tolist(), x.contiguous()[1, 2].item()]


@pytest.mark.parametrize("run", [of_sizes, of_masks, of_copies, of_views])
def test_answers_are_those_of_a_device_with_values(run: Any) -> None:
    assert empty(run) == run(torch.device("cpu"))


def test_what_is_written_over_by_values_that_are_not_there_is_not_known() -> None:
    def run(device: torch.device) -> list[Any]:
        x = torch.tensor([4, 9], device=device)
        whole, part = x.view(2), x[1:]
        known = x[1].item()
        part.copy_(torch.randn(1, device=device).long())
        return [known, whole.tolist()]

    known, after = empty(run)
    assert known == 9
    assert after == [0, 0]  # made up


def test_random_numbers_and_large_tensors_are_not_known() -> None:
    def run(device: torch.device) -> list[Any]:
        few = torch.full((4,), 9, device=device)
        many = torch.full((MOST + 1,), 9, device=device)
        return [torch.randint_like(few, 100, 200).tolist(), many.tolist()[:1], few.repeat(MOST).tolist()[:1]]

    assert empty(run) == [[0] * 4, [0], [0]]  # made up


def test_values_are_forgotten_with_their_tensors_and_kernels_are_counted() -> None:
    found: list[Operator] = []
    mode = MetaMode(LiveBytes(""), found.append)
    with torch.no_grad(), mode.functions(), mode:
        x = torch.tensor([2, 3], device=META)
        y = x * 2
        assert y.tolist() == [4, 6]
        assert mode.values.by_storage
        assert "mul" in [each.name for each in found]
        del x, y
    assert not mode.values.by_storage


def test_the_form_of_what_a_mask_selects_is_not_that_of_another_mask() -> None:
    """Of the same shape: their values tell."""

    def run(device: torch.device) -> list[Any]:
        x = torch.zeros(4, 2, device=device)
        return [x[torch.tensor(mask)].shape[0] for mask in ([True] * 4, [True, False, True, False])]

    assert empty(run) == [4, 2]


def test_autocast_is_made_of_the_meta_device_only_inside() -> None:
    def run(device: torch.device) -> Any:
        with torch.autocast(device_type=device.type, enabled=False), torch.autocast(device.type, torch.bfloat16):
            return (torch.zeros(2, 2, device=device) @ torch.zeros(2, 2, device=device)).dtype

    assert empty(run) == torch.float32
    with pytest.raises(RuntimeError, match="unsupported"):
        torch.autocast("meta")
    with MetaMode(LiveBytes("")), torch.autocast("cpu", torch.bfloat16):
        assert (torch.zeros(2, 2) @ torch.zeros(2, 2)).dtype == torch.bfloat16
