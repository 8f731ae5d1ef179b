"""What holds for every fused kernel: one launch for an operator, it compiles for GPUs, its fake kernel is true."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from patchpar.comm.kernels import fused_op, pack_tensors
from patchpar.shard.kernels import (
    concat_halo,
    correct_matrices,
    correct_tokens,
    fit_matrices,
    fit_tokens,
    group_moments,
    group_norm,
    merge_partials,
    pack_tokens,
    quantize_delta,
    write_tokens,
)
from tests.breadth import first_of
from tests.kernels.conftest import ARCHITECTURES


class Case(NamedTuple):
    """One operator: its name, public function, launcher, and arguments for a dtype."""

    name: str
    function: Callable[..., Any]
    launch: Callable[..., Any]
    args: Callable[[torch.dtype], tuple[Any, ...]]


def operators_on_a_gpu(case: Case, dtype: torch.dtype) -> list[str]:
    """The operators that the public function runs for tensors of a fake GPU."""
    with FakeTensorMode() as mode:
        args = tree_map(lambda x: on_gpu(mode, x) if isinstance(x, Tensor) else x, case.args(dtype))
        with Calls() as calls:
            case.function(*args)
    return calls.names


def on_gpu(mode: FakeTensorMode, x: Tensor) -> Tensor:
    return FakeTensor(mode, x.to("meta"), torch.device("cuda", 0))


def local_tokens(dtype: torch.dtype) -> tuple[Any, ...]:
    tokens = torch.randn(2, 2, 9, 3, 40).to(dtype)
    buffer = torch.randn(30, 2, 2, 3, 40).to(dtype)
    return (buffer, *tokens, 4, 2, buffer[:7].clone())


def samples(dtype: torch.dtype) -> tuple[Any, ...]:
    own = torch.randn(33, 4, 3, 40).to(dtype)
    last, before = ((own.float().mean(0) + number, own[::3] + number) for number in (1, 2))
    return (fit_tokens.empty_fit(own), own, *last, *before, None, torch.tensor(0.5), 3)


def kept_tokens(dtype: torch.dtype) -> tuple[Any, ...]:
    own = torch.randn(33, 4, 3, 40).to(dtype)
    last, before = ((own.float().mean(0) + number, own + number) for number in (1, 2))
    return (fit_tokens.empty_fit(own), own, *last, *before, torch.rand(4, 3), torch.tensor(0.5), 3)


def kept_samples(dtype: torch.dtype) -> tuple[Any, ...]:
    _, *given, _, _, stride = samples(dtype)
    return (*given, stride, True)


def own_tokens(dtype: torch.dtype) -> tuple[Any, ...]:
    last, before = torch.randn(2, 33, 4, 3, 40).to(dtype)
    return (torch.empty_like(last), last, before, torch.rand(4, 3), torch.tensor(0.5))


def stale_tokens(dtype: torch.dtype) -> tuple[Any, ...]:
    newest, runs = torch.randn(12, 4, 3, 40).to(dtype), [correct_tokens.RunOfRanks(1, 2, 6, 3, 0, 0)]
    fits, table = torch.randn(3, 4, 3, 81).to(dtype), correct_tokens.table_of(runs)
    return (torch.randn(20, 4, 3, 40).to(dtype), newest, newest + 1, fits, torch.tensor(0.5), table, list(runs[0]))


def centred_tokens(dtype: torch.dtype) -> tuple[Any, ...]:
    _, own, *past, along, ratio, _ = kept_tokens(dtype)
    return (own, *past, along, ratio)


def tokens_for_matrices(dtype: torch.dtype) -> tuple[Any, ...]:
    attended, newest, previous, _, *rest = stale_tokens(dtype)
    return (attended, newest, previous, torch.randn(3, 4, 3, 1 + 40 * 41).to(dtype), *rest)


def averaged_tokens(dtype: torch.dtype) -> tuple[Any, ...]:
    """Of a grid with six columns: windows of 2 x 2, to two ranks."""
    own, windows = torch.randn(24, 2, 3, 40).to(dtype), [pack_tokens.Window(2 * at, 2, 2, 6, 1) for at in range(3)]
    runs = pack_tokens.run_numbers([pack_tokens.WindowRun(0, 3, ((0, 300), (600, 900)))])
    numbers = torch.tensor(windows, dtype=torch.int32), torch.tensor([runs], dtype=torch.int32)
    return (torch.zeros(20_000, dtype=torch.uint8), own, None, *numbers, runs, 2, 16)


def quantised_tokens(dtype: torch.dtype) -> tuple[Any, ...]:
    buffer, own, _, *numbers, _ = averaged_tokens(dtype)
    return (buffer, own, torch.randn(3, 2, 3, 40).to(dtype), *numbers, 4)


def changed_tokens(dtype: torch.dtype) -> tuple[Any, ...]:
    copy = torch.randn(13, 2, 3, 41).to(dtype)
    return (copy, copy + 0.1 * torch.randn_like(copy), 4)


def quantised_change(dtype: torch.dtype) -> tuple[Any, ...]:
    copy, x, bits = changed_tokens(dtype)
    parts = [quantize_delta.quantize_delta(copy[a:b].clone(), x[a:b], bits) for a, b in ((0, 4), (6, 13))]
    levels, scales = zip(*parts, strict=True)
    return (copy, list(levels), list(scales), [0, 6], bits)


def norm_args(dtype: torch.dtype) -> tuple[Any, ...]:
    wide, weight = group_moments.empty_moments(torch.empty(0, dtype=dtype), 1).dtype, torch.randn(40).to(dtype)
    moments = torch.rand(3, 1 + 2 * 2 * 4, dtype=wide) + 1
    return (torch.randn(2, 40, 4, 8).to(dtype), moments, 4, 1e-5, weight, weight, moments.select(0, 1), 0.3, True)


def received_moments(dtype: torch.dtype) -> tuple[Any, ...]:
    x, moments, *options = norm_args(dtype)[:6]
    return (x, moments.view(-1), *options, None, 0.0, False, (0, 34))


def halo_args(dtype: torch.dtype) -> tuple[Any, ...]:
    x, rows = torch.randn(2, 8, 4, 6).to(dtype), torch.randn(2, 8, 1, 6).to(dtype)
    wide = group_moments.empty_moments(x, 1).dtype
    return (x, rows, None, 1, 2, -2, torch.randn(3, 16, dtype=wide), True, 1, 2)


def edges_and_moments(dtype: torch.dtype) -> tuple[Any, ...]:
    x = torch.randn(2, 8, 4, 6).to(dtype)
    rows, moments = (x[:, :, :1], x[:, :, 3:]), torch.randn(9, dtype=torch.promote_types(dtype, torch.float32))
    pieces = [number for index, which in enumerate((2, 0, 2, 1, 2)) for number in (which, 192 * index)]
    return (x.new_empty(960), [*rows, moments], pieces)


CASES = [
    Case("write_pieces", pack_tensors.write_pieces, pack_tensors.launch_write_pieces, edges_and_moments),
    Case(
        "group_moments",
        group_moments.group_moments,
        group_moments.launch_group_moments,
        lambda dtype: (torch.randn(2, 40, 4, 8).to(dtype), 4, 1),
    ),
    Case("write_tokens", write_tokens.write_tokens, write_tokens.launch_write_tokens, local_tokens),
    Case("fit_tokens", fit_tokens.fit_tokens, fit_tokens.launch_fit_tokens, samples),
    Case("fit_tokens", fit_tokens.fit_tokens, fit_tokens.launch_fit_tokens, kept_tokens),
    Case("sample_tokens", fit_tokens.sample_tokens, fit_tokens.launch_sample_tokens, kept_samples),
    Case(
        "extrapolate_tokens",
        correct_tokens.extrapolate_tokens,
        correct_tokens.launch_extrapolate_tokens,
        own_tokens,
    ),
    Case("correct_tokens", correct_tokens.correct_tokens, correct_tokens.launch_correct_tokens, stale_tokens),
    Case("center_tokens", fit_matrices.center_tokens, fit_matrices.launch_center_tokens, centred_tokens),
    Case(
        "correct_matrices",
        correct_matrices.correct_matrices,
        correct_matrices.launch_correct_matrices,
        tokens_for_matrices,
    ),
    Case("pack_tokens", pack_tokens.pack_tokens, pack_tokens.launch_pack_tokens, averaged_tokens),
    Case("pack_tokens", pack_tokens.pack_tokens, pack_tokens.launch_pack_tokens, quantised_tokens),
    Case("add_delta", quantize_delta.add_delta, quantize_delta.launch_add_delta, quantised_change),
    Case(
        "merge_parts",
        group_moments.merge_parts,
        group_moments.launch_merge_parts,
        lambda dtype: (torch.rand(3, 41, dtype=group_moments.empty_moments(torch.empty(0, dtype=dtype), 1).dtype),),
    ),
    Case("group_norm", group_norm.normalise_groups, group_norm.launch_group_norm, norm_args),
    Case("group_norm", group_norm.normalise_groups, group_norm.launch_group_norm, received_moments),
    Case("concat_halo", concat_halo.concat_halo, concat_halo.launch_concat_halo, halo_args),
    Case(
        "merge_attention",
        merge_partials.merge_attention,
        merge_partials.launch_merge,
        lambda dtype: (
            torch.randn(2, 9, 3, 40).to(dtype).transpose(1, 2),
            torch.randn(2, 3, 9),
            [torch.randn(2, 9, 3, 40).to(dtype).transpose(1, 2)] * 3,
            [torch.randn(2, 3, 9)] * 3,
        ),
    ),
]
NAMES = [case.name for case in CASES]


class Calls(TorchDispatchMode):
    """Notes the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_every_operator_has_a_case() -> None:
    ours = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith(f"{fused_op.NAMESPACE}::")}
    assert {name.partition("::")[2] for name in ours} - {"attend"} == set(NAMES)  # `attend` is of compiled blocks


