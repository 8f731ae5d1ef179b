"""State of torch that a script sets for its process, and that kernels are chosen by: workers compute with the same.

Precision of products, deterministic algorithms, kernels of attention, the default dtype; and the backend of attention
that diffusers calls. This is the only list of it: a step that is repeated as a graph is of one kind only while none of
it changes. Autocast is beside it, which torch keeps by thread: jobs, in threads of their own, compute under that of
their caller.

Does not import torch, so that a caller need not; one that has not imported it has set nothing.
"""

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from patchpar.launch.accelerators import KINDS

ORDER = "sdp_priority_order"
DETERMINISTIC = "deterministic_debug_mode"
BACKEND = "diffusers.attention_backend"
DISPATCH = "diffusers.models.attention_dispatch"
FUNCTIONS = {
    "float32_matmul_precision": ("get_float32_matmul_precision", "set_float32_matmul_precision"),
    "default_dtype": ("get_default_dtype", "set_default_dtype"),
    "flash_sdp": ("backends.cuda.flash_sdp_enabled", "backends.cuda.enable_flash_sdp"),
    "mem_efficient_sdp": ("backends.cuda.mem_efficient_sdp_enabled", "backends.cuda.enable_mem_efficient_sdp"),
    "math_sdp": ("backends.cuda.math_sdp_enabled", "backends.cuda.enable_math_sdp"),
    "cudnn_sdp": ("backends.cuda.cudnn_sdp_enabled", "backends.cuda.enable_cudnn_sdp"),
    "fp16_bf16_reduction_math_sdp": (
        "backends.cuda.fp16_bf16_reduction_math_sdp_allowed",
        "backends.cuda.allow_fp16_bf16_reduction_math_sdp",
    ),
    "preferred_blas_library": ("backends.cuda.preferred_blas_library",) * 2,
    "preferred_linalg_library": ("backends.cuda.preferred_linalg_library",) * 2,
}
"""What torch reads and sets by functions. The first one sets attributes below too, and therefore comes first."""
ATTRIBUTES = (
    *("backends.cuda.matmul.allow_tf32", "backends.cudnn.allow_tf32"),
    "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_fp16_accumulation",
    *("backends.cudnn.enabled", "backends.cudnn.benchmark", "backends.cudnn.deterministic"),
    *("backends.cudnn.benchmark_limit", "backends.mkldnn.enabled", "backends.mkldnn.deterministic"),
    "utils.deterministic.fill_uninitialized_memory",
)
PRECISIONS = (
    *("backends.cuda.matmul.fp32_precision", "backends.cudnn.conv.fp32_precision", "backends.cudnn.rnn.fp32_precision"),
    *("backends.mkldnn.matmul.fp32_precision", "backends.mkldnn.conv.fp32_precision"),
    "backends.mkldnn.rnn.fp32_precision",
)
"""Of torch from 2.9 on, which stand beside the older switches. A program that sets them cannot read the older ones."""
EXACT = frozenset({"none", "ieee"})
Readers = Mapping[str, Callable[[Any], Any]]


def _called(path: str) -> Callable[[Any], Any]:
    function = attrgetter(path)
    return lambda torch: function(torch)()


def _order_of_kernels(torch: Any) -> tuple[int, ...]:
    return tuple(torch._C._get_sdp_priority_order())


def _backend(torch: Any) -> str:
    """Return the name of diffusers' backend. Raises KeyError if diffusers has not been imported."""
    return str(sys.modules[DISPATCH]._AttentionBackendRegistry.get_active_backend()[0].value)


_READERS: Readers = {
    **{name: _called(read) for name, (read, _) in FUNCTIONS.items()},
    ORDER: _order_of_kernels,
    DETERMINISTIC: _called("get_deterministic_debug_mode"),
    **{name: attrgetter(name) for name in (*ATTRIBUTES, *PRECISIONS)},
    BACKEND: _backend,
}


def caller_switches() -> Mapping[str, Any] | None:
    """Return the switches of this process by name; None if it has not imported torch."""
    if "torch" not in sys.modules:
        return None
    torch, found = sys.modules["torch"], dict[str, Any]()
    for name, read in _READERS.items():
        with suppress(AttributeError, RuntimeError, KeyError):  # see `_read`
            found[name] = read(torch)
    return found


@contextmanager
def under_switches(wanted: Mapping[str, Any] | None) -> Iterator[None]:
    """Context in which the switches of this process are those of a caller, if there are any."""
    if wanted is None:
        yield
        return
    importlib.import_module("torch")
    before = caller_switches() or {}
    try:
        _take(wanted)
        yield
    finally:
        _take(before)


def _take(wanted: Mapping[str, Any]) -> None:
    """Set the switches that differ."""
    torch = sys.modules["torch"]
    for name in _READERS:
        if name not in wanted:
            continue
        now, value = _read(torch, name), wanted[name]
        if now != value and not (name in PRECISIONS and EXACT.issuperset({now, value})):
            _set(torch, name, value)


def _read(torch: Any, name: str) -> Any:
    """Return the value of a switch; None for one of another version of torch, or that the newer ones have set."""
    with suppress(AttributeError, RuntimeError, KeyError):
        return _READERS[name](torch)
    return None


def _set(torch: Any, name: str, value: Any) -> None:
    if name == BACKEND:
        dispatch = importlib.import_module(DISPATCH)
        backend = dispatch.AttentionBackendName(value)
        dispatch._maybe_download_kernel_for_backend(backend)  # unless this process has it
        dispatch._AttentionBackendRegistry.set_active_backend(backend)
    elif name == DETERMINISTIC:  # torch's own function for it forgets compiled code
        torch.use_deterministic_algorithms(value > 0, warn_only=value == 1)
    elif name == ORDER:
        torch._C._set_sdp_priority_order(list(value))
    elif name in FUNCTIONS:
        attrgetter(FUNCTIONS[name][1])(torch)(value)
    else:
        owner, _, attribute = name.rpartition(".")
        setattr(attrgetter(owner)(torch), attribute, value)


def caller_autocast() -> Mapping[str, str]:
    """Return the names of the dtypes of autocast in this thread, by type of device; empty where it is off."""
    found = dict[str, str]()
    torch: Any = sys.modules.get("torch")
    for kind in ("cpu", *KINDS) if torch else ():
        with suppress(RuntimeError):  # a type that this build of torch does not know
            if torch.is_autocast_enabled(kind):
                found[kind] = str(torch.get_autocast_dtype(kind)).removeprefix("torch.")
    return found


@dataclass(frozen=True, slots=True)
class TorchModes:
    """What a caller has set of torch. `switches`: None where ranks keep their own. `autocast`: of its thread."""

    switches: Mapping[str, Any] | None = None
    autocast: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def now(cls, *, of_process: bool) -> "TorchModes":
        """Return those of this thread, and those `of_process` if ranks are other processes that do not set them."""
        return cls(caller_switches() if of_process else None, caller_autocast())

    @contextmanager
    def on(self, kind: str) -> Iterator[None]:
        """Context in which devices of this type compute with them."""
        import torch

        dtype = self.autocast.get(kind)
        with (
            under_switches(self.switches),
            nullcontext() if dtype is None else torch.autocast(kind, getattr(torch, dtype)),
        ):
            yield
