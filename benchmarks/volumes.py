"""How much a rank sends per denoiser call under exact patches: counted at the door, and by the closed formula.

    python -m benchmarks.volumes --write docs/figures/volumes.md

Of n ranks, the one at place i with l of L tokens and h of H rows sends, in elements,

    keys, values    (n - 1) * sum over self-attentions of  2 b l C
    halo            sum over convolutions of  b C W  per row and neighbour that reads it
    moments         (n - 1) * sum over group norms of  1 + 2 b G          always 4 bytes each
    prediction      (n - 1) * b C h W

b batch, C channels, W columns, G groups, all as they are at that layer. DistriFusion (arXiv:2402.19481) sends its halo
to everyone, which is (n - 1) / 2 times as much for an inner rank. The formula is evaluated on shapes alone, so that the
real SDXL needs neither weights nor memory.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from patchpar.discover import discover, with_sample_size
from patchpar.patches import Bands, split_bands

KINDS = ("keys and values", "halo", "moments", "prediction")
COUNTED = {"kv": KINDS[0], "prediction": KINDS[3]}  # halo and moments share messages: their sum is compared


@dataclass(slots=True)
class Shapes:
    """What the layers of one call saw: shapes [B, C, ...] of the whole."""

    attentions: list[tuple[int, ...]] = field(default_factory=list)  # [B, L, C]
    convolutions: list[tuple[nn.Module, tuple[int, ...]]] = field(default_factory=list)
    norms: list[tuple[int, int]] = field(default_factory=list)  # [B, G]
    prediction: tuple[int, ...] = ()

    def see(self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A forward pre-hook: note the input of a spatial layer."""
        if isinstance(module, nn.GroupNorm):
            self.norms.append((args[0].shape[0], module.num_groups))
        elif isinstance(module, nn.Conv2d):
            if module.kernel_size[0] > 1:
                self.convolutions.append((module, tuple(args[0].shape)))
        elif hasattr(module, "processor") and kwargs.get("encoder_hidden_states") is None:
            self.attentions.append(tuple(args[0].shape))


def shapes_of(denoiser: nn.Module, call: Mapping[str, Any]) -> Shapes:
    """Run the denoiser once, perhaps on the meta device, and note what its spatial layers see."""
    shapes = Shapes()
    handles = [m.register_forward_pre_hook(shapes.see, with_kwargs=True) for m in denoiser.modules()]
    with torch.no_grad():
        shapes.prediction = tuple(denoiser(**call)[0].shape)
    for handle in handles:
        handle.remove()
    shapes.convolutions = shapes.convolutions[1:]  # the first reads the latent, which every rank holds
    return shapes


def bytes_sent(shapes: Shapes, bands: Bands, place: int, itemsize: int) -> dict[str, int]:
    """The closed formula for bands of rows: bytes that `place` sends in one call, by kind."""
    others, rows = len(bands) - 1, shapes.prediction[-2]
    columns = shapes.prediction[-1]
    tokens = [(b, _own_tokens(length, rows, columns, bands, place), c) for b, length, c in shapes.attentions]
    return {
        "keys and values": others * itemsize * sum(2 * b * own * c for b, own, c in tokens),
        "halo": itemsize * sum(_halo(module, shape, place, others) for module, shape in shapes.convolutions),
        "moments": others * 4 * sum(1 + 2 * b * g for b, g in shapes.norms),
        "prediction": others * itemsize * _product(shapes.prediction[:-2]) * bands.size(place) * columns,
    }


def _halo(module: Any, shape: tuple[int, ...], place: int, others: int) -> int:
    """Elements of the edge rows that go to the places before and after."""
    kernel, stride, padding = module.kernel_size[0], module.stride[0], module.padding[0]
    up = max(0, kernel - stride - padding) if place > 0 else 0
    down = padding if place < others else 0
    return _product(shape[:-2]) * shape[-1] * (up + down)


