"""A list of prompts on several ranks gives the images of one call for all of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.pipelines.stable_diffusion.pipeline_output import StableDiffusionPipelineOutput

from patchpar.errors import PlanError
from patchpar.strategies.data.split import PromptSlice, as_one_call, merge_outputs, split_call
from patchpar.strategies.data.text_encoding import TextArguments
from tests import tiny
from tests.breadth import first_of
from tests.tiny import sample_images

LATENT = {"output_type": "latent"}
PROMPTS = ["a red house", "a blue boat", "three tall pines"]


def generators(count: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(10 + i) for i in range(count)]


def on_all(name: str, size: int, call: dict[str, Any]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """What `size` ranks give together, one after another in this process, and the states of their generators."""
    outputs, states = [], []
    for rank in range(size):
        pipe = tiny.build(name)
        given = call | {"generator": fresh(call["generator"])}
        if given["generator"] is None:
            torch.manual_seed(5)
        with as_one_call(pipe.pipe, pipe.call_kwargs | given, rank, size) as own:
            outputs.append(pipe.pipe(**own | LATENT))
        states.append(torch.get_rng_state() if given["generator"] is None else states_of(given["generator"]))
    merged = merge_outputs(outputs)
    return (merged.images if hasattr(merged, "images") else merged.frames), states


def fresh(generator: Any) -> Any:
    if isinstance(generator, list):
        return [g.clone_state() for g in generator]
    return generator and generator.clone_state()


def states_of(generator: Any) -> torch.Tensor:
    return torch.cat([g.get_state() for g in (generator if isinstance(generator, list) else [generator])])


def alone(name: str, call: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    pipe, given = tiny.build(name), call | {"generator": fresh(call["generator"])}
    if given["generator"] is None:
        torch.manual_seed(5)
    output = pipe.pipe(**pipe.call_kwargs | given | LATENT)
    state = torch.get_rng_state() if given["generator"] is None else states_of(given["generator"])
    return (output.images if hasattr(output, "images") else output.frames), state


def error(result: torch.Tensor, expected: torch.Tensor) -> float:
    assert result.shape == expected.shape
    return float((result - expected).norm() / expected.norm())


@pytest.mark.parametrize("generator", ["one for all", "one each", "none"])
@pytest.mark.parametrize("images", first_of([1, 2], 2))
@pytest.mark.parametrize("size", first_of([2, 3], 3))
def test_the_same_images_as_one_call(size: int, images: int, generator: str) -> None:
    given = {"one for all": generators(1)[0], "one each": generators(3 * images), "none": None}[generator]
    call = {"prompt": PROMPTS, "num_images_per_prompt": images, "num_inference_steps": 2, "generator": given}
    expected, state = alone("sdxl", call)
    result, states = on_all("sdxl", size, call)
    assert error(result, expected) <= 1e-5
    if generator != "one each":
        assert all(torch.equal(state, after) for after in states)


@pytest.mark.parametrize(
    "scheduler", first_of(["EulerAncestralDiscreteScheduler", "DDPMScheduler", "LCMScheduler"], "LCMScheduler")
)
def test_noise_sampled_between_steps(scheduler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import diffusers

    plain = tiny.build

    def build(name: str) -> tiny.Tiny:
        pipe = plain(name)
        pipe.pipe.scheduler = getattr(diffusers, scheduler).from_config(pipe.pipe.scheduler.config)
        return pipe

    monkeypatch.setattr(tiny, "build", build)
    call = {"prompt": PROMPTS, "num_inference_steps": 3, "generator": generators(1)[0]}
    assert error(on_all("sd", 2, call)[0], alone("sd", call)[0]) <= 1e-5


@pytest.mark.parametrize(
    "name",
    first_of(
        ["sd_img2img", "sdxl_inpaint", "sd_controlnet", "animatediff", "wan", "flux", "svd"],
        "sdxl_inpaint",
    ),
)
def test_other_kinds(name: str) -> None:
    call = {"prompt": PROMPTS[:2], "num_inference_steps": 2, "generator": generators(1)[0]}
    if name in ("sd_img2img", "sdxl_inpaint", "svd"):
        call["image"] = [sample_images.scene(), sample_images.scene().transpose(0)]
    if name == "sdxl_inpaint":
        call["mask_image"] = [sample_images.mask()] * 2
    if name == "flux":
        call["negative_prompt"] = ["fog", "rain"]
    if name == "svd":
        del call["prompt"]
    assert error(on_all(name, 2, call)[0], alone(name, call)[0]) <= 1e-5


def test_texts_that_are_padded_to_the_longest_of_the_call() -> None:
    """Kandinsky 3 gives its UNet the padding too: the prompts of other ranks decide how much of it there is."""
    prompts, own = ["a red house", "two tall pines by a lake"], generators(2)
    call = {"prompt": prompts, "num_inference_steps": 2, "generator": own}
    expected, _ = alone("kandinsky3", call)
    assert error(on_all("kandinsky3", 2, call)[0], expected) <= 1e-5
    by_itself, _ = alone("kandinsky3", call | {"prompt": prompts[:1], "generator": own[:1]})
    assert error(by_itself, expected[:1]) >= 1e-3


def texts(rank: int) -> TextArguments:
    """One of two prompts."""
    whole = {"prompt": ["a house", "two tall pines"], "image": ["first", "second"]}
    own = {name: value[rank : rank + 1] for name, value in whole.items()}
    return TextArguments(
        whole_call=whole,
        own_call=own,
        own=1,
        total=2,
        rows=lambda count: slice(rank * count // 2, (rank + 1) * count // 2),
    )


def test_arguments_that_are_alike_on_one_rank() -> None:
    """Their texts for other prompts differ, to which ours may be padded."""
    whole = {"prompt": ["a house", "two tall pines"], "negative_prompt": ["a house", "fog"]}
    own = {name: value[:1] for name, value in whole.items()}
    given = TextArguments(whole_call=whole, own_call=own, own=1, total=2, rows=lambda count: slice(0, count // 2))
    assert [given.for_all(own[name]) for name in whole] == list(whole.values())


def test_arguments_for_all_prompts() -> None:
    given = texts(1)
    assert given.for_all(given.own_call["image"]) == ["first", "second"]
    assert given.for_all(["two tall pines"]) == ["a house", "two tall pines"]
    assert given.for_all(["blurred"]) == ["blurred"] * 2
    assert given.for_all("blurred") == "blurred"
    of_two = replace(given, own=2, total=3)
    assert of_two.for_all(["blurred"] * 2) == ["blurred"] * 3
    assert of_two.for_all(["blurred", "dark"]) == ["blurred", "dark"], "of prompts that are not known"


@pytest.mark.parametrize("name", ["gligen_boxes", "negative_ip_adapter_image_embeds", "complex_human_instruction"])
def test_lists_as_long_as_that_of_the_prompts_may_be_for_all(name: str) -> None:
    call = {"prompt": PROMPTS[:2], name: ["one", "other"]}
    assert split_call(call, 1, 2) == call | {"prompt": PROMPTS[1:2]}


def test_rows_of_what_is_encoded_for_all() -> None:
    given, whole = texts(1), torch.arange(24.0).view(4, 6)
    short, ids = torch.zeros(2, 3), torch.zeros(3, 2)
    padded, mask, longer = given.among((short, None, ids), (whole, whole > 0, torch.zeros(7, 2)), images=2)
    assert torch.equal(padded, whole[2:])
    assert torch.equal(mask, (whole > 0)[2:])
    assert len(longer) == 7
    assert torch.equal(given.among([whole[1, :3] + 1e-6], [*whole[:2, :3]])[0], whole[1, :3])
    layers, _ = given.among((torch.zeros(4, 1, 3), None), (torch.arange(40.0).view(4, 2, 5), None))
    assert torch.equal(layers, torch.arange(40.0).view(4, 2, 5)[:, 1:])
    guided, _ = given.among((short, None), (whole, whole > 0))  # two branches, one after the other
    assert torch.equal(guided, whole[[1, 3]])
    with pytest.raises(PlanError, match=r"which of the 4 rows belong to which of the 2 prompts is unknown.*data=1"):
        given.among((short,), (whole,), images=3)
    own = torch.zeros(2, 6)
    assert given.among((own,), (whole,), images=3)[0] is own  # as long as those of all


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_padding_may_differ_where_lengths_do_not(dtype: torch.dtype) -> None:
    """CogView4 pads to the longest, and then to a multiple of 16: as many tokens, and not the same ones."""
    given, whole = texts(1), torch.arange(24, dtype=dtype).view(2, 3, 4)
    assert torch.equal(given.among(whole[1:].roll(1, 1), whole), whole[1:])
    ids = whole.long()
    assert torch.equal(given.among(ids[1:].roll(1, 1), ids), ids[1:])


def test_noise_of_its_own_would_give_other_images() -> None:
    """The control: without the draw for all, rank 1 starts from rank 0's noise."""
    call = {"prompt": PROMPTS[:2], "num_inference_steps": 2, "generator": generators(1)[0]}
    expected, _ = alone("sdxl", call)
    pipe = tiny.build("sdxl")
    own = split_call(pipe.call_kwargs | call | {"generator": fresh(call["generator"])}, 1, 2)
    assert error(pipe.pipe(**own, output_type="latent").images, expected[1:]) > 0.1


