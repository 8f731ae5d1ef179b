"""Find which arguments of a network carry the batch, where ranks split it by branches of guidance.

    1. by shape            as `Batch` decides; verified with the network's own forward
    2. by perturbation     where that is wrong, or fails: an argument carries the batch along the dim in which other
                           values for the last branch change the output of the last branch alone
    3. by default          arguments that change no output: along no dim, or along the last that fits

A call that fills a cache, one that writes to its arguments and returns them, is not split.

All ranks run this, or none: an argument may be received from the other ranks when it is used.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from patchpar.comm.collectives import AxisComm
from patchpar.comm.pytree import floats_in, paths_of, tensors_in, with_tensors
from patchpar.errors import PlanError, UnsupportedModel, VerificationError
from patchpar.plan.mesh import Axis
from patchpar.shard.argument_changes import gives_back, without_given, written
from patchpar.shard.batch import Batch, count_branches, sample_of
from patchpar.shard.guidance_branches import at_own_index
from patchpar.shard.precision import full_precision
from patchpar.shard.step_caches import caches_set_aside
from patchpar.shard.transformer.probe.row_trace import disturbed, moved_indices
from patchpar.shard.transformer.probe.smaller_call import smaller_calls_of
from patchpar.shard.unsupported_model import in_one_line, is_of_the_split, is_out_of_memory
from patchpar.shard.verification import (
    Call,
    Comparison,
    arguments_of,
    call_signature,
    every_rank_has,
    fingerprint_of,
    known_to_all,
    relative_error,
    rounding_limit,
    with_noise_for_zeros,
)
from patchpar.shard.verification_cache import VerificationCache

Plain = Callable[..., Any]
Run = Callable[[], Any]
Found = Mapping[str, int | None]  # dim of the batch by path, for arguments where shapes are misleading
NOT_SHARED: Found = {"": None}
Agreement = Callable[[str, bool], bool]  # from a key and whether this rank has its value, whether all ranks have it
Layers = Callable[[], Sequence[nn.Module]]  # layers that treat branches differently, see `guidance_branches`


class BatchArguments:
    """The arguments of one network that carry the batch, which the ranks of an axis split.

    `known_to_all`: whether all ranks have a verification result, as `verification.known_to_all`. `alone`: whether a
    rank makes a plain forward alone; else one that does not fit a device fails the call. `every_rank`: whether
    something is so on all ranks.
    """

    def __init__(
        self,
        network: nn.Module,
        ranks: int,
        verifications: VerificationCache,
        known_to_all: Agreement,
        by_branch: Layers = tuple,
    ) -> None:
        self.network, self.ranks, self.verifications, self.known_to_all = network, ranks, verifications, known_to_all
        self.by_branch, self.alone = by_branch, True
        self.every_rank: Callable[[bool], bool] = bool
        self._known: list[tuple[Any, Found]] = []

    def of(self, plain: Plain, call: Call) -> Found:
        """Return them for calls like this one; `plain` is the network's forward.

        Raises VerificationError, UnsupportedModel.
        """
        sample = sample_of(*call)
        if count_branches(sample) == 1 or Batch.of(sample).size % self.ranks:  # nothing to split, or uneven parts
            return {}
        form = call_signature(call)
        found = next((found for known, found in self._known if known == form), None)
        if found is None:
            found = self._kept_or_found(plain, call)
            self._known.append((form, found))
        return found

    def _kept_or_found(self, plain: Plain, call: Call) -> Found:
        facts = {**fingerprint_of(self.network), "carriers of the batch": arguments_of(call), "ranks": self.ranks}
        key = self.verifications.key(facts)
        found = self.verifications.find(key, "carriers", _read)
        if not self.known_to_all(key, found is not None) or found is None:
            with caches_set_aside(self.network), torch.no_grad(), full_precision():
                found = self._found_within_memory(plain, call)
            self.verifications.remember(key, facts, carriers=found)
        return found

    def _found_within_memory(self, plain: Plain, call: Call) -> Found:
        """Return what is found in the call, or in one with fewer tokens if a rank has no memory for the whole batch.

        The same arguments carry the batch at any size.
        """
        found: Found | None = None
        try:
            found = self._found(plain, call)
        except Exception as error:
            if not (self.alone and is_out_of_memory(error)):
                raise
        everywhere = not self.alone or self.every_rank(found is not None)
        return found if everywhere and found is not None else self._found(plain, self._smaller(plain, call))

    def _smaller(self, plain: Plain, call: Call) -> Call:
        """Return the largest call with fewer tokens that every rank can run. Raises PlanError where none can be."""
        for each in smaller_calls_of(self.network, call):
            fits = False
            try:
                each.passed_to(plain)
                fits = True
            except Exception as error:  # other arguments may hold the number of tokens
                if not (is_out_of_memory(error) or is_of_the_split(error)):
                    raise
            if self.every_rank(fits):
                return each.args, each.kwargs
        raise PlanError(
            f"a plain forward of {type(self.network).__name__} with both guidance branches, with which the split one "
            "is compared, does not fit in the memory of every rank, nor is there one with fewer tokens: verify=False "
            "leaves the comparison out"
        )

    def smaller_parts(self, plain: Plain, call: Call, rank: int) -> Iterator[tuple[Run, Run]]:
        """Yield what runs calls with fewer tokens, the largest first: for our part of the whole, and for that alone.

        None where a plain forward takes several ranks, or where parts of a list are padded to its longest.
        """
        found = self.of(plain, call)
        for each in smaller_calls_of(self.network, call) if self.alone else ():
            smaller = each.args, each.kwargs
            batch = Batch.of(sample_of(*smaller), found)
            if batch.by_item:
                return
            yield (
                partial(self._part_of_whole, plain, smaller, rank),
                partial(self._part, plain, smaller, batch, rank),
            )

    def _part_of_whole(self, plain: Plain, call: Call, rank: int) -> list[Tensor]:
        return [x.chunk(self.ranks)[rank] for x in floats_in(_whole(plain, call))]

    def compared_smaller(self, plain: Plain, call: Call) -> Comparison:
        """Return how far joined parts of a call with fewer tokens are from the whole, where `call` does not fit.

        Collective. Raises PlanError.
        """
        found = self.of(plain, call)
        with full_precision():
            return self._compared(plain, self._smaller(plain, call), found)

    def _found(self, plain: Plain, call: Call) -> Found:
        failures: list[Exception] = []
        for found in self._ways(plain, call):
            try:
                compared = self._compared(plain, call, found)
            except _FillsACache:
                return NOT_SHARED
            except Exception as failure:
                if not is_of_the_split(failure):
                    raise
                failures.append(failure)
            else:
                if compared.error <= compared.limit:
                    return found
                failures.append(VerificationError(f"off by {compared.error:.1e}"))
        unsupported = next((each for each in failures if isinstance(each, UnsupportedModel)), None)
        reasons = "; ".join(dict.fromkeys(map(in_one_line, failures)))
        raise unsupported or VerificationError(
            f"{type(self.network).__name__} with its batch shared between {self.ranks} ranks differs from the whole "
            f"batch on one rank ({reasons}): neither shapes nor perturbed inputs show which of its arguments carry the "
            f"batch ({', '.join(arguments_of(call))}). Run it with cfg=1 and give the devices to another axis, e.g. "
            "patch"
        )

    def _ways(self, plain: Plain, call: Call) -> Iterator[Found]:
        yield {}
        if isinstance(sample_of(*call), Tensor):
            found, unmoved = carriers_in(_without_given(plain), call, self.ranks)
            yield found
            yield {**dict.fromkeys(unmoved), **found}
            yield {**unmoved, **found}

    def _compared(self, plain: Plain, call: Call, found: Found) -> Comparison:
        """Return the relative error of joined parts against the whole, the first that rounding does not explain."""
        batch, worst = Batch.of(sample_of(*call), found), Comparison(0.0, math.inf)
        for each in (call, with_noise_for_zeros(call)):
            if each is None:
                continue
            whole = _whole(plain, each)
            parts = [self._part(plain, each, batch, rank) for rank in range(self.ranks)]
            want, got = floats_in(batch.as_joined(whole, parts)), floats_in(batch.join(parts))
            error = max(relative_error(x, y) for x, y in zip(got, want, strict=True))
            worst = max(worst, Comparison(error, rounding_limit(want)))
            if not worst.error <= worst.limit:
                break
        return worst

    def _part(self, plain: Plain, call: Call, batch: Batch, rank: int) -> Any:
        """Return the output of one rank's part."""
        args, kwargs = batch.part(call, rank, self.ranks)
        with at_own_index(self.by_branch(), rank, self.ranks):
            return _without_given(plain)(*args, **kwargs)