@pytest.mark.parametrize("case", CASES, ids=NAMES)
@pytest.mark.parametrize("architecture", first_of(ARCHITECTURES, ARCHITECTURES[-1]))
@pytest.mark.parametrize("dtype", first_of([torch.float16, torch.bfloat16, torch.float32], torch.bfloat16))
def test_one_launch_that_compiles_for_gpus(
    launches: Callable[..., Any], compiled: Callable[..., Any], case: Case, dtype: torch.dtype, architecture: int
) -> None:
    (launch,) = launches(case.launch, *case.args(dtype))
    assert all(len(binary) > 1000 for binary in compiled(launch, [architecture]))


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_the_fake_kernel_has_the_shapes_of_the_twin(case: Case) -> None:
    operator = getattr(torch.ops.patchpar, case.name).default
    for dtype in (torch.float16, torch.float32):
        torch.library.opcheck(operator, case.args(dtype), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_on_a_gpu_the_public_function_is_the_operator_alone(case: Case) -> None:
    assert operators_on_a_gpu(case, torch.float16) == [f"patchpar.{case.name}.default"]


def test_sums_in_fp64_have_no_kernel() -> None:
    with FakeTensorMode() as mode:
        assert fused_op.is_fused(on_gpu(mode, torch.empty(2, dtype=torch.float32)))
        assert not fused_op.is_fused(on_gpu(mode, torch.empty(2, dtype=torch.float64)))
    assert not fused_op.is_fused(torch.empty(2))
