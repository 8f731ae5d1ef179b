import json
import math

import pytest
import torch
from diffusers import DiffusionPipeline, SD3Transformer2DModel, StableDiffusion3Pipeline, StableDiffusionXLPipeline

from benchmarks.sensitivity.__main__ import Settings, images
from benchmarks.sensitivity.tokens import cut_tokens
from patchpar.models.files import inspect_folder, resolve_model
from training import package
from training.batches import sample_batch
from training.checkpoint import load, save
from training.dit import (
    DIT_CONFIG,
    EMPTY_TOKENS,
    PATCH,
    SIDE_TOKENS,
    CountedEmptyAttention,
    DitNetworks,
    spread_positions,
)
from training.package_dit import assemble, averaged_dit, shared_vae
from training.scenes import LOOKS
from training.stages import DIT_STAGES, Bucket
from training.tokenizer import build_tokenizer, token_ids
from training.train_dit import loss_of, new_dit_run, start_from_dit, train_step

BUCKET = Bucket(height=16, width=16, batch=2, fraction=1)
CAPTION = "a red house on the left, green hills at noon"


def fresh_run():
    torch.manual_seed(0)
    return new_dit_run(torch.device("cpu"))


def steps(run, keys):
    return [train_step(run, sample_batch(key, BUCKET, build_tokenizer()), 1e-3) for key in keys]


@pytest.fixture(scope="module")
def networks():
    torch.manual_seed(0)
    made = DitNetworks()
    made.take_text_side(package.FOLDER)
    return made.eval().requires_grad_(False)


@pytest.fixture
def stock(networks):
    """The networks with the processors that the pipeline will use."""
    kept = networks.transformer.attn_processors
    yield networks
    networks.transformer.set_attn_processor(kept)


def test_one_counted_empty_token_is_all_of_them(stock):
    words, pooled = stock.encode(token_ids(build_tokenizer(), [CAPTION]))
    assert words.shape == (1, 29, 192)
    noisy, time = torch.randn(1, 4, 32, 32), torch.tensor([700.0])
    every = torch.cat([words, torch.zeros(1, EMPTY_TOKENS - 1, 192)], 1)
    whole, one = (stock.transformer(noisy, text, pooled, time, return_dict=False)[0] for text in (every, words))
    stock.transformer.set_attn_processor(CountedEmptyAttention())
    counted = stock.transformer(noisy, words, pooled, time, return_dict=False)[0]
    assert torch.allclose(counted, whole, atol=1e-5)
    assert not torch.allclose(one, whole, atol=1e-3)  # one that counts once is something else


def test_the_text_side_is_that_of_the_unet(networks):
    pipe = StableDiffusionXLPipeline.from_pretrained(package.FOLDER, variant="fp16", torch_dtype=torch.float32)
    wanted, _, pooled, _ = pipe.encode_prompt(CAPTION, device="cpu", do_classifier_free_guidance=False)
    words, both_pooled = networks.encode(token_ids(build_tokenizer(), [CAPTION]))
    assert torch.allclose(words[:, :-1], wanted, atol=1e-5)
    assert not words[:, -1].any()
    assert torch.allclose(both_pooled[:, -128:], pooled, atol=1e-5)
    last = pipe.text_encoder(token_ids(build_tokenizer(), [CAPTION])).pooler_output
    assert torch.allclose(both_pooled[:, :-128], last, atol=1e-5)


def test_the_pipeline_encodes_as_training_did(networks):
    pipe = assemble(networks, shared_vae())
    wanted, _, pooled, _ = pipe.encode_prompt(CAPTION, CAPTION, CAPTION, do_classifier_free_guidance=False)
    words, both_pooled = networks.encode(token_ids(build_tokenizer(), [CAPTION]))
    assert wanted.shape == (1, 28 + EMPTY_TOKENS, 192)
    assert torch.allclose(wanted[:, :29], words, atol=1e-5)
    assert torch.allclose(pooled, both_pooled, atol=1e-5)


