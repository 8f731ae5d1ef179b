"""Rows are known by what moves when they are disturbed, whatever has the same length."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from patchpar.errors import UnsupportedModel
from patchpar.shard.transformer.probe.capture import CallArguments
from patchpar.shard.transformer.probe.latent import name_of_latent
from patchpar.shard.transformer.probe.row_trace import MIXED, UNMOVED, trace_rows


def trace(function, x: Tensor, dim: int):
    found = trace_rows(lambda y: {"it": function(y)}, x, dim)
    return found["it"].by_dim if found else None


@pytest.mark.parametrize("rows", [2, 3, 8, 13])
def test_every_row_is_named(rows: int) -> None:
    order = torch.randperm(rows)
    by_dim = trace(lambda x: x[:, order].relu() + 1, torch.rand(2, rows, 4) + 3, 1)
    assert by_dim[1].tolist() == order.tolist()
    assert (by_dim[0] == MIXED).all()
    assert (by_dim[2] == MIXED).all()


def test_other_rows_of_the_same_number_do_not_move() -> None:
    text = torch.randn(2, 6, 4)
    by_dim = trace(lambda x: torch.cat([text, x], 1), torch.randn(2, 6, 4), 1)
    assert by_dim[1].tolist() == [UNMOVED] * 6 + list(range(6))


def test_what_meets_is_mixed() -> None:
    def convolution(x: Tensor) -> Tensor:
        return x + x.roll(1, 1) * torch.tensor([1.0, 1, 1, 0, 0]).view(1, 5, 1)

    assert trace(convolution, torch.randn(1, 5, 4), 1)[1].tolist() == [MIXED] * 3 + [3, 4]


def test_what_is_known_of_the_undisturbed_is_not_observed_again() -> None:
    seen, x = [], torch.rand(1, 4, 2)

    def observe(y: Tensor) -> dict[str, Tensor]:
        seen.append(y)
        return {"it": y.sin()}

    for base in (None, {"it": x.sin()}):
        assert trace_rows(observe, x, 1, base)["it"].by_dim[1].tolist() == [0, 1, 2, 3]
    assert len(seen) == 5 + 4  # four groups of rows each, and once nothing


def test_numbers_stay_in_their_range() -> None:
    """Of positions that a table is looked up at, a group of rows may have one value only."""
    table, positions = torch.randn(2, 4), torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    assert trace(lambda at: table[at], positions, 0)[0].tolist() == list(range(8))


def test_features_are_no_rows() -> None:
    weights = torch.randn(4, 4)
    assert trace(lambda x: x @ weights, torch.randn(1, 5, 4), 2) is None


@pytest.mark.parametrize(
    "x",
    [
        torch.arange(7),
        torch.tensor([0] * 7),
        torch.tensor([True, False, True, True, False, False, False]),
        torch.full((7,), -torch.inf),
        torch.polar(torch.ones(7), torch.arange(7.0)),
    ],
    ids=["numbers", "one number", "truth", "minus infinity", "complex"],
)
def test_any_dtype(x: Tensor) -> None:
    assert trace(lambda y: y.unsqueeze(0), x, 0)[1].tolist() == list(range(7))


def test_rounding_is_no_movement() -> None:
    def another_product(x: Tensor) -> Tensor:
        return torch.cat([x, torch.ones(1, 1, 4) + 1e-7 * x.mean()], 1)

    assert trace(another_product, torch.randn(1, 5, 4), 1)[1].tolist() == [0, 1, 2, 3, 4, UNMOVED]


def test_a_shape_that_depends_on_values() -> None:
    with pytest.raises(UnsupportedModel, match="the shape of it depends on values"):
        trace(lambda x: x[x > 0], torch.randn(5), 0)


class _Denoiser(nn.Module):
    def forward(self, input_ids: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        return encoder_hidden_states


@pytest.mark.parametrize(("shape", "latent"), [((1, 4, 4), "input_ids"), ((1, 16), "encoder_hidden_states")])
def test_ids_of_an_image_are_denoised_and_those_of_text_are_not(shape: tuple[int, ...], latent: str) -> None:
    denoiser = _Denoiser()
    arguments = CallArguments.of(denoiser, (torch.zeros(shape, dtype=torch.long), torch.zeros(1, 8, 4)), {})
    assert name_of_latent(denoiser, arguments) == latent


class _Packed(nn.Module):
    def forward(self, positions: Tensor, video: list[Tensor], text: Tensor) -> Tensor:
        return video[0]


def test_a_table_of_positions_is_not_denoised_where_there_is_a_video() -> None:
    denoiser, positions, text = _Packed(), torch.zeros(3, 20), torch.zeros(1, 8, 4)
    packed = CallArguments.of(denoiser, (positions, [torch.zeros(1, 4, 2, 6, 6)], text), {})
    assert name_of_latent(denoiser, packed) == "video"
    assert name_of_latent(denoiser, CallArguments.of(denoiser, (positions, [], text), {})) == "positions"