def _own_tokens(length: int, rows: int, columns: int, bands: Bands, place: int) -> int:
    """Tokens of `place` in a map of `length` tokens: the latent halved some times, rounding up."""
    stride = 1
    while -(-rows // stride) * -(-columns // stride) != length:
        stride *= 2
    first, last = (-(-bands.starts[i] // stride) for i in (place, place + 1))
    return (last - first) * -(-columns // stride)


def _product(sizes: tuple[int, ...]) -> int:
    return int(torch.Size(sizes).numel())


def sdxl() -> tuple[nn.Module, dict[str, Any]]:
    """The UNet of SDXL base 1.0 without weights, and a call for one guidance branch at 1024 x 1024."""
    from diffusers import UNet2DConditionModel

    with torch.device("meta"):
        unet = UNet2DConditionModel(
            sample_size=128,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            block_out_channels=(320, 640, 1280),
            transformer_layers_per_block=(1, 2, 10),
            attention_head_dim=(5, 10, 20),
            cross_attention_dim=2048,
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=256,
            projection_class_embeddings_input_dim=2816,
        )
        added = {"text_embeds": torch.zeros(1, 1280), "time_ids": torch.zeros(1, 6)}
        call = {
            "sample": torch.zeros(1, 4, 128, 128),
            "timestep": torch.zeros(1),
            "encoder_hidden_states": torch.zeros(1, 77, 2048),
            "added_cond_kwargs": added,
        }
    return unet, call


def rounds_of(denoiser: nn.Module, call: Mapping[str, Any]) -> tuple[int, int]:
    """(exchanges of keys and values, other exchanges) of one call, but for the final gather of the prediction."""
    sites = discover(denoiser, denoiser.forward, (), call)
    joined = {conv for norm in sites.norms for conv in norm.convs[:1]}
    alone = [site for site in sites.convs if site.path not in joined and not site.reads_sample]
    return len(sites.attentions), len(sites.norms) + len(alone)


def counted(place: Any, name: str, height: int, width: int) -> dict[str, Any]:
    """On a rank: what the door counts in one call of a tiny denoiser, and what the formula says."""
    from patchpar.strategies.exact import ExactPatch
    from tests.exact import denoisers

    denoiser, call = denoisers.build(name), denoisers.call(name, height, width)
    door = place.door()
    bands = ExactPatch().install(denoiser, door, place.mesh(patch=place.world)["patch"], split="rows")
    with torch.no_grad():
        bands.denoise(denoiser.forward, **call)
        door.traffic.clear()
        bands.denoise(denoiser.forward, **call)
        bands.restore()
        shapes = shapes_of(denoiser, call)
    sent = dict(door.traffic.bytes_sent)
    found = {COUNTED[kind]: sent.pop(kind) for kind in COUNTED}
    formula = bytes_sent(shapes, split_bands(height, place.world, bands.sites.total_stride), place.rank, 4)
    return {
        "counted": found | {"halo and moments": sum(sent.values())},
        "formula": {kind: formula[kind] for kind in found} | {"halo and moments": formula["halo"] + formula["moments"]},
        "rounds": dict(door.traffic.rounds),
    }


def _table_of_sdxl(places: tuple[int, ...] = (2, 4, 8)) -> list[str]:
    unet, call = sdxl()
    kv_rounds, rounds = rounds_of(unet, call)
    lines = [
        f"SDXL base, one guidance branch, half precision: {kv_rounds} exchanges of keys and values per step, {rounds} "
        "others. MB that an inner rank sends per step:",
        "",
        "| picture | ranks | keys and values | halo | moments | prediction | sum |",
        "|---|---|---|---|---|---|---|",
    ]
    for pixels in (1024, 2048, 3840):
        _, resized = with_sample_size((), call, (pixels // 8, pixels // 8))
        shapes = shapes_of(unet, resized)
        for count in places:
            sent = bytes_sent(shapes, split_bands(pixels // 8, count, 4), count // 2 if count > 2 else 0, 2)
            figures = " | ".join(f"{sent[kind] / 1e6:.3f}" for kind in KINDS)
            lines.append(f"| {pixels}² | {count} | {figures} | {sum(sent.values()) / 1e6:.1f} |")
    return lines


def _table_of_tiny() -> list[str]:
    from patchpar.launch.local import LocalExecutor

    lines = [
        "Tiny SDXL, fp32, batch 2, 36 x 24 latent, counted at the door; the formula gives the same to the byte:",
        "",
        "| ranks | rank | keys and values | halo and moments | prediction | formula, sum | counted, sum |",
        "|---|---|---|---|---|---|---|",
    ]
    with LocalExecutor(["cpu"] * 4, "tests.ranks:Ranks") as pool:
        for world in (2, 3, 4):
            found = pool.call("run", "benchmarks.volumes:counted", world, "auto", ("sdxl", 36, 24))[:world]
            for rank, each in enumerate(found):
                own, expected = each["counted"], sum(each["formula"].values())
                parts = " | ".join(f"{own[kind]:,}" for kind in ("keys and values", "halo and moments", "prediction"))
                lines.append(f"| {world} | {rank} | {parts} | {expected:,} | {sum(own.values()):,} |")
                if each["counted"] != each["formula"]:
                    raise SystemExit(f"rank {rank} of {world} sent {own}, but the formula gives {each['formula']}")
    return lines


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="also write the tables to this file")
    options = parser.parse_args()
    text = "\n".join(["# What ranks send each other", "", *_table_of_tiny(), "", *_table_of_sdxl(), ""])
    print(text)
    if options.write:
        options.write.parent.mkdir(parents=True, exist_ok=True)
        options.write.write_text(text)


if __name__ == "__main__":
    main()
