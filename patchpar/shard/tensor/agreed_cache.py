"""Verification results that all ranks have which take part in each other's plain calls, as those of axis `tensor` do.

If a rank ran a check that another one found in its file, it would wait for sums, or for parts of weights, that the
other does not send.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from patchpar.comm.collectives import AxisComm, Communicator
from patchpar.plan.mesh import Axis
from patchpar.shard.verification import every_rank_has
from patchpar.shard.verification_cache import VerificationCache

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AgreedCache(VerificationCache):
    """Results that every rank of the axis has; the others count as missing. All ranks of the axis look together."""

    comm: Communicator
    axis: Axis

    def find(self, key: str, what: str, read: Callable[[Any], T]) -> T | None:
        """Return this rank's entry; None where any rank of the axis has none. Raises ExchangeError."""
        found = VerificationCache.find(self, key, what, read)
        return found if every_rank_has((self.comm, self.axis), "known to all", found is not None) else None


def agreed(verifications: VerificationCache | None, together: AxisComm, *, beyond: int = 1) -> VerificationCache | None:
    """Return a cache in which that counts which all of these ranks have; what is given for no more than `beyond`."""
    if verifications is None or together[1].size <= beyond:
        return verifications
    return AgreedCache(verifications.folder, *together, trusted=verifications.trusted)
