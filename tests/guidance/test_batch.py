"""Which arguments of a denoiser call carry its batch, and that shares join to the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.models.unets.unet_2d_condition import UNet2DConditionOutput

from patchpar.errors import UnsupportedModel
from patchpar.shard.batch import Batch, count_branches, sample_of
from tests.tensors import noise


def test_a_part_of_every_argument_that_carries_the_batch() -> None:
    text = noise(4, 7, 8)
    call = {
        "timestep": torch.tensor(3),
        "encoder_hidden_states": text,
        "added_cond_kwargs": {"text_embeds": noise(4, 5), "image_embeds": [noise(4, 1, 5)]},
        "down_block_additional_residuals": (noise(4, 3, 2, 2), noise(4, 6, 1, 1)),
        "image_rotary_emb": (noise(64, 8), noise(64, 8)),
        "img_shapes": [[(1, 8, 8)]] * 4,
        "skip_layers": [1, 2, 3, 4],
        "size": (8, 8, 8, 8),
        "guidance": None,
        "return_dict": False,
    }
    own = Batch.of(noise(4, 4, 8, 8)).part(call, 1, 2)
    assert torch.equal(own["encoder_hidden_states"], text[2:])
    assert own["added_cond_kwargs"]["text_embeds"].shape == (2, 5)
    assert own["added_cond_kwargs"]["image_embeds"][0].shape == (2, 1, 5)
    assert [x.shape[0] for x in own["down_block_additional_residuals"]] == [2, 2]
    assert type(own["down_block_additional_residuals"]) is tuple
    assert len(own["img_shapes"]) == 2
    for name in ("timestep", "image_rotary_emb", "skip_layers", "size", "guidance", "return_dict"):
        assert own[name] is call[name] or own[name] == call[name], name


def test_masks_of_adapters_are_whole_however_many_there_are() -> None:
    """As many as there are branches, of two images each."""
    masks = [noise(1, 2, 8, 8), noise(1, 2, 8, 8)]
    own = Batch.of(noise(2, 4, 8, 8)).part({"cross_attention_kwargs": {"ip_adapter_masks": masks}}, 1, 2)
    assert own["cross_attention_kwargs"]["ip_adapter_masks"] is masks


@pytest.mark.parametrize("layout", [(2, 4, 3, 8, 8), (2, 3, 4, 8, 8)], ids=["channels first", "frames first"])
def test_frames_multiply_the_batch(layout: tuple[int, ...]) -> None:
    batch = Batch.of(noise(*layout))
    assert batch.part(noise(6, 7, 8), 0, 2).shape == (3, 7, 8)  # the text, once for each frame
    assert batch.part(noise(6, 8), 0, 2).shape == (6, 8)  # a table of positions
    assert batch.part(noise(10, 7, 8), 0, 2).shape == (10, 7, 8)


def test_a_list_of_images_is_divided_by_item() -> None:
    sample = [noise(4, 1, 8, 8, seed=i) for i in range(4)]  # four channels as well: the list decides
    batch = Batch.of(sample)
    own = [batch.part([sample, [noise(5, 3)] * 4], rank, 2) for rank in range(2)]
    assert [len(part) for part in own[1]] == [2, 2]
    assert own[1][0][0] is sample[2]
    joined = batch.join([(parts[0],) for parts in own])
    assert all(a is b for a, b in zip(joined[0], sample, strict=True))


def test_parts_join_to_the_whole() -> None:
    whole = noise(6, 4, 8, 8)
    batch = Batch.of(whole)
    output = batch.join([UNet2DConditionOutput(sample=part) for part in whole.chunk(3)])
    assert isinstance(output, UNet2DConditionOutput)
    assert torch.equal(output.sample, whole)
    assert torch.equal(batch.join([(part, None) for part in whole.chunk(3)])[0], whole)


def test_what_does_not_join_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="cfg=1"):
        Batch.of(noise(2, 4)).join([(torch.ones(3),), (torch.ones(3),)])


@pytest.mark.parametrize("shape", [(1, 4, 8, 8), (2, 4, 8, 8), (1, 16, 64), (1, 4, 3, 8, 8)])
@pytest.mark.parametrize("branches", [2, 3])
def test_repeated_latents_are_branches(shape: tuple[int, ...], branches: int) -> None:
    one = noise(*shape)
    assert count_branches(torch.cat([one] * branches)) == branches
    assert count_branches(list(torch.cat([one] * branches).unbind())) == branches
    assert count_branches(noise(branches * shape[0], *shape[1:])) == 1
    assert count_branches(torch.zeros(branches, *shape[1:])) == 1  # says nothing
    assert count_branches(one[:1]) == 1


def test_branches_show_though_the_conditioning_image_differs() -> None:
    one, image = noise(1, 3, 4, 8, 8), noise(1, 3, 4, 8, 8, seed=1)
    with_image = torch.cat([torch.cat([one] * 2), torch.cat([torch.zeros_like(image), image])], dim=2)
    assert count_branches(with_image) == 2


def test_branches_show_though_the_image_beside_the_noise_differs() -> None:
    """DreamLite has it in columns."""
    one, image = noise(1, 4, 8, 8), noise(1, 4, 8, 8, seed=1)
    beside = torch.cat([torch.cat([one] * 2), torch.cat([torch.zeros_like(image), image])], dim=3)
    assert count_branches(beside) == 2
    assert count_branches(torch.cat([noise(2, 4, 8, 8), torch.cat([image] * 2)], dim=3)) == 1


def test_branches_show_behind_images_to_refer_to() -> None:
    """Z-Image Omni has a list for each branch: images, and what is denoised."""
    one, other, image = noise(4, 1, 8, 8), noise(4, 1, 8, 8, seed=2), noise(4, 1, 6, 8, seed=1)
    assert count_branches([[image, one], [image, one]]) == 2
    assert count_branches([[image, one], [image, other]]) == 1


def test_two_prompts_with_one_mask_are_no_branches() -> None:
    two, mask = noise(2, 4, 8, 8), torch.ones(2, 1, 8, 8)
    assert count_branches(torch.cat([two, mask], dim=1)) == 1


@pytest.mark.parametrize(
    ("args", "kwargs"), [(("found", 1), {}), ((), {"timestep": 1, "hidden_states": "found"}), ((), {"sample": "found"})]
)
def test_the_sample_is_found(args: Any, kwargs: Any) -> None:
    assert sample_of(args, kwargs) == "found"


def test_no_sample_is_told() -> None:
    with pytest.raises(UnsupportedModel, match="timestep, text"):
        sample_of((), {"timestep": 1, "text": 2})


def test_a_video_is_the_sample_whatever_its_name() -> None:
    """Text and positions may come before it, and a number of samples in a list."""
    video = [torch.randn(1, 4, 2, 6, 6)]
    call = {"input_ids": torch.arange(4), "positions": torch.rand(3, 9), "video_tokens": video, "sound": None}
    assert sample_of((), call) is video
    assert sample_of((), {"positions": torch.rand(3, 9), "frames": video[0]}) is video[0]
