import math

import pytest
import torch

from training import package
from training.attention import attend
from training.batches import sample_batch
from training.checkpoint import load, new_run, save, start_from_pipeline
from training.model import noise_scheduler
from training.scenes import LOOKS
from training.stages import Bucket
from training.tokenizer import build_tokenizer
from training.train_unet import train_step
from training.vae import new_vae

BUCKET = Bucket(height=8, width=8, batch=2, fraction=1)


def steps(run, keys):
    alphas = noise_scheduler().alphas_cumprod
    return [train_step(run, sample_batch(key, BUCKET, build_tokenizer()), 1e-3, alphas) for key in keys]


def fresh_run():
    torch.manual_seed(0)
    return new_run(torch.device("cpu"))


@pytest.mark.breadth
def test_training_goes_on_from_its_state_as_if_it_had_not_stopped(tmp_path):
    straight, stopped = fresh_run(), fresh_run()
    steps(straight, "ab")
    steps(stopped, "a")
    save(stopped, tmp_path / "state.pt")
    resumed = new_run(torch.device("cpu"))
    load(resumed, tmp_path / "state.pt")
    steps(resumed, "b")
    assert resumed.progress == straight.progress
    for name, value in straight.networks.named_parameters():
        assert torch.equal(value, resumed.networks.get_parameter(name)), name
        assert torch.equal(straight.average[name], resumed.average[name]), name
    steps(stopped, "c")
    assert not torch.equal(stopped.networks.unet.conv_in.weight, resumed.networks.unet.conv_in.weight)


@pytest.mark.breadth  # training is not part of the package
def test_training_lowers_the_loss_of_a_batch_it_sees_again_and_again():
    run = fresh_run()
    first, *_, last = steps(run, ["same"] * 8)
    assert last["loss"] < 0.9 * first["loss"]


def test_the_average_holds_every_weight():
    run = fresh_run()
    assert set(run.average) == set(run.networks.state_dict())


@pytest.mark.breadth  # it continues from its own state in every run
def test_training_can_start_from_the_packaged_model():
    run = fresh_run()
    start_from_pipeline(run, package.FOLDER)
    alphas = noise_scheduler().alphas_cumprod
    batch = sample_batch("packaged", Bucket(height=32, width=32, batch=4, fraction=1), build_tokenizer())
    trained = train_step(run, batch, 0.0, alphas)["loss"]
    untrained = train_step(fresh_run(), batch, 0.0, alphas)["loss"]
    assert trained < 0.5 * untrained


def test_heads_that_know_nothing_cost_what_chance_costs():
    run = fresh_run()
    for head in (*run.heads.positions, *run.heads.looks):
        torch.nn.init.zeros_(head.bias)
    batch = sample_batch("place", Bucket(height=64, width=64, batch=2, fraction=1), build_tokenizer())
    with torch.no_grad():
        run.networks(batch.latent, batch.timestep, batch.ids)
        position, look = run.heads.loss(torch.tensor([[3, 0], [1, 2]]), torch.tensor([900, 900]))
        assert position.item() == pytest.approx(1 / 3, rel=0.2)
        assert look.item() == pytest.approx(math.log(len(LOOKS)), rel=0.01)
        run.networks(batch.latent, batch.timestep, batch.ids)
        _, low_noise = run.heads.loss(torch.tensor([[3, 0], [1, 2]]), torch.tensor([10, 10]))
        assert low_noise.item() == 0


@pytest.mark.parametrize(("queries", "keys"), [(64, 28), (64, 64), (300, 300)])
def test_plain_attention_is_attention(queries, keys):
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 3, count, 8) for count in (queries, keys, keys))
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    assert torch.allclose(attend(query, key, value), expected, atol=1e-5)


def test_the_middle_attention_of_a_fresh_autoencoder_changes_nothing():
    attention = new_vae().decoder.mid_block.attentions[0]
    tokens = torch.randn(1, 64, 4, 4)
    assert torch.allclose(attention(tokens), tokens)
