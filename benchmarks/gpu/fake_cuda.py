"""A CUDA device that is not there: torch's fake tensors have shapes, dtypes and a device, and no values.

A build of torch without CUDA computes nearly everything on fake tensors of a CUDA device. Its Python bindings of
indexing, copies and attention ask the device first, so these are led to the operators behind them. A root mean square
norm, which CUDA computes in one kernel and such a build in eight, is an operator of this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from patchpar.models.dry_run.rms_norm import RMSNormCall, one_kernel
from patchpar.shard.sdpa import AttentionCall, dispatch_attention, replaced_attention

DEVICE = torch.device("cuda", 0)
CAPABILITY = (9, 0)
"""Of an H100, for code that chooses kernels by it."""
MEMORY = 80 * 2**30  # bytes, all free


@contextmanager
def fake_cuda(events: EventCounts) -> Iterator[None]:
    """Make fake tensors of everything that is allocated inside; streams and events are counted and do nothing."""
    with ExitStack() as stack:
        stack.enter_context(cuda_names(events))
        stack.enter_context(mock.patch.object(FakeTensor, "as_subclass", _shell, create=True))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(_OperatorsForBindings(events))
        stack.enter_context(torch.no_grad())
        yield


@contextmanager
def cuda_names(events: EventCounts) -> Iterator[None]:
    """Replace streams, events and the current device of torch.cuda by counters, whatever the tensors are.

    Those of torch.cpu too: a stand-in for NCCL on CPU tensors asks the module of their device.
    """
    found = _stand_ins(events)
    with ExitStack() as stack:
        for name, each in found.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, each))
        for name in ("Event", "current_device"):
            stack.enter_context(mock.patch.object(torch.cpu, name, found[name]))
        yield


@dataclass(slots=True)
class EventCounts:
    """Uses of streams and events. `waits` block the process until a stream has ended its work."""

    recorded: int = 0
    polled: int = 0
    waits: int = 0
    streams_recorded: int = 0


class _Event:
    """Replaces torch.cuda.Event."""

    def __init__(self, events: EventCounts, *_: Any, **__: Any) -> None:
        self._events = events

    def record(self, *_: Any) -> None:
        self._events.recorded += 1

    def wait(self, *_: Any) -> None:
        """Only a stream waits."""

    def query(self) -> bool:
        self._events.polled += 1
        return True

    def synchronize(self) -> None:
        self._events.waits += 1

    def elapsed_time(self, _: Any) -> float:
        return 0.0


class _Stream:
    """Replaces torch.cuda.Stream."""

    device = DEVICE

    def __init__(self, events: EventCounts, *_: Any, **__: Any) -> None:
        self._events = events

    def wait_stream(self, _: Any) -> None:
        """Only a stream waits."""

    def wait_event(self, _: Any) -> None:
        """Only a stream waits."""

    def record_event(self, event: Any = None) -> Any:
        event = event or _Event(self._events)
        event.record()
        return event

    def query(self) -> bool:
        self._events.polled += 1
        return True

    def synchronize(self) -> None:
        self._events.waits += 1


def _stand_ins(events: EventCounts) -> dict[str, Any]:
    """Return what replaces attributes of torch.cuda."""
    current = _Stream(events)
    return {
        "Event": partial(_Event, events),
        "Stream": partial(_Stream, events),
        "current_stream": lambda *_: current,
        "default_stream": lambda *_: current,
        "stream": lambda *_: nullcontext(),
        "current_device": lambda: DEVICE.index,
        "set_device": lambda _: None,
        "synchronize": lambda *_: current.synchronize(),
        "get_device_capability": lambda *_: CAPABILITY,
        "is_current_stream_capturing": lambda: False,
        "mem_get_info": lambda *_: (MEMORY, MEMORY),
    }


class _OperatorsForBindings(TorchFunctionMode):
    """Leads functions whose bindings need CUDA in torch's build to the operators that they call."""

    def __init__(self, events: EventCounts) -> None:
        super().__init__()
        self._events = events

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        subclass = next((each for each in types if not issubclass(each, FakeTensor)), None)
        if subclass is not None:  # it may call any of these functions on tensors of its own
            with self:
                return subclass.__torch_function__(func, types, args, kwargs or {})
        if func is Tensor.record_stream:
            self._events.streams_recorded += 1
            return None
        if func is dispatch_attention:  # what replaces attention calls any of these functions
            with self:
                return replaced_attention(*args, **(kwargs or {}))
        norm = one_kernel(func, args, kwargs or {})
        if norm is not None and norm.input.device.type == DEVICE.type:
            x, shape = _contiguous(norm.input), list(norm.normalized_shape)
            return torch.ops.fake_cuda._fused_rms_norm(x, shape, norm.weight)[0]
        return _OPERATORS.get(func, func)(*args, **(kwargs or {}))