def test_small_images_are_spread_over_the_places_of_a_large_one():
    transformer = DitNetworks().transformer
    side = PATCH * SIDE_TOKENS
    middle = transformer.pos_embed.cropped_pos_embed(side, side)
    spread_positions(transformer)
    crop = transformer.pos_embed.cropped_pos_embed
    assert torch.equal(crop(side, side), middle)
    small = crop(side // 2, side // 2).unflatten(1, (SIDE_TOKENS // 2, -1))
    large = middle.unflatten(1, (SIDE_TOKENS, -1))
    assert torch.allclose(small[0, 0, 0], large[0, :2, :2].mean((0, 1)), atol=1e-6)
    assert torch.allclose(small[0, -1, 2], large[0, -2:, 4:6].mean((0, 1)), atol=1e-6)


@pytest.mark.breadth  # test_training.py holds it for the other recipe
def test_training_goes_on_from_its_state_as_if_it_had_not_stopped(tmp_path):
    straight, stopped = fresh_run(), fresh_run()
    steps(straight, "ab")
    steps(stopped, "a")
    save(stopped, tmp_path / "state.pt")
    resumed = new_dit_run(torch.device("cpu"))
    load(resumed, tmp_path / "state.pt")
    steps(resumed, "b")
    assert resumed.progress == straight.progress
    for name, value in straight.networks.named_parameters():
        assert torch.equal(value, resumed.networks.get_parameter(name)), name
    for name, value in straight.average.items():
        assert torch.equal(value, resumed.average[name]), name


@pytest.mark.breadth  # training is not part of the package
def test_the_transformer_is_trained_and_the_text_encoders_are_not():
    run = fresh_run()
    before = {name: value.clone() for name, value in run.networks.named_parameters()}
    first, *_, last = steps(run, ["same"] * 8)
    assert last["loss"] < 0.9 * first["loss"]
    assert first["look"] == pytest.approx(math.log(len(LOOKS)), rel=0.1)
    changed = {name for name, value in run.networks.named_parameters() if not torch.equal(value, before[name])}
    assert changed == set(run.average)
    assert {name.split(".")[0] for name in changed} == {"transformer"}


@pytest.mark.breadth  # training is not part of the package
def test_the_average_is_packaged_and_a_packaged_model_is_a_start(tmp_path):
    run = fresh_run()
    steps(run, "ab")
    save(run, tmp_path / "state.pt")
    size = package.write(assemble(averaged_dit(tmp_path / "state.pt"), shared_vae()), tmp_path / "model")
    assert size <= package.LIMIT_BYTES
    again = fresh_run()
    start_from_dit(again, tmp_path / "model")
    for name, value in run.average.items():
        assert torch.allclose(again.average[name], value, atol=1e-3), name
        assert torch.equal(again.networks.get_parameter(name), again.average[name]), name


def test_a_written_pipeline_renders(tmp_path, networks):
    package.write(assemble(averaged_copy(networks), shared_vae()), tmp_path / "model")
    index = json.loads((tmp_path / "model" / "model_index.json").read_text())
    assert index["text_encoder_3"] == [None, None]
    absent = dict.fromkeys(inspect_folder(tmp_path / "model", "fp16").absent)
    assert {"text_encoder_3", "tokenizer_3"} <= set(absent)
    pipe = DiffusionPipeline.from_pretrained(
        tmp_path / "model", **absent, variant="fp16", local_files_only=True, torch_dtype=torch.float32
    )
    assert isinstance(pipe, StableDiffusion3Pipeline)
    pipe.set_progress_bar_config(disable=True)
    made = pipe(CAPTION, height=64, width=64, num_inference_steps=2, output_type="pt").images
    assert made.shape == (1, 3, 64, 64)
    assert made.std() > 0


def averaged_copy(networks):
    made = DitNetworks()
    made.load_state_dict(networks.state_dict())
    return made


def test_flow_points_from_the_image_to_the_noise():
    """A network that knew the answer would have no loss; one that says the opposite has four times the target's."""
    batch = sample_batch("flow", BUCKET, build_tokenizer())
    flow = batch.noise - batch.latent
    assert loss_of(lambda *_: flow, batch).item() == pytest.approx(0.0, abs=1e-6)
    nothing, opposite = (loss_of(lambda *_, k=k: k * flow, batch).item() for k in (0.0, -1.0))
    assert opposite == pytest.approx(4 * nothing, rel=1e-5)


def test_every_stage_has_whole_tokens():
    for stage in DIT_STAGES.values():
        assert all(bucket.height % PATCH == 0 and bucket.width % PATCH == 0 for bucket in stage.buckets)


@pytest.mark.breadth  # training is not part of the package
@pytest.mark.parametrize("stale", [True, False])
def test_cutting_tokens_matters_only_where_there_is_more_than_one_strip_and_after_the_warm_up(stock, stale):
    pipe = assemble(stock, shared_vae())
    pipe.set_progress_bar_config(disable=True)
    options = {"captions": 1, "side": 64, "steps": 3, "guidance": 3.0}
    exact = images(pipe, Settings(**options, strips=1, warmup=0))
    for strips, warmup, same in ((1, 0, True), (2, 3, True), (2, 1, False)):
        settings = Settings(**options, strips=strips, warmup=warmup)
        with cut_tokens(pipe.transformer, settings, stale=stale):
            assert torch.allclose(images(pipe, settings), exact, atol=1e-4) == same, (strips, warmup)
    assert torch.equal(images(pipe, Settings(**options, strips=1, warmup=0)), exact)


@pytest.mark.breadth
def test_the_packaged_transformer_is_what_the_code_builds():
    source, options, folder = resolve_model("embedded-dit", {})
    assert folder.pipeline == "StableDiffusion3Pipeline"
    assert (options["text_encoder_3"], options["tokenizer_3"], options["variant"]) == (None, None, "fp16")
    files = [path for path in folder.path.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= package.LIMIT_BYTES
    assert {path.suffix for path in files} <= {".json", ".txt", ".safetensors"}
    found = SD3Transformer2DModel.from_pretrained(f"{source}/transformer", variant="fp16", torch_dtype=torch.float32)
    assert {name: found.config[name] for name in DIT_CONFIG} == DIT_CONFIG
    trained, untrained = new_dit_run(torch.device("cpu")), fresh_run()
    start_from_dit(trained, folder.path)
    batch = sample_batch("packaged", Bucket(height=64, width=64, batch=2, fraction=1), build_tokenizer())
    with torch.no_grad():
        assert loss_of(trained.networks, batch) < 0.5 * loss_of(untrained.networks, batch)
