"""What the ranks of the tests of encoders run: tiny pipelines whose encoders are on the first rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from patchpar.errors import PatchparError
from patchpar.models.encoders import encoders_of
from patchpar.shard.encoders.absent_weights import AbsentWeight
from patchpar.shard.encoders.one_rank import OneRankEncoders
from tests import tiny
from tests.ranks import PoolRank

SENTENCE = "two images of a dog"


@contextmanager
def on_the_first(this: PoolRank, pipe: Any) -> Iterator[OneRankEncoders]:
    """While open, the first rank holds the encoders of `pipe`."""
    encoders = encoders_of(pipe)
    others = [each for name, each in pipe.components.items() if isinstance(each, nn.Module) and name not in encoders]
    axis = this.mesh(patch=this.world).of_one_image()
    one = OneRankEncoders(encoders, others, axis, torch.device("cpu"), this.comm)
    try:
        yield one
    finally:
        one.give_back()


def held_bytes(pipe: Any) -> int:
    """Bytes of the encoders' weights that this rank holds."""
    weights = {id(each): each for network in encoders_of(pipe).values() for each in network.parameters()}
    return sum(0 if isinstance(each.data, AbsentWeight) else each.nbytes for each in weights.values())


def states_of(pipe: Any) -> dict[str, torch.Tensor]:
    return {
        f"{name}.{key}": value.clone()
        for name, network in encoders_of(pipe).items()
        for key, value in network.state_dict().items()
    }


def final_latents(this: PoolRank, name: str, exchange: str = "on") -> dict[str, Any]:
    """The latents of a call with and without the transfer, the encoders' bytes, and whether all came back."""
    made = tiny.build(name)
    pipe = made.pipe
    want, before, identities = tiny.latents(made, steps=2), states_of(pipe), _identities(pipe)
    whole, forwards = held_bytes(pipe), _forwards(pipe)
    with on_the_first(this, pipe) as one:
        one.exchange, meanwhile = exchange, held_bytes(pipe)
        got = tiny.latents(made, steps=2)
    after = states_of(pipe)
    return {
        "equal": torch.equal(got, want),
        "whole": whole,
        "meanwhile": meanwhile,
        "restored": all(torch.equal(before[key], after[key]) for key in before) and before.keys() == after.keys(),
        "same objects": identities == _identities(pipe),
        "no trace": _forwards(pipe) == forwards,
    }


def _modules(pipe: Any) -> list[nn.Module]:
    return [module for network in encoders_of(pipe).values() for module in network.modules()]


def _forwards(pipe: Any) -> list[Any]:
    """What stands in place of the methods of classes: transformers 5.0 leaves the method itself there."""
    return [vars(each).get("forward") for each in _modules(pipe)]


def _identities(pipe: Any) -> list[int]:
    return [id(weight) for network in encoders_of(pipe).values() for weight in network.parameters()]


class Scripted(nn.Module):
    """An encoder with outputs of many kinds, which samples, and fails if asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 4))

    def forward(self, kind: str) -> Any:
        if kind == "fails":
            raise ArithmeticError("no such token")
        if kind == "unsendable":
            return self.weight.detach() @ torch.ones(4), lambda: None
        x = self.weight.detach() * torch.rand(3, 4)
        return {"none": None, "views": (x.t(), x[:, :1].expand(3, 4), x, x), "nested": [{"a": x.bool(), "b": "text"}]}[
            kind
        ]


def outputs(this: PoolRank) -> list[Any]:
    """What each rank gets for each kind of output, as bytes, strides and aliases, and the next random number."""
    encoder, found = Scripted(), list[Any]()
    one = OneRankEncoders(
        {"encoder": encoder}, [], this.mesh(patch=this.world)["patch"], torch.device("cpu"), this.comm
    )
    torch.manual_seed(this.rank)
    for kind in ("views", "none", "nested"):
        found.append(_plain(encoder(kind)))
        found.append(torch.rand(1).item())
    for kind in ("fails", "unsendable"):
        try:
            encoder(kind)
        except Exception as error:  # noqa: BLE001  the test looks at it
            found.append(f"{type(error).__name__}: {error}")
    one.give_back()
    found.append(encoder.weight.tolist())
    return found


def of_inference_mode(this: PoolRank) -> bool:
    """Whether autograd refuses a weight that has come back in torch's inference mode."""
    encoder = Scripted()
    one = OneRankEncoders(
        {"encoder": encoder}, [], this.mesh(patch=this.world)["patch"], torch.device("cpu"), this.comm
    )
    with torch.inference_mode():
        one.give_back()
    return encoder.weight.is_inference()


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist(), value.stride(), str(value.dtype)
    if isinstance(value, tuple):
        return [_plain(each) for each in value], value[2] is value[3]
    if isinstance(value, list):
        return [{key: _plain(each) for key, each in value[0].items()}]
    return value


def uses(this: PoolRank) -> dict[str, str]:
    """What other uses of an encoder give on this rank: a value, or the refusal."""
    pipe = tiny.build("sdxl").pipe
    encoder = pipe.text_encoder
    asked = {
        "dtype": lambda: encoder.dtype,
        "device": lambda: encoder.device,
        "pipeline's device": lambda: pipe.device,
        "config": lambda: encoder.config.hidden_size,
        "number of weights": lambda: sum(weight.numel() for weight in encoder.parameters()),
        "moved to where it is": lambda: type(encoder.to("cpu").to(torch.float32)).__name__,
        "converted": lambda: encoder.to(torch.float16),
        "a weight": lambda: next(encoder.parameters()).sum().item(),
        "embeddings": lambda: encoder.get_input_embeddings().weight[:1].tolist(),
    }
    found = {}
    with on_the_first(this, pipe):
        for name, ask in asked.items():
            if name == "converted" and this.rank == 0:
                continue
            try:
                found[name] = str(ask())
            except PatchparError as error:
                found[name] = f"{type(error).__name__}: {error}"
    return found
