"""Verification of a split denoiser at its first use: all ranks together compare it with its plain forward, once.

The result is cached. Exchanges of the verification are not part of a call's statistics.
"""

import math
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_unflatten

from patchpar.comm.async_tensor import AsyncTensor
from patchpar.comm.collectives import AllGather, AxisComm, Communicator
from patchpar.comm.pytree import floats_in, tensors_in
from patchpar.comm.traffic import CommStats
from patchpar.errors import UnsupportedModel, VerificationError
from patchpar.plan.scalars import is_number
from patchpar.shard.fingerprint import fingerprint
from patchpar.shard.precision import autocast_dtype, rounded_products, wide
from patchpar.shard.unsupported_model import is_of_the_split
from patchpar.shard.verification_cache import VerificationCache

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a network."""
Forward = Callable[..., Any]
"""A network's own forward, or one in its place."""
SHAKEN = 4.0
"""Limit of a split model's error, in units of the change that rounding of the latent causes in the plain one."""
ROUNDINGS = 16
"""Random roundings tried at most: with quantised activations only some of them change an integer."""
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1, torch.float64: 1e-9}
ROUNDED_PRODUCTS = {"tf32": 5e-3, "bf16": 1e-1}
"""Instead, where products of fp32 numbers are rounded, and so was one side of the comparison already."""
TIME = "timestep"  # a plain number that differs in every step, or a tensor, with a timestep for each token


class Comparison(NamedTuple):
    """Relative error of a split call against the plain one on this rank, and the limit that rounding explains."""

    error: float
    limit: float


def verify_once(
    verifications: VerificationCache,
    facts: Mapping[str, Any],
    mesh: AxisComm,
    compare: Callable[[], Iterable[Sequence[Comparison]]],
    what: str,
    way_out: str = "",
) -> float:
    """Return the error cached for these facts, or the `largest_error` now. All ranks of the axis call it together.

    Raises UnsupportedModel where they do not have the same facts, VerificationError.
    """
    comm, _ = mesh
    start, autocast = time.perf_counter(), autocast_dtype(comm.transport.device.type)
    if autocast is not None:  # which rounds more, so that the limit is higher
        facts = {**facts, "autocast": str(autocast)}
    with uncounted(comm):
        key = verifications.key(facts)
        known = verifications.find(key, "relative_error", _error)
        if not known_to_all(mesh, facts["denoiser"], key, known is not None) or known is None:
            known = largest_error(mesh, compare(), what, way_out)
            verifications.remember(key, facts, relative_error=known)  # on every rank: home folders may differ
    comm.traffic.note("check", "", "first use", start)
    return known


def largest_error(mesh: AxisComm, compared: Iterable[Sequence[Comparison]], what: str, way_out: str = "") -> float:
    """Return the largest error of all comparisons and ranks; ranks gather each sequence before they make the next.

    Raises VerificationError with the figures, on all ranks alike, where an error is above its limit: `what` differs
    from the plain model, and `way_out` is what to do.
    """
    (comm, axis), worst = mesh, 0.0
    for each in compared:
        own = torch.tensor(each, dtype=torch.float32, device=comm.transport.device)
        of_all = torch.stack(AllGather(comm, axis, "verify", "verification").same(own))
        errors, limits = of_all.unbind(-1)
        worst = max(worst, float(errors.max()))
        if not bool((errors <= limits).all()):
            figures = ", ".join(f"{error:.1e}" for error in errors.amax(0).tolist())
            raise VerificationError(
                f"{what} differs from the plain one by {figures}, more than the {float(limits.max()):.0e} that "
                f"rounding explains{way_out}"
            )
    return worst