class _FillsACache(Exception):
    """A call writes to its arguments and returns them."""


def _whole(plain: Plain, call: Call) -> Any:
    """Return the output of the whole call without its arguments. Raises _FillsACache."""
    before = written(call)
    output = plain(*call[0], **call[1])
    if written(call) != before and gives_back(output, call):
        raise _FillsACache
    return without_given(output, call)


def carriers_of(
    network: nn.Module,
    mesh: AxisComm,
    verifications: VerificationCache,
    by_branch: Layers = tuple,
    *,
    together: Axis | None = None,
) -> BatchArguments:
    """Return the batch arguments of a network whose batch the ranks of `mesh` split.

    `together`: all ranks that a plain forward of the network takes, if it takes more.
    """
    comm, axis = mesh
    agreed = partial(known_to_all, (comm, together or axis), type(network).__name__)
    found = BatchArguments(network, axis.size, verifications, agreed, by_branch)
    found.alone, found.every_rank = together is None, partial(every_rank_has, mesh, "memory")
    return found


def carriers_in(plain: Plain, call: Call, parts: int) -> tuple[Found, Found]:
    """Perturb every argument with a dim of the batch's size; return that dim, None where it is not the batch.

    Also return the arguments that change no output, each with the last dim of that size.
    """
    sample, tensors = sample_of(*call), tensors_in(call)
    batch, found, unmoved = Batch.of(sample), dict[str, int | None](), dict[str, int | None]()
    before = floats_in(plain(*call[0], **call[1]))
    paths = [path for path, leaf in paths_of(call) if isinstance(leaf, Tensor)]
    for number, (path, x) in enumerate(zip(paths, tensors, strict=True)):
        dims = [dim for dim in range(x.ndim) if batch.fits(x.shape[dim])]
        if x is sample or not dims:
            continue
        moved = [_moved(plain, call, before, (number, dim, x.shape[dim] // parts), batch.size // parts) for dim in dims]
        if any(moved):
            found[path] = next((dim for dim, who in zip(dims, moved, strict=True) if who == "its own"), None)
        else:
            unmoved[path] = max(dims, key=lambda dim: (x.shape[dim] == batch.size, dim))
    return found, unmoved


def _moved(plain: Plain, call: Call, before: list[Tensor], where: tuple[int, int, int], own: int) -> str:
    """Return whose predictions change with the last rows of an argument: none (""), "its own", or "others"."""
    number, dim, rows = where
    tensors = tensors_in(call)
    size = tensors[number].shape[dim]
    tensors[number] = disturbed(tensors[number], dim, torch.arange(size - rows, size))
    args, kwargs = with_tensors(call, tensors)
    try:
        after = floats_in(plain(*args, **kwargs))
    except Exception as error:
        if not is_of_the_split(error):
            raise
        return "others"  # the network refuses other values
    rows_moved = torch.stack([moved_indices(x, y)[0] for x, y in zip(before, after, strict=True)]).any(0)
    if not rows_moved.any():
        return ""
    return "others" if rows_moved[:-own].any() else "its own"


def _without_given(plain: Plain) -> Plain:
    """Return a forward whose output has none of its arguments."""
    return lambda *args, **kwargs: without_given(plain(*args, **kwargs), (args, kwargs))


def _read(raw: Any) -> Found:
    if not isinstance(raw, dict) or not all(dim is None or type(dim) is int for dim in raw.values()):
        raise ValueError(f"not a mapping of paths to dims: {raw!r:.80}")
    return {str(path): dim for path, dim in raw.items()}
