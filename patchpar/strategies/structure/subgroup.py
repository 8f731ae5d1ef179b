"""Teams of neighbouring ranks that compute one patch or window together, in bands with fresh values.

The bands are those of exact patch parallelism (`PatchedDenoiser`), over a subgroup of the axis.
"""

from torch import nn

from patchpar.comm.collectives import Communicator
from patchpar.errors import PlanError
from patchpar.plan.exchange_policy import ExchangePolicy
from patchpar.plan.mesh import Axis
from patchpar.shard.unet.denoiser import PatchedDenoiser
from patchpar.shard.unet.discover import splits_into_bands
from patchpar.shard.verification_cache import VerificationCache
from patchpar.strategies.structure.native_size import NativeSize
from patchpar.strategies.structure.sizing import check_teams


def team_of(
    denoiser: nn.Module,
    mesh: tuple[Communicator, Axis],
    bands: int,
    native: NativeSize,
    verifications: VerificationCache | None,
) -> PatchedDenoiser | None:
    """Return the denoiser of this rank's team; None without teams. Without `verifications` it is not verified.

    Raises PlanError for a denoiser without bands or with too few rows, or if `bands` does not divide the ranks.
    """
    comm, axis = mesh
    if bands == 1 or axis.size == 1:
        return None
    check_teams(axis.size, bands)
    if not splits_into_bands(denoiser):
        raise PlanError(
            f"bands={bands}: {type(denoiser).__name__} is no network of convolutions and group norms, and so has no "
            "bands: use bands=1"
        )
    rows = max(native.size)
    if rows // native.unit < bands:
        most = rows // native.unit
        raise PlanError(
            f"bands={bands}: {rows} latent rows make {most} bands of {native.unit}: use at most bands={most}"
        )
    first = axis.rank - axis.rank % bands
    team = Axis(axis.name, axis.rank - first, bands, axis.ranks[first : first + bands])
    return PatchedDenoiser(denoiser, (comm, team), ExchangePolicy(name="exact"), verifications=verifications)