def test_afterwards_diffusers_samples_as_before() -> None:
    pipe = tiny.build("sdxl")
    before = tiny.latents(pipe, steps=1)
    with pytest.raises(ZeroDivisionError), as_one_call(pipe.pipe, {"prompt": PROMPTS}, 0, 2):
        raise ZeroDivisionError
    assert torch.equal(before, tiny.latents(pipe, steps=1))


def test_slices_are_even_and_in_order() -> None:
    for total in range(1, 9):
        for size in range(1, total + 1):
            slices = [PromptSlice.of({"prompt": ["p"] * total}, rank, size) for rank in range(size)]
            assert [one.start for one in slices[1:]] == [one.stop for one in slices[:-1]]
            assert slices[0].start == 0
            assert slices[-1].stop == total
            assert max(s.stop - s.start for s in slices) - min(s.stop - s.start for s in slices) <= 1


def test_what_belongs_to_a_prompt_goes_with_it() -> None:
    embeds, seeds = torch.arange(3.0).view(3, 1, 1), generators(6)
    call = {
        "prompt": PROMPTS,
        "prompt_2": ["x", "y", "z"],
        "negative_prompt": "fog",
        "negative_prompt_embeds": embeds,
        "num_images_per_prompt": 2,
        "generator": seeds,
        "latents": torch.arange(6.0).view(6, 1, 1, 1),
        "image": torch.zeros(3, 8, 8),
        "original_image": ["first", "second", "third"],
        "original_size": (512, 512, 3),
        "timesteps": [999, 500, 1],
        "guidance_scale": 5.0,
    }
    own = split_call(call, 1, 2)
    assert own["prompt"] == PROMPTS[2:]
    assert own["prompt_2"] == ["z"]
    assert own["original_image"] == ["third"]
    assert own["generator"] == seeds[4:]
    assert own["negative_prompt_embeds"].tolist() == [[[2.0]]]
    assert own["latents"].flatten().tolist() == [4.0, 5.0]
    for name in ("negative_prompt", "image", "original_size", "timesteps", "guidance_scale", "num_images_per_prompt"):
        assert own[name] is call[name], name


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"prompt": "a house"}, "data=2, but this call has 1 prompt:"),
        ({"prompt": ["a house"]}, "give a list of at least 2 prompts"),
        ({"prompt_embeds": torch.ones(1, 2, 3)}, "1 prompt"),
        ({"prompt": PROMPTS, "generator": generators(2)}, "generator has 2 entries for 3 prompts"),
        ({"prompt": PROMPTS, "negative_prompt": ["fog", "rain"]}, "negative_prompt has 2 entries for 3 prompts"),
        ({"prompt": PROMPTS, "colours": ["red", "green", "blue"]}, "colours is a list of 3 for 3 prompts"),
    ],
)
def test_what_cannot_be_divided_is_told(call: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        split_call(call, 0, 2)


@pytest.mark.parametrize("given", [None, generators(2)], ids=["no generator", "one each"])
def test_one_image_for_all_prompts_is_refused(given: Any) -> None:
    """Some pipelines encode it once, with the first generator alone."""
    pipe = tiny.build("sd_img2img")
    call = pipe.call_kwargs | {"prompt": PROMPTS[:2], "num_inference_steps": 2, "generator": given}
    with pytest.raises(PlanError, match=r"one image for 2 prompts.*a list of 2"), as_one_call(pipe.pipe, call, 0, 2):
        pass


@pytest.mark.parametrize(
    "name", first_of(["sd_img2img", "sdxl_inpaint", "sd_t2i", "instruct_pix2pix", "svd"], "sd_img2img")
)
def test_several_results_of_prompts_with_an_image_each_are_refused(name: str) -> None:
    """diffusers gives the second result of the first prompt the image of the second prompt."""
    pipe = tiny.build(name)
    call = {**pipe.call_kwargs, **two_with_an_image_each(name), IMAGES_OF.get(name, "num_images_per_prompt"): 2}
    with pytest.raises(PlanError, match=r"2 results for each .*of image in turn"), as_one_call(pipe.pipe, call, 0, 2):
        pass


@pytest.mark.parametrize("name", first_of(["sd_controlnet", "if_img2img", "kandinsky3_img2img"], "sd_controlnet"))
def test_several_results_of_prompts_where_each_image_is_repeated(name: str) -> None:
    call = two_with_an_image_each(name) | {"num_images_per_prompt": 2}
    found, wanted = on_all(name, 2, call)[0], alone(name, call)[0]
    assert error(torch.as_tensor(found), torch.as_tensor(wanted)) <= 1e-5


IMAGES_OF = {"svd": "num_videos_per_prompt"}


def two_with_an_image_each(name: str) -> dict[str, Any]:
    images = [sample_images.scene(), sample_images.scene().transpose(0)]
    call = {"prompt": PROMPTS[:2], "image": images, "num_inference_steps": 2, "generator": generators(1)[0]}
    if name == "svd":
        del call["prompt"]
    return call | ({"mask_image": [sample_images.mask()] * 2} if "inpaint" in name else {})


def test_sizes_of_the_branch_without_text() -> None:
    """SDXL gives the sizes of both branches to the rows of a batch in turn; from an image, to each branch its own."""
    sizes = {"negative_original_size": (64, 64), "negative_target_size": (128, 128)}
    call = {"prompt": PROMPTS[:2], "num_inference_steps": 2, "generator": generators(1)[0], **sizes}
    pipe = tiny.build("sdxl")
    refused = pytest.raises(PlanError, match=r"negative_original_size and negative_target_size.*use data=1")
    with refused, as_one_call(pipe.pipe, pipe.call_kwargs | call, 0, 2):
        pass
    call["image"] = [sample_images.scene(), sample_images.scene().transpose(0)]
    assert error(on_all("sdxl_img2img", 2, call)[0], alone("sdxl_img2img", call)[0]) <= 1e-5


@pytest.mark.parametrize("name", ["image", "video", "conditions"])
def test_what_is_given_to_all_prompts_is_not_divided(name: str) -> None:
    class LTXConditionPipeline: ...

    call = {"prompt": PROMPTS[:2], name: ["one", "other"]}
    with pytest.raises(PlanError, match=f"takes {name} as references"), as_one_call(LTXConditionPipeline(), call, 0, 2):
        pass


def test_an_image_given_as_often_as_there_are_prompts_is_that_of_one_call() -> None:
    image = tiny.build("sd_img2img").call_kwargs["image"]
    call = {"prompt": PROMPTS[:2], "num_inference_steps": 2, "generator": generators(2)}
    assert error(on_all("sd_img2img", 2, call | {"image": [image] * 2})[0], alone("sd_img2img", call)[0]) <= 1e-5


@pytest.mark.parametrize("name", ["VQDiffusionScheduler", "AmusedScheduler"])
def test_a_scheduler_that_samples_by_itself_is_refused(name: str) -> None:
    pipe = tiny.build("sd")
    fake = type("Pipe", (), {"scheduler": type(name, (), {})()})()
    with (
        pytest.raises(PlanError, match=rf"{name}.*another scheduler"),
        as_one_call(fake, pipe.call_kwargs | {"prompt": PROMPTS}, 0, 2),
    ):
        pass


def test_a_pipeline_that_mixes_the_results_of_prompts_is_refused() -> None:
    """Its own code takes a mean over the whole batch when the last step is done."""
    fake = type("Kandinsky5I2VPipeline", (), {"scheduler": None})()
    call = {"prompt": PROMPTS, "image": [sample_images.scene()] * 3}
    with pytest.raises(PlanError, match=r"Kandinsky5I2VPipeline.*mean.*use data=1"), as_one_call(fake, call, 0, 2):
        pass


@pytest.mark.parametrize(
    ("parts", "check"),
    [
        ([["a"], ["b", "c"]], lambda x: x == ["a", "b", "c"]),
        ([np.zeros((2, 3)), np.ones((1, 3))], lambda x: x.shape == (3, 3)),
        ([torch.zeros(2, 3), torch.ones(1, 3)], lambda x: x.shape == (3, 3) and x[2, 0] == 1),
    ],
)
def test_outputs_become_one(parts: list[Any], check: Any) -> None:
    outputs = [StableDiffusionPipelineOutput(images=part, nsfw_content_detected=None) for part in parts]
    merged = merge_outputs(outputs)
    assert type(merged) is StableDiffusionPipelineOutput
    assert merged.nsfw_content_detected is None
    assert check(merged.images)
    tuples = merge_outputs([(part, None) for part in parts])
    assert check(tuples[0])
    assert tuples[1] is None


@pytest.mark.parametrize("name", ["BriaFiboEditPipeline", "QwenImage21Pipeline", "VisualClozePipeline"])
def test_images_that_all_prompts_refer_to_are_not_divided(name: str) -> None:
    """As many as there are prompts, they would be taken for one each, and nobody would see that the result is wrong."""
    call = {"prompt": PROMPTS[:2], "image": [sample_images.scene()] * 2}
    pipe = type(name, (), {})()
    with (
        pytest.raises(PlanError, match=f"{name} takes image as references for all prompts.* use data=1"),
        as_one_call(pipe, call, 0, 2),
    ):
        raise AssertionError("it was divided")
    with as_one_call(pipe, {"prompt": PROMPTS[:2]}, 1, 2) as own:
        assert own == {"prompt": PROMPTS[1:2]}


def test_noise_that_asks_no_generator_is_a_row_for_each_image_or_refused() -> None:
    """Some autoencoders are asked for a sample without the generators that were given."""
    from diffusers.models.autoencoders import vae

    torch.manual_seed(5)
    whole, call = vae.randn_tensor((3, 4, 8, 8)), {"prompt": PROMPTS, "generator": generators(3)}
    for rank, rows in enumerate([slice(0, 2), slice(2, 3)]):
        torch.manual_seed(5)
        with as_one_call(tiny.build("sd").pipe, call, rank, 2):
            own = vae.randn_tensor((rows.stop - rows.start, 4, 8, 8))
            assert torch.equal(own, whole[rows])
            with pytest.raises(PlanError, match="samples noise for 4 rows from torch's own generator"):
                vae.randn_tensor((4, 4, 8, 8))


def test_noise_sampled_by_torch_itself_is_that_of_one_call() -> None:
    """As for GLIGEN's images. What has no dim of prompts is of each image alike."""
    pipe, generator = tiny.build("sd").pipe, generators(1)[0]
    torch.manual_seed(5)
    like, whole = torch.zeros(3, 4, 8, 8), torch.randn((3, 4, 8, 8), generator=fresh(generator))
    of_torch, plane, plane_like = torch.randn_like(like), torch.randn(3, 8), torch.randn_like(like[0, 0])
    for rank, rows in enumerate([slice(0, 2), slice(2, 3)]):
        torch.manual_seed(5)
        given = fresh(generator)
        with as_one_call(pipe, {"prompt": PROMPTS, "generator": given}, rank, 2):
            own = torch.randn(rows.stop - rows.start, 4, 8, 8, generator=given)
            assert torch.equal(own, whole[rows])
            assert own.untyped_storage().nbytes() == own.nbytes, "the rows of others take no memory"
            assert torch.equal(torch.randn_like(like[rows]), of_torch[rows])
            assert torch.equal(torch.randn(3, 8), plane)
            assert torch.equal(torch.randn_like(like[0, 0]), plane_like)
            with pytest.raises(PlanError, match="samples noise for 4 rows from torch's own generator"):
                torch.randn_like(torch.zeros(4, 4, 8, 8))


@pytest.mark.parametrize("generator", ["one for all", "none"])
def test_noise_for_a_decoder(generator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """LTX-Video's decoder takes out the last noise, which its pipeline adds by torch's own function."""
    plain = tiny.build

    def build(name: str) -> tiny.Tiny:
        built = plain(name)
        vae = type(built.pipe.vae).from_config({**built.pipe.vae.config, "timestep_conditioning": True})
        torch.manual_seed(0)
        for parameter in vae.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        built.pipe.vae = vae.eval().requires_grad_(False)
        return built

    monkeypatch.setattr(tiny, "build", build)
    monkeypatch.setitem(LATENT, "output_type", "pt")
    given = generators(1)[0] if generator == "one for all" else None
    scene = sample_images.scene(64, 64)
    call = {"prompt": PROMPTS[:2], "image": [scene, scene], "num_inference_steps": 1, "decode_noise_scale": 0.5}
    call |= {"generator": given, "guidance_scale": 1.0}
    assert error(on_all("ltx_image", 2, call)[0], alone("ltx_image", call)[0]) <= 1e-5


class Encoding:
    """A pipeline that pads its texts to the longest, as it is told how many there are, and shows them images."""

    def encode_prompt(self, prompt: list[str], batch_size: int = 1) -> torch.Tensor:
        width = max(map(len, prompt))
        rows = [torch.tensor([float(len(each))] * len(each) + [0.0] * (width - len(each))) for each in prompt]
        return torch.stack(rows).view(batch_size, width)

    def encode_prompt_multiple_images(self, prompt: list[str], images: list[Any], batch_size: int = 1) -> torch.Tensor:
        return self.encode_prompt(prompt, batch_size=batch_size) + len(images[0])


def test_texts_are_encoded_together_whatever_the_method_is_told() -> None:
    """HunyuanImage says how many there are, JoyImage has a method of its own for texts with images."""
    pipe, call = Encoding(), {"prompt": PROMPTS[:2], "generator": generators(2)}
    whole = pipe.encode_prompt(PROMPTS[:2], batch_size=2)
    for rank in range(2):
        with as_one_call(pipe, call, rank, 2) as own:
            assert torch.equal(pipe.encode_prompt(own["prompt"], batch_size=1), whole[rank : rank + 1])
            seen = pipe.encode_prompt_multiple_images(own["prompt"], ["ab"], batch_size=1)
            assert torch.equal(seen, whole[rank : rank + 1] + 2)
    assert "encode_prompt" not in vars(pipe), "taken out again"
    assert len(pipe.encode_prompt(["a"])) == 1


class OfOneText(Encoding):
    def encode_prompt(self, prompt: list[str], batch_size: int = 1) -> torch.Tensor:
        if len(prompt) > 1:
            raise ValueError("one text at a time")
        return super().encode_prompt(prompt, batch_size)


def test_texts_that_cannot_be_encoded_together_are_refused() -> None:
    call = {"prompt": PROMPTS[:2], "generator": generators(2)}
    with (
        pytest.raises(
            PlanError, match=r"not those of all as in one call \(ValueError: one text at a time\): use data=1"
        ),
        as_one_call(pipe := OfOneText(), call, 0, 2) as own,
    ):
        pipe.encode_prompt(own["prompt"], batch_size=1)


def test_tokens_sampled_by_their_probabilities_are_refused() -> None:
    """A language model draws those of the second prompt after those of the first."""
    plain = torch.multinomial
    with (
        pytest.raises(PlanError, match="StableDiffusionPipeline samples tokens"),
        as_one_call(tiny.build("sd").pipe, {"prompt": PROMPTS}, 1, 2),
    ):
        torch.multinomial(torch.ones(2, 4), 1)
    assert torch.multinomial is plain
