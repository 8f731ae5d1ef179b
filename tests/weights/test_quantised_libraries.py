"""Weights that torchao, GGUF and bitsandbytes have quantised, in shards and hosted; see `quantised` for their forms."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from patchpar import ParallelPipeline
from patchpar.comm.collectives import Communicator
from patchpar.launch.messages import decode, encode
from patchpar.plan.mesh import Mesh
from patchpar.shard.weights import packed
from patchpar.shard.weights.outside_reads import keep_what_is_read_outside
from tests import tiny
from tests.tiny.weights import seeded
from tests.unit.threads import on_threads
from tests.weights.on_ranks import equal, joined

pytestmark = pytest.mark.breadth
RANKS = (2, 3, 5)
WIDTH = 64  # GGUF has blocks of 32 values, bitsandbytes of 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(self.norm(x)))


class Network(nn.Module):
    """Five blocks one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def by_torchao(config: str) -> Callable[[Network], None]:
    def quantise(network: Network) -> None:
        from torchao import quantization

        quantization.quantize_(network, getattr(quantization, config)())

    return quantise


def by_gguf(network: Network) -> None:
    for block in network.blocks:
        block.linear = as_gguf(block.linear)


def as_gguf(plain: nn.Linear) -> nn.Linear:
    import gguf
    from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter

    kind, shape = gguf.GGMLQuantizationType.Q8_0, (plain.in_features, plain.out_features)
    codes = torch.from_numpy(gguf.quants.quantize(plain.weight.detach().numpy(), kind))
    layer = GGUFLinear(*shape, bias=plain.bias is not None, compute_dtype=torch.float32)
    layer.weight, layer.bias = GGUFParameter(codes, quant_type=kind), plain.bias
    return layer


def by_bitsandbytes(network: Network) -> None:
    import bitsandbytes

    for block in network.blocks:
        plain = block.linear
        block.linear = bitsandbytes.nn.Linear4bit(WIDTH, WIDTH, compute_dtype=torch.float32, quant_type="nf4")
        block.linear.load_state_dict(plain.state_dict())
        block.linear.to("cpu")  # which quantises


FORMS: dict[str, Callable[[Network], None]] = {
    "int8": by_torchao("Int8WeightOnlyConfig"),
    "float8": by_torchao("Float8WeightOnlyConfig"),
    "gguf": by_gguf,
    "nf4": by_bitsandbytes,
}
PACKAGES = {"int8": "torchao", "float8": "torchao", "gguf": "gguf", "nf4": "bitsandbytes"}


def plain_tensors(network: nn.Module) -> Iterator[Tensor]:
    for x in network.parameters():
        yield from packed.plain_tensors(x)


def without_gathers(weights: Any, run: Callable[[], Tensor]) -> Tensor:
    """What a network returns if blocks find nothing in their slots."""
    weights.settle()
    weights._holds = [None] * len(weights._holds)
    for slot in weights._slots:
        slot.zero_()
    weights._start = weights._take = lambda number: None
    try:
        return run()
    finally:
        del weights._start, weights._take


@pytest.mark.parametrize("form", FORMS)
def test_they_are_sent_to_workers(form: str) -> None:
    """As a pipeline in memory is, which has them from a file of its own (`from_single_file`)."""
    pytest.importorskip(PACKAGES[form], reason=f"pip install {PACKAGES[form]}")
    with seeded(), torch.no_grad():
        network, x = Network().eval().requires_grad_(False), torch.randn(2, WIDTH)
        FORMS[form](network)
        message = encode(network)
        arrived = decode(message)
        assert [type(each) for each in arrived.parameters()] == [type(each) for each in network.parameters()]
        assert torch.equal(arrived(x), network(x))
        message.close()


def test_a_pipeline_with_weights_of_gguf_is_that_of_one_process() -> None:
    """In memory, and so sent to each worker."""
    pytest.importorskip("gguf", reason="pip install gguf")
    found = tiny.build("flux")
    for block in (*found.pipe.transformer.transformer_blocks, *found.pipe.transformer.single_transformer_blocks):
        for name, child in list(block.named_modules()):
            if type(child) is nn.Linear:
                block.set_submodule(name, as_gguf(child))
    call = found.call_kwargs | {"num_inference_steps": 2, "output_type": "latent"}
    wanted = found.pipe(**call, generator=torch.Generator().manual_seed(0)).images
    with ParallelPipeline(found.pipe, devices="cpu:2", plan="patch=2") as pipe:
        got = pipe(**call, generator=torch.Generator().manual_seed(0)).images
    assert (got - wanted).norm() < 1e-5 * wanted.norm()


@pytest.mark.parametrize("kind", ["sharded", "sharded apart", "hosted"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ranks", RANKS)
def test_same_bits_as_whole_weights(ranks: int, form: str, kind: str) -> None:
    pytest.importorskip(PACKAGES[form], reason=f"pip install {PACKAGES[form]}")
    with seeded():
        made = [Network().eval().requires_grad_(False) for _ in range(ranks)]
        x = torch.randn(2, WIDTH)
    plain = made[0].state_dict()
    for network in made[1:]:
        network.load_state_dict(plain)
    for network in made:
        FORMS[form](network)

    @torch.no_grad()
    def on_rank(transport: Any) -> dict[str, Any]:
        network, mesh = made[transport.rank], Mesh(transport.rank, range(ranks), patch=ranks)
        before, wanted = [x.detach().clone() for x in plain_tensors(network)], network(x)
        weights = joined(network, Communicator(transport), mesh["patch"], kind)
        codes = [each for block in weights.blocks for each in block.tensors if each.dtype.itemsize == 1]
        found = [keep_what_is_read_outside(weights, lambda: network(x), mesh["patch"]) == []]
        found += [equal(network(x), wanted) for _ in range(2)]
        alone = equal(without_gathers(weights, lambda: network(x)), wanted)  # the control
        weights.restore()
        same = all(map(torch.equal, before, plain_tensors(network)))
        return {"equal": [*found, equal(network(x), wanted), same], "alone": alone, "codes": len(codes)}

    for found in on_threads(ranks, on_rank, deadline=60.0):
        assert not isinstance(found, Exception), found
        assert all(found["equal"])
        assert not found["alone"]
        assert found["codes"] >= 5
