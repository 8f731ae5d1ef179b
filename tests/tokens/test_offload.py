"""Weights that come and go (group offload), are kept in a smaller dtype, or fused, with tokens split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from patchpar.errors import UnsupportedModel
from patchpar.shard.group_offload import HOOK, group_here
from tests import tiny
from tests.breadth import first_of
from tests.conftest import POOL_SIZE
from tests.tensors import relative
from tests.tiny.transformers import TRANSFORMERS

from .changed import Change
from .on_ranks import PipelineCase, arguments, latents_of
from .ranks import LIMIT, predictions
from .test_control import split

FLUX, WAN = "FluxTransformer2DModel", "WanTransformer3DModel"
CPU = torch.device("cpu")
CASTING = {"storage_dtype": torch.bfloat16, "compute_dtype": torch.float32}


def offload(model: Any, kind: str, folder: Path) -> None:
    """Groups of two blocks, whose weights are on disk while they are not used: what is read too early is nothing."""
    groups = {"num_blocks_per_group": 2} if kind == "block_level" else {}
    model.enable_group_offload(CPU, CPU, offload_type=kind, offload_to_disk_path=str(folder), **groups)


@pytest.mark.usefixtures("group_offload")
@pytest.mark.parametrize("kind", first_of(["block_level", "leaf_level"], "block_level"))
@pytest.mark.parametrize("name", first_of([FLUX, WAN], FLUX))
def test_groups_of_blocks(name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while the model is watched, block by block: nothing is shipped here."""
    monkeypatch.setattr("patchpar.shard.transformer.plan_lookup.shipped_for", lambda _: None)
    call, models = TRANSFORMERS[name].call(0), [TRANSFORMERS[name].build() for _ in range(2)]
    with torch.no_grad():
        want = predictions(models[0](**call))[0]
    for rank, model in enumerate(models):
        offload(model, kind, tmp_path / f"weights {rank}")
    for got in split(models, call, tmp_path / "on"):
        assert relative(got, want) <= LIMIT
    assert relative(split(models, call, tmp_path / "on", "off")[0], want) > 100 * LIMIT
    assert not [each for each in models[0].parameters() if each.device.type != "cpu"]


@pytest.mark.usefixtures("group_offload")
def test_groups_that_come_to_another_device(tmp_path: Path) -> None:
    models = [TRANSFORMERS[FLUX].build() for _ in range(2)]
    for model in models:
        model.enable_group_offload(torch.device("cuda:1"), CPU, offload_type="leaf_level")
    words = r"loaded to cuda:1, but this rank is on cpu: use onload_device=torch\.device\('cpu'\), without an index"
    with pytest.raises(UnsupportedModel, match=words):
        split(models, TRANSFORMERS[FLUX].call(0), tmp_path)


@pytest.mark.usefixtures("group_offload")
def test_groups_that_cannot_come_keep_their_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later calls would find no weights on the device."""

    def full() -> None:
        raise torch.OutOfMemoryError("full")

    model: Any = TRANSFORMERS[FLUX].build()
    model.enable_group_offload(CPU, CPU, offload_type="block_level", num_blocks_per_group=2)
    block = model.transformer_blocks[0]
    hook = block._diffusers_hook.get_hook(HOOK)
    before = hook.fn_ref.pre_forward, hook.fn_ref.post_forward
    monkeypatch.setattr(hook.group, "onload_", full)
    with pytest.raises(torch.OutOfMemoryError, match="full"), group_here(block):
        pass
    assert (hook.fn_ref.pre_forward, hook.fn_ref.post_forward) == before


PIPELINES = ("flux", "wan")
CHANGES = {
    "group offload": Change(
        "transformer.enable_group_offload", (CPU,), {"offload_type": "block_level", "num_blocks_per_group": 2}
    ),
    "leaf offload": Change("transformer.enable_group_offload", (CPU,), {"offload_type": "leaf_level"}),
    "casting": Change("transformer.enable_layerwise_casting", (), CASTING),
    "fused projections": Change("transformer.fuse_qkv_projections"),
}
NOTHING = Change("transformer.num_parameters")


@pytest.mark.parametrize("what", first_of(CHANGES, "casting"))
@pytest.mark.parametrize("name", first_of(PIPELINES, "flux"))
def test_after_the_pipeline_is_parallel(ranks: Any, name: str, what: str, tmp_path: Path) -> None:
    """Between two images, and with the seams in."""
    case = PipelineCase(name=name, plan="patch=2", verifications=tmp_path)
    found = ranks.run("tests.tokens.changed:generated_between", POOL_SIZE, case, [NOTHING, CHANGES[what], NOTHING])[0]
    assert len(found) == 3
    for got, want in found:
        assert relative(got, want) <= LIMIT
    assert torch.equal(found[1][0], found[2][0])
    if what == "casting":  # weights have lost digits
        assert relative(found[0][1], found[1][1]) > 10 * LIMIT


@pytest.mark.breadth
@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("name", PIPELINES)
def test_before_it_is(ranks: Any, name: str, what: str, tmp_path: Path) -> None:
    """The pipeline comes with its hooks from the process where they were set."""
    found, change = tiny.build(name), CHANGES[what]
    getattr(found.denoiser, change.method.rpartition(".")[2])(*change.args, **change.kwargs)
    case = PipelineCase(name=name, plan="patch=2", verifications=tmp_path)
    generated = ranks.run("tests.tokens.changed:generated_between", POOL_SIZE, case, [NOTHING], found.pipe)[0]
    want = latents_of(found.pipe(**arguments(case, found)))
    assert relative(generated[0][0], want) <= LIMIT