def _indexed(x: Tensor, index: Any) -> Tensor:
    """x[index]."""
    index = index if isinstance(index, tuple) else (index,)
    if any(isinstance(each, (Tensor, list)) for each in index):
        return _gathered(x, index)
    named = sum(1 for each in index if each is not None and each is not Ellipsis)
    found, dim = x, 0
    for each in index:
        if each is Ellipsis:
            dim += x.ndim - named
        elif each is None:
            found, dim = found.unsqueeze(dim), dim + 1
        elif isinstance(each, slice):
            found, dim = torch.ops.aten.slice.Tensor(found, dim, each.start, each.stop, each.step or 1), dim + 1
        else:
            found = torch.ops.aten.select.int(found, dim, int(each))
    return found


def _gathered(x: Tensor, index: Sequence[Any]) -> Tensor:
    """x[index] with tensors or lists of positions in it, beside whole slices only. A mask is turned into positions."""
    positions: list[Tensor | None] = []
    for each in index:
        if isinstance(each, slice) and each == slice(None):
            positions.append(None)
        elif isinstance(each, list):
            positions.append(torch.tensor(each, device=x.device))
        elif isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8):
            positions += torch.nonzero(each).unbind(1)
        elif isinstance(each, Tensor):
            positions.append(each)
        else:
            raise NotImplementedError(f"indexing with {index!r} of a fake tensor: add it to _gathered")
    return torch.ops.aten.index.Tensor(x, positions)


def _set(x: Tensor, index: Any, value: Any) -> None:
    """x[index] = value."""
    if isinstance(index, tuple) and any(isinstance(each, (Tensor, list)) for each in index):
        raise NotImplementedError(f"assignment to positions {index!r} of a fake tensor: add it to _set")
    if isinstance(index, (Tensor, list)):
        raise NotImplementedError(f"assignment to positions {index!r} of a fake tensor: add it to _set")
    part = _indexed(x, index)
    if isinstance(value, Tensor):
        _copied(part, value)
    else:
        part.fill_(value)


def _copied(x: Tensor, value: Tensor, non_blocking: bool = False) -> Tensor:
    with torch._C._AutoDispatchBelowAutograd():
        torch.ops.aten.copy_.default(x, value, non_blocking)
    return x


def _contiguous(x: Tensor, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
    return x if x.is_contiguous(memory_format=memory_format) else x.clone(memory_format=memory_format)


def _attention(*args: Any, **kwargs: Any) -> Tensor:
    """The one kernel that torch chooses on a GPU in half precision: flash, or with a mask the memory-efficient one."""
    call = AttentionCall(*args, **kwargs)
    query, key, value, dropout = call.query, call.key, call.value, call.dropout_p
    if call.enable_gqa:
        heads = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(heads, 1) for x in (key, value))
    if call.attn_mask is None:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout, call.is_causal, False, scale=call.scale)[0]
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(query, key, value, call.attn_mask, False, dropout, call.is_causal, scale=call.scale)[0]


def _rms_norm(x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None) -> tuple[Tensor, Tensor]:
    _, factors, found = RMSNormCall(x, normalized_shape, weight).empty_results()
    return found, factors


_KERNELS = torch.library.Library("fake_cuda", "DEF")
_KERNELS.define("_fused_rms_norm(Tensor x, int[] normalized_shape, Tensor? weight) -> (Tensor, Tensor)")
_KERNELS.impl("_fused_rms_norm", _rms_norm, "Meta")


def _shell(x: Tensor, subclass: type[Tensor]) -> Tensor:
    """A tensor of a subclass that holds `x`: on the meta device, since a fake tensor is of a subclass already."""
    with unset_fake_temporarily():
        return Tensor._make_subclass(subclass, torch.empty(x.shape, dtype=x.dtype, device="meta"))


_OPERATORS: dict[Any, Callable[..., Any]] = {
    Tensor.__getitem__: _indexed,
    Tensor.__setitem__: _set,
    Tensor.copy_: _copied,
    Tensor.pin_memory: Tensor.clone,
    Tensor.contiguous: _contiguous,
    F.scaled_dot_product_attention: _attention,
}


def put_on_fake_cuda(module: nn.Module, dtype: torch.dtype) -> None:
    """Give a module on the meta device parameters and buffers on the fake one."""

    def placed(x: Tensor) -> Tensor:
        return torch.empty(x.shape, dtype=dtype if x.is_floating_point() else x.dtype, device=DEVICE)

    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = nn.Parameter(placed(parameter), requires_grad=False)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = placed(buffer)
