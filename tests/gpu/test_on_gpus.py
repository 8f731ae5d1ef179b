"""What only a GPU can show. `python -m benchmarks.gpu.battery` runs these; `--gpu-device cpu` tries them on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from benchmarks.gpu.battery.timing import prepared_rank
from patchpar import Team
from patchpar.comm.kernels.triton_check import has_triton
from patchpar.comm.transport.torch_p2p import TorchTransport
from patchpar.launch.accelerators import in_stream
from patchpar.launch.messages import decode, encode
from patchpar.shard.graphs import step_graphs
from patchpar.shard.graphs.recorder import CaptureRefused, recorder_for
from patchpar.shard.host_memory import HostCopy, to_device
from tests.exact import denoisers
from tests.gpu.pools import ROUNDING, check, started
from tests.modules.networks import call_of, network
from tests.sequence.half_precision import WIDTHS, errors_of_attention
from tests.tensors import relative

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest) -> Iterator[Callable[..., list[Any]]]:
    """Two ranks that share a card, and exchange through memory of the host; what it yields runs a function on them."""
    kind = request.config.getoption("--gpu-device")
    with started(["cpu" if kind == "cpu" else f"{kind}:0"] * 2) as pool:
        yield lambda function, *args: pool.call("run", function, 2, "auto", args)


@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
def test_two_ranks_on_one_card(kind: str, pair: Callable[..., list[Any]], dtype: torch.dtype) -> None:
    check(pair("tests.gpu.on_ranks:parity", "sdxl", dtype), dtype)


def test_threads_work_in_the_streams_of_their_caller(kind: str, tmp_path: Path) -> None:
    """Arguments that a stream has not computed yet are waited for, and so is the result in that stream."""
    device, call = torch.device(kind, 0) if kind != "cpu" else torch.device(kind), call_of("unet")
    replicas = [network("unet").to(device) for _ in range(2)]
    ready = tree_map_only(torch.Tensor, lambda x: x.to(device), call)
    want = replicas[0](**ready)
    late = tree_map_only(torch.Tensor, torch.zeros_like, ready)
    with Team(replicas, verify=tmp_path) as team:
        team(**ready)
        with in_stream(torch.cuda.Stream()) if kind != "cpu" else nullcontext():
            if kind != "cpu":
                torch.cuda._sleep(10**9)  # cycles, half a second
            for into, x in zip(tree_leaves(late), tree_leaves(ready), strict=True):
                if isinstance(x, torch.Tensor):
                    into.copy_(x)
            found = team(**late).clone()
            assert relative(found, want) < 1e-2, "at most TF32"


def test_products_are_not_rounded_while_bands_are_verified(
    kind: str, pair: Callable[..., list[Any]], tmp_path: Path
) -> None:
    """GPUs round convolutions in fp32 to TF32: wide networks then differ by more than the limit of fp32."""
    for error, allowed in pair("tests.gpu.on_ranks:verified", "sdxl", tmp_path):
        assert 0 < error < 1e-5
        assert allowed


def answered(start: Callable[..., Any]) -> Callable[..., Any]:
    """TorchTransport's `_start`, with what this rank sends in the place of what the others would.

    Memory that nobody has written would hold moments of no map at all, on which a kernel and its twin round apart.
    """

    def echoed(self: TorchTransport, handle: Any, begin: Any, buffers: Any, *rest: Any) -> Any:
        work = start(self, handle, begin, buffers, *rest)
        sent, received = ([x for x in each if x.numel()] for each in buffers)
        for x in received:
            like = next((own for own in sent if own.dtype == x.dtype and x.numel() % own.numel() == 0), None)
            if like is None:
                x.zero_()
            else:
                x.view(-1, like.numel()).copy_(like.reshape(1, -1).expand(x.numel() // like.numel(), -1))
        return work

    return echoed


@pytest.fixture(params=["exact", "displaced", "pcpp", "fresh-edges", "fresh-edges:context=pooled"])
def step(request: pytest.FixtureRequest, kind: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Any]]:
    """One steady step of a strategy on rank 1 of 4, which gets its own messages back."""
    monkeypatch.setattr(TorchTransport, "_start", answered(TorchTransport._start))
    dtype = torch.float16 if kind != "cpu" else torch.float32
    denoiser = denoisers.build("sdxl").to(kind, dtype)
    moved = tree_map_only(torch.Tensor, lambda x: x.to(kind, dtype), denoisers.call("sdxl", 32, 16))
    moved["timestep"] = torch.tensor(501.0, device=kind)  # as pipelines pass it: diffusers copies a number to the GPU
    with torch.no_grad(), prepared_rank(kind, denoiser, request.param, lambda split: None, moved) as run:
        for _ in range(3):
            run()
        yield run


def test_a_steady_step_can_be_captured(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one card: messages go nowhere, so that only the capture and its replay are tried."""
    if kind == "cpu":
        pytest.skip("a CPU has no graphs")
    monkeypatch.setattr(step_graphs, "every_rank_has", lambda mesh, where, here: here)
    denoiser, moved = denoisers.build("sdxl").to(kind, torch.float16), denoisers.call("sdxl", 32, 16)
    moved = tree_map_only(torch.Tensor, lambda x: x.to(kind, torch.float16), moved)
    moved["timestep"] = torch.tensor(500.0, device=kind)
    for strategy in ("exact", "displaced", "pcpp", "fresh-edges", "fresh-edges:context=pooled"):
        splits: list[Any] = []
        with torch.no_grad(), prepared_rank(kind, denoiser, strategy, splits.append, moved) as run:
            (split,) = splits
            recorder = recorder_for(split.mesh[0].transport)
            split.use_graphs(step_graphs.StepGraphs(denoiser, recorder, split.mesh, required=True))
            for _ in range(6):
                run()
            torch.cuda.synchronize()
            assert split.graphs.replays >= 3, strategy


