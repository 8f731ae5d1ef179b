"""Operators on tensors that have no values: their shapes, their memory and their FLOPs, and nothing computed.

An operator with an argument on the meta device runs there, whatever the device of its others: a pipeline's own code
goes on with its small tensors on the CPU (timesteps, token ids), and networks on meta. Where the code needs a value
that is not there, it gets one that is made up.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from patchpar.models.dry_run.kernel_buffers import buffer_bytes
from patchpar.models.dry_run.kernel_layouts import CONVOLUTION, as_kernels_lay, attended, has_channels_last
from patchpar.models.dry_run.known_values import DTYPES, OF_NUMBERS, KnownValues, of_numbers
from patchpar.models.dry_run.live_bytes import LiveBytes
from patchpar.models.dry_run.meta_autocast import META_AUTOCAST
from patchpar.models.dry_run.result_form import ResultForm, key_of, tensors_of
from patchpar.models.dry_run.rms_norm import FUNCTIONS, one_kernel
from patchpar.plan.replay.price import RMS_NORM
from patchpar.plan.replay.tape import Operator
from patchpar.shard.sdpa import AttentionCall, SdpaMode

FLOPS_OF_ATTENTION: Any = sdpa_flop_count  # not typed by torch
META = torch.device("meta")
INDEX = torch.ops.aten.index.Tensor
ATTENTION = frozenset({"_scaled_dot_product_flash_attention_for_cpu"})
"""Attention with its log-sum-exp, see `lse_kernels`; one kernel, of whose FLOPs torch has no formula."""
SCALED = "_scaled_mm"
"""A product of FP8, whose result is in a wider dtype."""
NO_KERNEL = frozenset(
    {
        *("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach", "lift_fresh"),
        *("_unsafe_view", "set_", "resize_", "_linalg_check_errors", "alias"),
    }
)
"""Operators that launch nothing, by name; views are told by torch."""


class CountedKernel(NamedTuple):
    """A kernel, and the bytes of `buffers` that it takes while it runs."""

    operator: Operator
    buffers: int


KnownForms = dict[Any, tuple[ResultForm, CountedKernel]]
"""By operator and form of its arguments."""


class MetaMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's base is not typed
    """Counts what runs inside: `memory` of all new tensors, and `flops` of matrix products and convolutions.

    `note` gets every operator that is a kernel. `known`: forms of results, which several modes may share.
    """

    def __init__(
        self, memory: LiveBytes, note: Callable[[Operator], object] | None = None, known: KnownForms | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory, self.flops, self._note = memory, 0, note
        self.known = {} if known is None else known
        self.values = KnownValues()
        self._last: CountedKernel | None = None  # counted since the last result

    def __enter__(self) -> "MetaMode":
        META_AUTOCAST.add_user()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        META_AUTOCAST.remove_user()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Asked by torch: no, nothing is compiled inside, and the skipping takes as long as an operator."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = tensors_of((*args, *kwargs.values()))
        if not any(x.is_meta for x in tensors):
            found = func(*args, **kwargs)
            if type(found) is Tensor and found.is_meta:
                self.values.made(func, args, kwargs, found)
            return self._seen(found, tensors)
        if not self.values.by_storage or tensors[0].dtype not in DTYPES:  # nearly always
            return self._run(func, args, kwargs, tensors)
        return self._seen(self.values.answered(func, args, kwargs, self._run(func, args, kwargs, tensors)), tensors)

    def _run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], tensors: Sequence[Tensor]) -> Any:
        """Return the result of an operator on tensors of which some are on the meta device, as without any values."""
        if func is INDEX:
            args = (args[0], [each for index in args[1] for each in self._without_mask(index)])
        if func.is_view and all(x.is_meta for x in tensors):
            return func(*args, **kwargs)
        key = None if func.is_view or func._schema.is_mutable else key_of((func, args, kwargs))
        known = None if key is None else self.known.get(key)
        if known is None:
            found = self._run_empty(func, args, kwargs)
            if key is not None:
                self._learn(key, found, tensors)
            return self._seen(found, tensors)
        form, kernel = known
        self._add(kernel)
        return self._seen(form.made(), ())

    def _seen(self, found: Any, tensors: Sequence[Tensor]) -> Any:
        """Return a result, whose storages are counted unless they are those of the arguments."""
        before = {id(x.untyped_storage()) for x in tensors}
        for x in tensors_of(found):
            if id(x.untyped_storage()) not in before:
                self.memory.see(x)
        return found

    def _learn(self, key: Any, found: Any, tensors: Sequence[Tensor]) -> None:
        """Keep the form of a result: finding it takes torch as long as many kernels."""
        kernel, self._last = self._last, None
        form = ResultForm.of(found, tensors)
        if form is not None and kernel is not None:
            self.known[key] = form, kernel

    def functions(self, *, joined: bool = False, attend: Callable[[AttentionCall], Tensor] | None = None) -> SdpaMode:
        """Return the mode for what it knows of functions. `joined`: some are one kernel, as on GPUs.

        `attend`, which returns [B, N, q, E], replaces its own.
        """
        if joined:
            return SdpaMode(attend or self.attend, self.on_gpus, FUNCTIONS | OF_NUMBERS)
        return SdpaMode(attend or self.attend, of_numbers, OF_NUMBERS)

    def attend(self, call: AttentionCall) -> Tensor:
        """Return an output [B, N, q, E] without values: one kernel, which holds no matrix of weights."""
        if not _is_empty(call.query):
            return call.run()
        shapes = [_with_heads(x) for x in (call.query, call.key, call.value)]
        found = attended(call.query, call.value.shape[-1])
        self._count("attention", int(FLOPS_OF_ATTENTION(*shapes)), (call.query, call.key, call.value, found))
        return found

    def on_gpus(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what a torch function does; what CUDA computes in one kernel, and the meta device not, is one."""
        if func in OF_NUMBERS:
            return of_numbers(func, args, kwargs)
        norm = one_kernel(func, args, kwargs)
        if norm is None or not _is_empty(norm.input):
            return func(*args, **kwargs)
        x, factors, found = norm.empty_results()
        self._count(RMS_NORM, 0, (x, *(() if norm.weight is None else (norm.weight,)), factors, found))
        return found

    def _run_empty(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        self._last = None
        name = func.overloadpacket.__name__
        if name in MADE_UP:
            self._count(name, 0, args[:1])
            return MADE_UP[name](args[0])
        target = kwargs.get("device")
        if name == "_to_copy" and target is not None and not _is_meta(target):
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        if func._schema.is_mutable and isinstance(args[0], Tensor) and not _is_empty(args[0]):
            return args[0]  # a tensor with values that is written to: they are left as they are
        if not all(x.is_meta for x in tensors_of((*args, *kwargs.values()))):
            args, kwargs = tree_map(_emptied, (args, kwargs))
        found = func(*args, **({**kwargs, "device": META} if target is not None else kwargs))
        found = as_kernels_lay(func, args, kwargs, found)
        if not func.is_view and name not in NO_KERNEL:
            tensors = tensors_of((*args, *kwargs.values(), found))
            self._count("attention" if name in ATTENTION else name, _flops_of(func, args, kwargs, found), tensors)
        return found

    def _without_mask(self, index: Tensor | None) -> list[Tensor | None]:
        """Return what selects the same as an index of any shape, without a mask whose values are not there.

        A mask that has values is replaced by its indices, any other by as many as it can have.
        """
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            return [index]
        mask = index if not _is_empty(index) else self.values.of(index)
        if mask is not None:
            return list(mask.nonzero(as_tuple=True))
        return [index.new_empty(index.numel(), dtype=torch.int64) for _ in range(index.ndim)]

    def _count(self, name: str, flops: int, tensors: Sequence[Tensor]) -> None:
        """Count a kernel that reads and writes `tensors`, of any shape; the last is its result."""
        num_bytes = sum(min(x.numel() * x.element_size(), x.untyped_storage().nbytes()) for x in tensors)
        dtype = str(tensors[0 if name in (SCALED, "attention") else -1].dtype).removeprefix("torch.") if tensors else ""
        operator = Operator(name, dtype, flops, num_bytes, _dims_of(name, flops, tensors))
        in_layout = name == CONVOLUTION and has_channels_last(tensors[-1])
        buffers = buffer_bytes(operator, tensors[-1].element_size(), in_layout=in_layout) if flops else 0
        self._last = CountedKernel(operator, buffers)
        self._add(self._last)

    def _add(self, kernel: CountedKernel) -> None:
        self.flops += kernel.operator.flops
        if kernel.buffers:
            self.memory.work(kernel.buffers)
        if self._note is not None:
            self._note(kernel.operator)


def _flops_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any], found: Any) -> int:
    if func.overloadpacket.__name__ in ATTENTION:
        return int(FLOPS_OF_ATTENTION(*(tuple(x.shape) for x in args[:3])))
    count = flop_registry.get(func.overloadpacket)
    return 0 if count is None else int(count(*args, **kwargs, out_val=found))


