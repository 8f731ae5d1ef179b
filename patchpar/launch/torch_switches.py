"""torch's process-wide switches of precision and kernels, which a caller's script sets: workers compute with the same.

And under the same autocast, which torch keeps by thread: jobs, in threads of their own, under that of their caller.

Does not import torch, so that a caller need not; one that has not imported it has set nothing.
"""

import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from operator import attrgetter
from typing import Any

from patchpar.launch.accelerators import KINDS

MATMUL = "float32_matmul_precision"
"""Of torch.set_float32_matmul_precision, which sets others of these too and therefore comes first."""
SWITCHES = (
    *("backends.cuda.matmul.allow_tf32", "backends.cudnn.allow_tf32"),
    "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_fp16_accumulation",
    *("backends.cudnn.enabled", "backends.cudnn.benchmark", "backends.cudnn.deterministic"),
)
PRECISIONS = (
    *("backends.cuda.matmul.fp32_precision", "backends.cudnn.conv.fp32_precision", "backends.cudnn.rnn.fp32_precision"),
    *("backends.mkldnn.matmul.fp32_precision", "backends.mkldnn.conv.fp32_precision"),
    "backends.mkldnn.rnn.fp32_precision",
)
"""Of torch from 2.9 on, which stand beside the older switches. A program that sets them cannot read the older ones."""
EXACT = frozenset({"none", "ieee"})


def caller_switches() -> Mapping[str, Any] | None:
    """Return the switches of this process by name; None if it has not imported torch."""
    return None if "torch" not in sys.modules else _found()


def take_switches(wanted: Mapping[str, Any] | None) -> None:
    """Set the switches of this process to those of a caller, if there are any."""
    if wanted is None:
        return
    import torch

    if MATMUL in wanted and _found().get(MATMUL) != wanted[MATMUL]:
        torch.set_float32_matmul_precision(wanted[MATMUL])
    for name in (*SWITCHES, *PRECISIONS):
        if name not in wanted:
            continue
        now, value = _found().get(name), wanted[name]
        if now != value and not EXACT.issuperset({now, value}):
            owner, _, attribute = name.rpartition(".")
            setattr(attrgetter(owner)(torch), attribute, value)


def _found() -> dict[str, Any]:
    torch: Any = sys.modules["torch"]
    found: dict[str, Any] = {}
    with suppress(RuntimeError):  # set by the newer switches
        found[MATMUL] = torch.get_float32_matmul_precision()
    for name in (*SWITCHES, *PRECISIONS):
        with suppress(AttributeError, RuntimeError):  # of another version of torch, or as above
            found[name] = attrgetter(name)(torch)
    return found


def caller_autocast() -> Mapping[str, str]:
    """Return the names of the dtypes of autocast in this thread, by type of device; empty where it is off."""
    found = dict[str, str]()
    torch: Any = sys.modules.get("torch")
    for kind in ("cpu", *KINDS) if torch else ():
        with suppress(RuntimeError):  # a type that this build of torch does not know
            if torch.is_autocast_enabled(kind):
                found[kind] = str(torch.get_autocast_dtype(kind)).removeprefix("torch.")
    return found


def under_autocast(wanted: Mapping[str, str], kind: str) -> AbstractContextManager[object]:
    """Return a context in which devices of this type compute under what `caller_autocast` has returned elsewhere."""
    import torch

    return torch.autocast(kind, getattr(torch, wanted[kind])) if kind in wanted else nullcontext()
