"""What ranks run here: transformers of which each rank holds some features, against the same ones whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_flux2 import Flux2KVAttnProcessor
from torch import Tensor, nn

from patchpar.comm.all_reduce import all_reduce
from patchpar.comm.collectives import AllGather
from patchpar.comm.pytree import floats_in
from patchpar.errors import PatchparError, PlanError
from patchpar.plan.mesh import rank_sets
from patchpar.shard.tensor.denoiser import TensorDenoiser
from patchpar.shard.tensor.feature_plan import FeatureCut
from patchpar.shard.tensor.sharder import KIND, WholeBlocks
from patchpar.shard.verification_cache import VerificationCache
from tests.ranks import PoolRank
from tests.tensors import relative
from tests.tiny.transformers import TRANSFORMERS
from tests.unit.collectives_on_ranks import over_torch


def error_of(found: Any, wanted: Any) -> float:
    """The largest relative error; what is all zeros in one process, such as unused caches, has to be so here too."""
    pairs = list(zip(floats_in(found), floats_in(wanted), strict=True))
    assert not any(x.any() for x, y in pairs if not y.any())
    return max(relative(x, y) for x, y in pairs if y.any())


def state_of(network: nn.Module) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in network.state_dict().items()}


def divided(this: PoolRank, network: nn.Module, folder: str | None = None) -> TensorDenoiser:
    trusted = frozenset({"tests"})  # a hook that counts is code which stays in the network
    verifications = None if folder is None else VerificationCache(Path(folder) / str(this.rank), trusted=trusted)
    return TensorDenoiser(network, (this.comm(), this.mesh(tensor=this.world)["tensor"]), verifications)


@torch.no_grad()
def transformer(this: PoolRank, name: str) -> dict[str, Any]:
    """Calls of two sizes; the error where nothing is added up; what a rank holds and sends; the state afterwards."""
    tiny = TRANSFORMERS[name]
    network = tiny.build()
    before, wanted = state_of(network), [network(**tiny.call(number)) for number in range(2)]
    held = sum(x.numel() for x in network.parameters())
    tensor = divided(this, network)
    tensor.prepare(network.forward, ((), tiny.call(0)))
    comm = tensor.mesh[0]
    assert not comm.traffic.bytes_sent
    errors = [error_of(network(**tiny.call(number)), wanted[number]) for number in range(2)]
    sent, part = dict(comm.traffic.bytes_sent), sum(x.numel() for x in network.parameters()) / held
    tensor.exchange = "off"
    tensor.prepare(network.forward, ((), tiny.call(0)))
    alone = error_of(network(**tiny.call(0)), wanted[0])
    assert dict(comm.traffic.bytes_sent) == sent
    tensor.restore()
    tensor.restore()
    after = network.state_dict()
    same = before.keys() == after.keys() and all(torch.equal(x, after[key]) for key, x in before.items())
    again = all(torch.equal(x, y) for x, y in zip(*map(floats_in, (network(**tiny.call(0)), wanted[0])), strict=True))
    hooked = [path for path, module in network.named_modules() if hasattr(module, "_diffusers_hook")]
    return {
        "errors": errors,
        "alone": alone,
        "part": part,
        "kinds": sorted(sent),
        "restored": same and again and not hooked,
    }


@torch.no_grad()
def failed_midway(this: PoolRank, where: str) -> dict[str, Any]:
    """A cut that fails on the last rank, or whose blocks do not go where they belong; and the next one."""
    tiny, cuts = TRANSFORMERS["FluxTransformer2DModel"], list[str]()
    network = tiny.build()
    before, wanted, part = state_of(network), network(**tiny.call(0)), FeatureCut.part
    tensor = divided(this, network)
    tensor.prepare(network.forward, ((), tiny.call(0)))
    plan, message = tensor.plan, "not refused"
    tensor.restore()

    def fail(cut: FeatureCut, x: Tensor, dim: int, rank: int) -> Tensor:
        cuts.append(cut.path)
        if this.rank == this.world - 1 and len(cuts) == 20:
            raise MemoryError("no memory")
        return part(cut, x, dim, rank)

    tensor.plan = plan
    with pytest.MonkeyPatch.context() as patch:
        if where == "one rank":
            patch.setattr(FeatureCut, "part", fail)
        else:
            tensor.weights = NowhereToGo()
        try:
            tensor.prepare(network.forward, ((), tiny.call(0)))
        except Exception as error:  # noqa: BLE001 - the test looks at it
            message = f"{type(error).__name__}: {error}"
    if not is_whole(network, before):
        return {"message": message, "whole": False}
    tensor.weights = WholeBlocks()
    tensor.prepare(network.forward, ((), tiny.call(0)))
    error = error_of(network(**tiny.call(0)), wanted)
    tensor.restore()
    return {"message": message, "whole": is_whole(network, before), "error": error}


class NowhereToGo(WholeBlocks):
    """Where there is no room for blocks."""

    def settle(self) -> None:
        raise PlanError("no room")


def is_whole(network: nn.Module, before: dict[str, Tensor]) -> bool:
    """Whether every bit of a network is as before, and nothing of a cut is left."""
    after, linears = network.state_dict(), [each for each in network.modules() if isinstance(each, nn.Linear)]
    same = before.keys() == after.keys() and all(torch.equal(x, after[key]) for key, x in before.items())
    sized = all(each.weight.shape == (each.out_features, each.in_features) for each in linears)
    return same and sized and not any(hasattr(module, "_diffusers_hook") for module in network.modules())


@torch.no_grad()
def restored_late(this: PoolRank) -> dict[str, Any]:
    """Whole weights that do not fit are refused, a gather that fails is made again: nothing is lost."""
    tiny = TRANSFORMERS["FluxTransformer2DModel"]
    network = tiny.build()
    before, wanted = state_of(network), network(**tiny.call(0))
    tensor, calls = divided(this, network), list[int]()
    tensor.prepare(network.forward, ((), tiny.call(0)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("patchpar.shard.weights.stores.free_bytes", lambda device: 1000)
        with pytest.raises(PlanError, match="iB when they are whole, more than is free"):
            tensor.restore()
    error, gather = error_of(network(**tiny.call(0)), wanted), AllGather.parts

    def fail(own: AllGather, *args: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            raise MemoryError("no memory")
        return gather(own, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AllGather, "parts", fail)
        with pytest.raises(MemoryError):
            tensor.restore()
    tensor.restore()
    return {"error": error, "whole": is_whole(network, before)}


def of_inference_mode(this: PoolRank) -> list[bool]:
    """Of each weight, whether autograd refuses it after a cut, and the end, in torch's inference mode."""
    tiny = TRANSFORMERS["FluxTransformer2DModel"]
    network = tiny.build()
    tensor = divided(this, network)
    with torch.inference_mode():
        tensor.prepare(network.forward, ((), tiny.call(0)))
        tensor.restore()
    return [weight.is_inference() for weight in network.parameters()]