def _dims_of(name: str, flops: int, tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Return (queries, keys, width) of attention, (m, n, k) of another product, (rows, width) of an RMS norm.

    A convolution is the product of its windows [B * H * W, C * kernel] and its weight [C * kernel, C_out].
    """
    if name == RMS_NORM:
        rows = tensors[-2].numel()
        return rows, tensors[-1].numel() // rows
    if not flops:
        return ()
    if name == "attention":
        query, key = tensors[0], tensors[1]
        return query.numel() // query.shape[-1], key.shape[-2], query.shape[-1]
    found = tensors[-1]
    n = found.shape[1] if "convolution" in name else found.shape[-1]
    m = found.numel() // n
    return m, n, flops // (2 * m * n)


def _scalar(x: Tensor) -> bool | float | int:
    return True if x.dtype == torch.bool else 1.0 if x.dtype.is_floating_point else 1


def _nonzero(x: Tensor) -> Tensor:
    """Return the indices [n, dims] of as many values as there may be at most in the first dim."""
    return torch.zeros((x.shape[0] if x.ndim else 1, x.ndim), dtype=torch.int64)


def _in_one(x: Tensor) -> Tensor:
    """Return the counts [1] of integers [n] as if all were 0: which expert gets which tokens is told by values."""
    return torch.tensor([x.numel()])


MADE_UP: dict[str, Callable[[Tensor], Any]] = {
    "_local_scalar_dense": _scalar,
    "equal": lambda x: True,
    "is_nonzero": lambda x: True,
    "nonzero": _nonzero,
    "masked_select": lambda x: x.new_empty(x.numel()),
    "bincount": _in_one,
}
"""What is returned instead of values that are not there, by the name of the operator, which is one of `QUESTIONS`."""


def _is_meta(device: Any) -> bool:
    return torch.device(device).type == META.type


def _is_empty(x: Tensor) -> bool:
    return _is_meta(x.device)


def _emptied(leaf: Any) -> Any:
    return leaf.to(META) if isinstance(leaf, Tensor) and not _is_empty(leaf) else leaf


def _with_heads(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape) if x.ndim == 4 else (x.shape[0], 1, *x.shape[1:])