def known_to_all(mesh: AxisComm, network: str, key: str, known: bool) -> bool:
    """Whether every rank of the axis has a result under `key`. Ranks decide together, or some would wait for others.

    Raises UnsupportedModel where they do not have the same key for a network of that class.
    """
    comm, axis = mesh
    with uncounted(comm):
        own = torch.tensor([known, int(key[:12], 16)], device=comm.transport.device)
        gathered = [(bool(each[0]), int(each[1])) for each in AllGather(comm, axis, "verify", "known").same(own)]
    if len({name for _, name in gathered}) > 1:  # all ranks see it
        raise UnsupportedModel(
            f"the ranks hold different networks, or call them differently (here a {network}): what is "
            "changed in a network, such as a hook, a processor or a forward, must be changed on every rank alike"
        )
    return all(found for found, _ in gathered)


def _error(value: Any) -> float:
    """Return a relative error read from a file. Raises ValueError for anything else."""
    if not is_number(value, 0) or value == math.inf:
        raise ValueError(f"{value!r:.80} is not a relative error")
    return float(value)


def every_rank_has(mesh: AxisComm, where: str, here: bool) -> bool:
    """Whether it is so on every rank of the axis. Collective. Raises ExchangeError."""
    comm, axis = mesh
    with uncounted(comm):
        own = torch.tensor([here], device=comm.transport.device)
        return all(bool(each) for each in AllGather(comm, axis, "verify", where).same(own))


def is_alike(mesh: AxisComm, where: str, text: str) -> bool:
    """Whether all ranks of the axis have the same text. Collective. Raises ExchangeError."""
    comm, axis = mesh
    with uncounted(comm):
        own = torch.tensor([crc32(text.encode())], device=comm.transport.device)
        return all(torch.equal(own, each) for each in AllGather(comm, axis, "verify", where).same(own))


@contextmanager
def uncounted(comm: Communicator) -> Iterator[None]:
    """Context in which exchanges of `comm` are not part of a call's statistics."""
    counted, comm.traffic = comm.traffic, CommStats()
    try:
        yield
    finally:
        comm.traffic = counted


def fingerprint_of(denoiser: nn.Module) -> dict[str, Any]:
    """Return the facts of a denoiser that a verification result depends on: class, configuration, fingerprint.

    Without private entries of the configuration: paths, and a list of defaults in another order in every process.
    """
    config = getattr(denoiser, "config", None)
    shapes = crc32(repr([(name, tuple(x.shape)) for name, x in denoiser.named_parameters()]).encode())
    return {
        "denoiser": type(denoiser).__name__,
        "config": {name: value for name, value in config.items() if not name.startswith("_")}
        if isinstance(config, Mapping)
        else {"parameters": shapes},
        "fingerprint": fingerprint(denoiser).digest,
    }


def facts_of(
    denoiser: nn.Module, device: torch.device, call: Call, ignored: frozenset[str] = frozenset(), **split: Any
) -> dict[str, Any]:
    """Return what the verification result of a denoiser for such calls depends on; `split`: how it is split.

    Of keyword arguments that are `ignored` only the tensors count.
    """
    args, kwargs = call
    counting = args, {name: tensors_in(x) if name in ignored else x for name, x in kwargs.items()}
    return {**fingerprint_of(denoiser), "device": device.type, "arguments": arguments_of(counting), **split}


def call_signature(call: Call, ignored: frozenset[str] = frozenset()) -> Any:
    """Return what must not change from one call to the next without another verification.

    Of keyword arguments that are `ignored` only the tensors count, by shape and dtype.
    """
    args, kwargs = call
    kept = {name: x for name, x in kwargs.items() if not _is_the_time(name, x) and name not in ignored}
    leaves, spec = tree_flatten((args, kept))
    tensors = [_sort_of(x) for name in sorted(ignored) for x in tensors_in(kwargs.get(name))]
    return spec, tuple(map(_sort_of, leaves)), tuple(tensors)