def test_after_a_capture_that_the_gpu_refuses_torch_is_as_before(kind: str) -> None:
    """Its stream, what it frees, and its random numbers."""
    if kind == "cpu":
        pytest.skip("a CPU has no graphs")
    transport: Any = SimpleNamespace(device=torch.device(kind, 0))
    recorder, x = recorder_for(transport, with_messages=False), torch.ones(1, device=kind)
    stream, state = torch.cuda.current_stream(), torch.cuda.get_rng_state()
    want = torch.rand(4, device=kind)
    torch.cuda.set_rng_state(state)
    for _ in range(2):
        with pytest.raises(CaptureRefused, match="the device refuses the capture"):
            recorder.capture(lambda: torch.rand(4, device=kind) * (x + 1).item(), "a step")
        assert torch.cuda.current_stream() == stream
        torch.cuda.empty_cache()
    assert torch.equal(torch.rand(4, device=kind), want)
    found = recorder.capture(lambda: torch.rand(4, device=kind) * x, "a step")
    torch.cuda.set_rng_state(state)
    found.replay()
    assert torch.equal(found.output, want)


def test_no_step_waits_for_the_gpu(kind: str, step: Callable[[], Any]) -> None:
    if kind == "cpu":
        step()
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


class BesideTwin(TorchDispatchMode):
    """Runs every fused operator a second time on the CPU, which is its eager twin, and notes how far they are apart."""

    def __init__(self) -> None:
        super().__init__()
        self.apart: dict[str, float] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace != "patchpar":
            return func(*args, **kwargs)
        of_twin = tree_map_only(torch.Tensor, lambda x: x.cpu(), (args, kwargs))
        found, expected = func(*args, **kwargs), func(*of_twin[0], **of_twin[1])
        if func._schema.name == "patchpar::write_pieces":
            self.apart[str(func)] = 0.0 if torch.equal(_written(*args), _written(*of_twin[0])) else float("inf")
            return found
        pairs = zip(tree_leaves((found, args)), tree_leaves((expected, of_twin[0])), strict=True)
        for mine, other in pairs:
            if isinstance(mine, torch.Tensor) and mine.is_floating_point() and torch.isfinite(other).all():
                here = mine.cpu()
                error = 0.0 if torch.equal(here, other) else relative(here, other) / ROUNDING[mine.dtype]
                self.apart[str(func)] = max(self.apart.get(str(func), 0.0), error)
        return found


def _written(buffer: torch.Tensor, tensors: Sequence[torch.Tensor], pieces: Sequence[int]) -> torch.Tensor:
    """The bytes [N] of what lies in a packed buffer [elements]; between the pieces it has no values."""
    sizes = [x.numel() * x.element_size() for x in tensors]
    parts = zip(pieces[::2], pieces[1::2], strict=True)
    whole, unit = buffer.cpu().view(torch.uint8), buffer.element_size()
    return torch.cat([whole.narrow(0, start * unit, sizes[number]) for number, start in parts])


def test_kernels_equal_their_eager_twins(kind: str, step: Callable[[], Any]) -> None:
    with BesideTwin() as twins:
        step()
    assert not [name for name, apart in twins.apart.items() if apart > 1]
    assert twins.apart or kind == "cpu" or not has_triton(), "a step on a GPU uses kernels"


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_attention_in_parts_to_heads_of_all_widths(kind: str, dtype: torch.dtype, masked: bool) -> None:
    """By the kernels that return the log-sum-exp: flash, cuDNN's, and with a mask the memory-efficient one."""
    for width in WIDTHS:
        errors = errors_of_attention(torch.device(kind), dtype, width, masked=masked)
        assert errors.parts <= 2 * errors.whole, width
        assert errors.without > 10 * errors.parts, width


def test_tensors_of_any_layout_leave_the_card(kind: str) -> None:
    x = torch.arange(6.0, device=kind).view(2, 3)
    sent = [x, x.mT, x[:, 1:], x[:, :, None].expand(2, 3, 4), x[None].expand(4, 2, 3), x.half()]
    message = encode(sent)
    found = decode(message)
    message.close()
    assert [torch.equal(got, want.cpu()) for got, want in zip(found, sent, strict=True)] == [True] * len(sent)


def test_copies_do_not_wait(kind: str) -> None:
    x = torch.arange(6.0).view(2, 3)
    there = to_device(x, torch.device(kind))
    assert there.device.type == kind
    assert torch.equal(HostCopy(there + 1).wait(), x + 1)
