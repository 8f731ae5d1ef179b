"""What foreign code is refused for: plans under which no rank can run the plain call after the first one."""

from torch import nn

from patchpar.errors import PatchparError, PlanError, UnsupportedModel
from patchpar.shard.fingerprint import Fingerprint, fingerprint
from patchpar.shard.verification_cache import VerificationCache

MOST_LISTED = 3  # additions of other libraries
TOO_LARGE = {
    False: "nor is there one with fewer tokens that does",
    True: "and the tensors that this code keeps from one call to the next are not those of a call with fewer tokens",
}
"""Why no smaller call is compared, by whether foreign code depends on tensors of the calls before."""
OTHER_WORK = "and in a call with fewer tokens this code does something else"


def untrusted(found: Fingerprint, verifications: VerificationCache | None) -> tuple[str, ...]:
    """Return descriptions of the foreign code that is not trusted by name; none where nothing is verified."""
    if verifications is None:
        return ()
    return tuple(what for what, origin in found.origins.items() if not is_trusted(origin, verifications))


def is_trusted(origin: str, verifications: VerificationCache | None) -> bool:
    """Whether code of that dotted name belongs to a trusted module or package."""
    names = () if verifications is None else verifications.trusted
    return any(origin == name or origin.startswith(f"{name}.") for name in names)


def listed(names: tuple[str, ...]) -> str:
    """Return a text that names foreign code, for messages."""
    more = f" and {len(names) - MOST_LISTED} more" if len(names) > MOST_LISTED else ""
    return f"What was put into it ({'; '.join(names[:MOST_LISTED])}{more})"


def without_plain_call(network: nn.Module, blamed: str, way_out: str, memory: str = "") -> PatchparError:
    """Return the error where some rank has no output of the plain call to compare with.

    `memory`: why not of a smaller one, where it lacks the memory for the plain call.
    """
    if not memory:
        return UnsupportedModel(
            f"{blamed} keeps tensors of this rank's part from one call to the next, and now does what it did "
            f"not in its first call, so that the call cannot be compared with a plain one: {way_out}"
        )
    return PlanError(
        f"a plain call of {type(network).__name__}, with which calls that run code of another library or your own are "
        f"compared, does not fit in the memory of every rank, {memory}. {blamed}: verify=False leaves the "
        "comparison out, a smaller image needs less memory"
    )


def refuse_untrusted(network: nn.Module, verifications: VerificationCache | None, divided: str, way_out: str) -> None:
    """Raise UnsupportedModel for foreign code whose later calls nobody can compare: weights are `divided`."""
    names = untrusted(fingerprint(network), verifications)
    if names:
        raise UnsupportedModel(
            f"{type(network).__name__} holds code of another library or your own, which may do something else in later "
            f"steps than in the first, and with {divided} no rank can compare these with plain calls. {listed(names)}: "
            f"{way_out}, or name its module in trusted_code=[...] if it does the same in every step"
        )