def kind_of_call(call: Call, ignored: frozenset[str] = frozenset()) -> tuple[Hashable, ...]:
    """Return what decides which modules of a network run: which arguments there are, and the kind of each.

    Neither sizes, nor numbers such as a timestep or a scale, nor keyword arguments that are `ignored`.
    """
    kinds = list[Hashable]()
    for path, x in chain(enumerate(call[0]), call[1].items()):
        if isinstance(x, Tensor) and path not in ignored:  # as in `_add_kinds`, without a call for each
            kinds.append((path, x.ndim, x.dtype))
        elif x is not None and path not in ignored:
            _add_kinds(path, x, kinds)
    return tuple(kinds)


def _add_kinds(path: Hashable, x: Any, kinds: list[Hashable]) -> None:
    """Add a tensor's dims and dtype, the value of a switch or a text, and the type of anything else in a tree.

    In every denoiser call: without torch's functions for trees, which call some dozens of Python's for each leaf.
    """
    if isinstance(x, Tensor):
        kinds.append((path, x.ndim, x.dtype))
    elif isinstance(x, dict):
        for key, each in x.items():
            _add_kinds((path, key), each, kinds)
    elif isinstance(x, (list, tuple)):
        for number, each in enumerate(x):
            _add_kinds((path, number), each, kinds)
    elif isinstance(x, (bool, str)):
        kinds.append((path, x))
    elif x is not None:
        kinds.append((path, "number" if isinstance(x, (int, float)) else type(x).__name__))


def arguments_of(call: Call) -> list[str]:
    """Return the signature of a call as texts, for messages and files."""
    leaves, _ = tree_flatten_with_path(call)
    named = ((keystr(path), leaf) for path, leaf in leaves if leaf is not None)
    return [f"{name} {_sort_of(leaf)}" for name, leaf in named if not _is_the_time(name, leaf)]


def _is_the_time(name: str, leaf: Any) -> bool:
    """Whether an argument is a plain timestep.

    A switch such as `use_cross_timestep` is not: it changes the computation.
    """
    return TIME in name and not isinstance(leaf, (Tensor, bool))


def _sort_of(leaf: Any) -> str:
    """Return a tensor's shape and dtype, or the value of what may be a number of frames."""
    if isinstance(leaf, Tensor):
        return f"{tuple(leaf.shape)} {leaf.dtype}"
    return repr(leaf) if isinstance(leaf, (int, str, bool)) else type(leaf).__name__


def with_noise_for_zeros(call: Call) -> Call | None:
    """Return the call with random numbers in tensors that are all zeros; None where there are none.

    Such are the residuals of a ControlNet that is inactive in this step: errors in their use would not show.
    """
    leaves, spec = tree_flatten(call)
    all_zeros = [number for number, leaf in enumerate(leaves) if _is_zeros(leaf)]
    for number in all_zeros:
        generator = torch.Generator().manual_seed(number)
        zeros = leaves[number]
        noise = torch.randn(zeros.shape, generator=generator).to(zeros)
        leaves[number] = zeros.with_values(noise) if isinstance(zeros, AsyncTensor) else noise
    return tree_unflatten(leaves, spec) if all_zeros else None


def _is_zeros(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim > 2 and leaf.is_floating_point() and not bool(leaf.any())


def relative_error(got: Tensor, want: Tensor) -> float:
    """Return the norm of `got - want` over that of `want`, both of any shape; infinite where `got` is not finite."""
    got, want = wide(got), wide(want)
    error = (got - want).norm() / want.norm().clamp_min(1e-12)
    return error.item() if math.isfinite(error.item()) else math.inf


def rounding_limit(outputs: Iterable[Tensor]) -> float:
    """Return the relative error that rounding explains, of outputs of any shape as they are computed now."""
    return max(ROUNDED_PRODUCTS.get(rounded_products(x), TOLERANCE[x.dtype]) for x in outputs)


def fails_or_has_nan(run: Callable[[], Any]) -> bool:
    """Return whether the output of `run` has NaN, or the model's own code fails."""
    try:
        return any(bool(x.isnan().any()) for x in floats_in(run()))
    except Exception as error:
        if not is_of_the_split(error):
            raise
        return True
