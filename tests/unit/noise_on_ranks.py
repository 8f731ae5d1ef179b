"""Ranks in other states than the first one's, which stand for GPUs that sample other numbers from the same state."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from patchpar.comm.collectives import Communicator
from patchpar.errors import ExchangeError, PlanError
from patchpar.shard.encoders.one_rank import OneRankEncoders
from patchpar.shard.shared_noise import FUNCTIONS, METHODS, NoiseOfFirst, sampled_on_one_rank
from patchpar.shard.vae.functions import BandFunctions
from patchpar.shard.vae.parallel import ParallelVae, VaeCallState
from patchpar.shard.vae.split import VaeCall, random_numbers_kept
from tests.ranks import PoolRank

CPU = torch.device("cpu")


def noise_on(this: PoolRank, *, images: int = 1, device: torch.device = CPU) -> tuple[NoiseOfFirst, Communicator]:
    comm = this.comm()
    return NoiseOfFirst((comm, this.mesh(patch=this.world).of_all()), device, images=images), comm


def sample(name: str, generator: torch.Generator | None, *, method: bool) -> Tensor:
    """What one of torch's functions or methods samples, of forms that are not all contiguous."""
    x = torch.full((3, 4), 0.5).t()
    if method:
        arguments = {"multinomial": (2,), "geometric_": (0.5,)}
        return getattr(x, name)(*arguments.get(name, ()), generator=generator)
    like = {"rand_like", "randn_like", "randint_like"}
    given: dict[str, tuple[Any, ...]] = {
        **dict.fromkeys(("rand_like", "randn_like", "bernoulli", "poisson"), (x,)),
        **{"multinomial": (x, 2), "binomial": (4 * torch.ones(3, 4), x.t()), "normal": (x, x), "randperm": (9,)},
        **{"randint_like": (x, 9), "randint": (9, (3, 4)), "rand": (3, 4), "randn": ((3, 4),)},
    }
    more = {} if name in like or generator is None else {"generator": generator}
    return getattr(torch, name)(*given[name], **more)


def everything(this: PoolRank, *, by_default: bool, shared: bool) -> list[Any]:
    """All that torch samples, and what each rank samples next by itself."""
    generator = None if by_default else torch.Generator().manual_seed(this.rank)
    noise, comm = noise_on(this, device=CPU if shared else torch.device("meta"))
    before = [vars(torch)[name] for name in FUNCTIONS]
    torch.manual_seed(this.rank)
    with noise.open():
        found = [sample(name, generator, method=False) for name in FUNCTIONS]
        found += [sample(name, generator, method=True) for name in METHODS]
    assert before == [vars(torch)[name] for name in FUNCTIONS]
    assert not any(name in vars(torch.Tensor) for name in METHODS)
    found += [torch.rand(2, generator=generator), torch.rand(2)]
    return [[x.tolist() for x in found], comm.traffic.bytes_sent["noise"]]


def shared(this: PoolRank, by_default: bool) -> list[Any]:
    return everything(this, by_default=by_default, shared=True)


def apart(this: PoolRank, by_default: bool) -> list[Any]:
    return everything(this, by_default=by_default, shared=False)


def left_out(this: PoolRank) -> str:
    """What the others learn if the last rank does not sample."""
    noise, _ = noise_on(this)
    this.transport.deadline = 0.5
    try:
        with noise.open():
            if this.rank + 1 < this.world:
                torch.rand(3)
            else:
                time.sleep(1.5)
    except ExchangeError as error:
        return str(error)
    return ""


def differently(this: PoolRank) -> str:
    """What ranks learn if the last one samples other numbers of the same size."""
    noise, _ = noise_on(this)
    try:
        with noise.open():
            torch.randn(3) if this.rank + 1 == this.world else torch.rand(3)
    except PlanError as error:
        return str(error)
    return ""


def in_bands(this: PoolRank) -> list[float]:
    """Noise that a VAE in bands of two rows samples: ours of that of the whole image."""

    class Band:
        dim = -2
        fits = settle = staticmethod(lambda *_: True)
        whole = staticmethod(lambda own: own * this.world)
        before = staticmethod(lambda own: own * this.rank)

    torch.manual_seed(this.rank)
    with noise_on(this)[0].open(), BandFunctions(Band()):  # type: ignore[arg-type]
        return torch.randn(2, 1).flatten().tolist()


class Noisy(nn.Module):
    """A VAE that samples as it decodes, and an encoder that samples."""

    def encode(self, x: Tensor) -> Tensor:
        return torch.randn(x.shape)

    def decode(self, x: Tensor) -> Tensor:
        return torch.randn(x.shape)

    def forward(self) -> Tensor:
        return torch.randn(3)


def on_one_rank(this: PoolRank, images: int) -> list[Any]:
    """What a VAE and an encoder on one rank sample there, the bytes for it, and the refusal."""
    noise, comm = noise_on(this, images=images)
    torch.manual_seed(10 + this.rank)
    axis, state = this.mesh(patch=this.world).of_one_image(), VaeCallState()
    vae = ParallelVae(Noisy(), "rank0", (this.comm(), axis), None, state)
    encoders = OneRankEncoders({"encoder": (encoder := Noisy())}, [], axis, CPU, this.comm)
    found: list[Any] = []
    for run in (encoder, lambda: vae.vae.decode(torch.zeros(1, 2, 8, 8))):
        with noise.open(), state.open():
            try:
                found.append(run().flatten()[:3].tolist())
            except PlanError as error:
                found.append(str(error))
    vae.restore()
    encoders.give_back()
    return [*found, comm.traffic.bytes_sent["noise"]]


def in_vain(this: PoolRank) -> tuple[int, str]:
    """The bytes for what nobody uses, also on ranks of which one is for itself, where it is refused all the same."""
    noise, comm = noise_on(this, images=2)
    call = VaeCall(torch.zeros_like, torch.zeros(1), (), {})  # of which a comparison or a corner is taken
    with noise.open(), random_numbers_kept(call):
        torch.rand(3 + this.rank)
    try:
        with noise.open(), sampled_on_one_rank(), random_numbers_kept(call):
            torch.rand(3)
    except PlanError as error:
        return comm.traffic.bytes_sent["noise"], str(error)
    return -1, ""
