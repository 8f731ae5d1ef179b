"""Comparisons of a split network with the plain one are made without TF32, which GPUs use for convolutions in fp32."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from patchpar.shard.precision import full_precision, rounded_products
from patchpar.shard.verification import ROUNDED_PRODUCTS, TOLERANCE, rounding_limit

CONVOLUTIONS, MATRICES = torch.backends.cudnn, torch.backends.cuda.matmul
ON_GPU = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32)


@pytest.fixture(autouse=True)
def as_they_were() -> Iterator[None]:
    before = CONVOLUTIONS.allow_tf32, MATRICES.allow_tf32
    yield
    CONVOLUTIONS.allow_tf32, MATRICES.allow_tf32 = before


@pytest.mark.parametrize("matrices", [False, True])
def test_it_is_off_within_and_as_before_afterwards(matrices: bool) -> None:
    CONVOLUTIONS.allow_tf32, MATRICES.allow_tf32 = True, matrices

    def breaks() -> None:
        with full_precision():
            raise RuntimeError(f"{CONVOLUTIONS.allow_tf32} {MATRICES.allow_tf32}")

    with pytest.raises(RuntimeError, match="False False"):
        breaks()
    assert (CONVOLUTIONS.allow_tf32, MATRICES.allow_tf32) == (True, matrices)


def test_a_thread_that_ends_leaves_it_to_another_one() -> None:
    """Ranks that are threads of a process verify at the same time, and end in any order."""
    CONVOLUTIONS.allow_tf32 = True
    first, second = full_precision(), full_precision()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not CONVOLUTIONS.allow_tf32
    second.__exit__(None, None, None)
    assert CONVOLUTIONS.allow_tf32


@pytest.mark.skipif(not hasattr(MATRICES, "fp32_precision"), reason="torch before 2.9 has the old switches only")
def test_switches_of_newer_programs() -> None:
    """torch refuses to read the old switch of matrices then."""
    MATRICES.fp32_precision = "tf32"
    try:
        with pytest.raises(RuntimeError):
            _ = MATRICES.allow_tf32
        with full_precision():
            assert MATRICES.fp32_precision == "ieee"
        assert MATRICES.fp32_precision == "tf32"
    finally:
        MATRICES.fp32_precision = "none"


def test_the_limit_is_wider_only_where_products_are_rounded() -> None:
    """Of outputs on a GPU in fp32, outside `full_precision`. The control: on a CPU nothing changes."""
    CONVOLUTIONS.allow_tf32 = True
    assert rounded_products(ON_GPU) == "tf32"
    assert rounding_limit([ON_GPU]) == ROUNDED_PRODUCTS["tf32"]
    with full_precision():
        assert rounding_limit([ON_GPU]) == TOLERANCE[torch.float32]
    assert rounding_limit([torch.zeros(2)]) == TOLERANCE[torch.float32]
    with mock.patch.object(ON_GPU, "dtype", torch.float16):
        assert rounding_limit([ON_GPU]) == TOLERANCE[torch.float16]


@pytest.mark.skipif(not hasattr(torch.backends.mkldnn, "matmul"), reason="torch before 2.9 has no such switch")
@pytest.mark.parametrize("name", ["matmul", "conv"])
def test_products_of_cpus_that_a_program_allows_to_be_rounded(name: str) -> None:
    owner, x = getattr(torch.backends.mkldnn, name), torch.zeros(1)
    before = owner.fp32_precision
    assert rounded_products(x) == ""
    owner.fp32_precision = "bf16"
    try:
        assert rounded_products(x) == "bf16"
        assert not rounded_products(x.double())
        assert rounding_limit([x]) == ROUNDED_PRODUCTS["bf16"]
        with full_precision():
            assert owner.fp32_precision == "ieee"
            assert not rounded_products(x)
        assert owner.fp32_precision == "bf16"
    finally:
        owner.fp32_precision = before


def test_the_old_switch_of_matrices_can_be_read_afterwards() -> None:
    torch.set_float32_matmul_precision("medium")
    try:
        assert rounded_products(torch.zeros(1)) == "bf16"
        with full_precision():
            assert rounded_products(torch.zeros(1)) == ""
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "medium"
        assert MATRICES.allow_tf32
    finally:
        torch.set_float32_matmul_precision("highest")