@torch.no_grad()
def kept_in_files(this: PoolRank, folder: str, name: str) -> list[Any]:
    """A plan is found and verified once; the second program finds both. A rank without its file searches with all."""
    tiny, found = TRANSFORMERS[name], []
    for number in range(3):
        if number == 2 and this.rank == 1:
            for file in (Path(folder) / "1").iterdir():
                file.unlink()
        network = tiny.build()
        wanted = network(**tiny.call(0))
        calls: list[int] = []
        handle = network.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        tensor = divided(this, network, folder)
        tensor.prepare(network.__call__, ((), tiny.call(0)))
        handle.remove()
        assert tensor.plan is not None
        found.append((len(calls), tensor.error, error_of(network(**tiny.call(0)), wanted), tensor.plan.to_json()))
    return found


@torch.no_grad()
def sums(this: PoolRank, through_torch: bool) -> list[tuple[Tensor, float]]:
    """Small and large sums in two dtypes: the same bits everywhere, and the bytes that a rank sends."""
    comm = this.comm()
    if through_torch:
        comm, transport = over_torch(this, collective=True)
        assert transport.collectives is not None
        transport.collectives.form(rank_sets(range(this.world), tensor=this.world))
    axis, found = this.mesh(tensor=this.world)["tensor"], []
    for shape in ((3, 5), (3, 5, 1999)):
        for dtype in (torch.float32, torch.bfloat16):
            own = torch.randn(shape, generator=torch.Generator().manual_seed(this.rank)).to(dtype)
            comm.traffic.clear()
            total = all_reduce((comm, axis), KIND, "sum", own)
            found.append((total, comm.traffic.bytes_sent[KIND] / (own.numel() * own.element_size())))
    if through_torch:
        transport.close()
    return found


@torch.no_grad()
def filling_a_cache(this: PoolRank, folder: str) -> tuple[str, bool]:
    """The message for a call that keeps keys of reference tokens for later calls, and whether all is whole after."""
    tiny = TRANSFORMERS["Flux2Transformer2DModel"]
    network, call = tiny.build(), tiny.call(0) | {"kv_cache_mode": "extract", "num_ref_tokens": 2}
    for block in network.transformer_blocks:
        block.attn.set_processor(Flux2KVAttnProcessor())
    before, message = state_of(network), "not refused"
    try:
        divided(this, network, folder).prepare(network.forward, ((), call))
    except PatchparError as error:
        message = f"{type(error).__name__}: {error}"
    return message, is_whole(network, before)


@torch.no_grad()
def refused(this: PoolRank, change: str) -> str:
    """The message for a network that cannot be divided."""
    tiny = TRANSFORMERS["FluxTransformer2DModel"]
    network: Any = tiny.build()
    if change == "compiled":
        network.transformer_blocks[0].compile()
    elif change == "quantised":
        for linear in [part for part in network.modules() if isinstance(part, nn.Linear)]:
            linear.weight = nn.Parameter(linear.weight.flatten())
            linear.forward = lambda x, linear=linear: nn.functional.linear(x, linear.weight.view(-1, x.shape[-1]))
    elif change == "tied":
        first, second = network.transformer_blocks[0], network.single_transformer_blocks
        for block in second:
            block.proj_out.weight = second[0].proj_out.weight
            block.attn.to_q.weight = first.attn.to_q.weight
    before = state_of(network)
    try:
        divided(this, network).prepare(network.forward, ((), tiny.call(0)))
    except PatchparError as error:
        after = network.state_dict()
        assert all(torch.equal(x, after[key]) for key, x in before.items())
        return f"{type(error).__name__}: {error}"
    return "not refused"
