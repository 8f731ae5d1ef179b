import json
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKL, DiffusionPipeline, StableDiffusionXLPipeline

from benchmarks.sensitivity.__main__ import KINDS, Settings, cut
from tests.breadth import first_of
from training import package
from training.classifier import Judgement
from training.evaluate import score
from training.model import Networks, noise_scheduler
from training.report import COLUMNS, END, ReportFiles, report_files, update_document, update_figures
from training.scenes import Item, Scene
from training.tokenizer import build_tokenizer
from training.vae import new_vae, psnr

MODEL = package.FOLDER


@pytest.fixture(scope="module")
def pipe():
    loaded = DiffusionPipeline.from_pretrained(MODEL, variant="fp16", local_files_only=True, torch_dtype=torch.float32)
    loaded.set_progress_bar_config(disable=True)
    return loaded


def generate(pipe, words, seed=0, size=64):
    generator = torch.Generator().manual_seed(seed)
    options = {"num_inference_steps": 6, "guidance_scale": 3.0, "output_type": "pt"}
    return pipe(words, height=size, width=size, generator=generator, **options).images


def test_the_packaged_model_is_what_the_code_builds(pipe):
    assert isinstance(pipe, StableDiffusionXLPipeline)
    assert isinstance(pipe.vae, AutoencoderKL)
    assert pipe.vae.config.mid_block_add_attention
    assert not pipe.config.force_zeros_for_empty_prompt
    assert pipe.tokenizer.get_vocab() == build_tokenizer().get_vocab()
    shapes = {name: value.shape for name, value in Networks().unet.state_dict().items()}
    assert {name: value.shape for name, value in pipe.unet.state_dict().items()} == shapes


def test_the_packaged_model_is_small_and_safetensors_only():
    files = [path for path in MODEL.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= package.LIMIT_BYTES
    weights = [path.name for path in files if path.suffix not in (".json", ".txt")]
    assert len(weights) == 4
    assert all(name.endswith(".fp16.safetensors") for name in weights)


def test_the_last_noise_level_keeps_a_trace_of_the_image():
    assert noise_scheduler().alphas_cumprod[-1] > 1e-3
    config = json.loads((MODEL / "scheduler" / "scheduler_config.json").read_text())
    assert not config["rescale_betas_zero_snr"]
    assert config["timestep_spacing"] == "trailing"


def test_it_renders_by_caption_and_seed(pipe):
    noon = "a red house on the left, green hills at noon"
    one, again = generate(pipe, noon), generate(pipe, noon)
    assert one.shape == (1, 3, 64, 64)
    assert torch.equal(one, again)
    night = generate(pipe, "a red house on the left, green hills at night")
    assert one.mean() > night.mean() + 0.1


@pytest.mark.breadth
def test_half_precision_generates_the_same_image(pipe):
    """As users of GPUs load it: diffusers upcasts no autoencoder without `post_quant_conv`."""
    half = DiffusionPipeline.from_pretrained(MODEL, variant="fp16", local_files_only=True, torch_dtype=torch.float16)
    half.set_progress_bar_config(disable=True)
    assert psnr(generate(half, "a red house").float(), generate(pipe, "a red house")) > 50


def test_a_pipeline_over_the_limit_is_refused_and_nothing_is_touched(tmp_path, monkeypatch):
    monkeypatch.setattr(package, "LIMIT_BYTES", 1000)
    target = tmp_path / "model"
    target.mkdir()
    (target / "model_index.json").write_text("old")
    with pytest.raises(ValueError, match="limit is 1000"):
        package.write(package.assemble(Networks(), new_vae()), target)
    assert (target / "model_index.json").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_written_pipeline_loads_again(tmp_path):
    networks = Networks()
    size = package.write(package.assemble(networks, new_vae()), tmp_path / "model")
    loaded = DiffusionPipeline.from_pretrained(tmp_path / "model", variant="fp16", local_files_only=True)
    assert torch.equal(loaded.unet.conv_in.weight.float(), networks.unet.conv_in.weight.float())
    assert size <= package.LIMIT_BYTES


def test_the_packaged_autoencoder_stays_without_a_new_one(tmp_path):
    package.write(package.assemble(Networks(), new_vae()), tmp_path / "model")
    kept = package.packaged_vae(tmp_path / "model")
    before = [file.read_bytes() for file in sorted((tmp_path / "model" / "vae").iterdir())]
    package.write(package.assemble(Networks(), kept), tmp_path / "model")
    assert [file.read_bytes() for file in sorted((tmp_path / "model" / "vae").iterdir())] == before


@pytest.mark.breadth  # training is not part of the package
@pytest.mark.parametrize("kind", first_of(KINDS, KINDS[0]))
def test_cutting_matters_only_where_there_is_more_than_one_strip(pipe, kind):
    exact = generate(pipe, "a pine on the left, green hills at noon")
    cutting = {"captions": 1, "side": 64, "steps": 6, "guidance": 3.0, "warmup": 1}
    whole, halves = Settings(**cutting, strips=1), Settings(**cutting, strips=2)
    for stale in (True, False):
        with cut(pipe.unet, [kind], whole, stale=stale):
            assert torch.allclose(generate(pipe, "a pine on the left, green hills at noon"), exact, atol=1e-4)
        with cut(pipe.unet, [kind], halves, stale=stale):
            assert not torch.allclose(generate(pipe, "a pine on the left, green hills at noon"), exact, atol=1e-4)
    assert torch.equal(generate(pipe, "a pine on the left, green hills at noon"), exact)


def test_scores_count_sides_kinds_and_colors():
    left, right = Item(kind="house", color="red", side="left"), Item(kind="pine", color=None, side="right")
    scenes = [
        Scene(time="at noon", terrain="green hills", items=(left, right)),
        Scene(time="at night", terrain="green hills", items=(left,)),
    ]
    seen = [
        Judgement(left=("house", "red"), right=("pine", None), terrain="green hills", time="at noon"),
        Judgement(left=("house", "blue"), right=("tree", None), terrain="desert dunes", time="at night"),
    ]
    figures = score(seen, [{"right"}, {"right"}], scenes)
    assert (figures.scene, figures.kind, figures.color) == (0.5, 1.0, 0.5)
    assert (figures.empty, figures.terrain, figures.time) == (0.0, 0.5, 1.0)
    assert (figures.night, figures.single) == (0.0, pytest.approx(2 / 3))


def test_figures_reach_the_document_each_in_its_place(tmp_path):
    document, figures = tmp_path / "doc.md", tmp_path / "figures.json"
    entry = dict.fromkeys(set(COLUMNS) - {"captions"}, 0.5)
    update_figures("256x256", {**entry, "captions": 64, "steps": 20, "guidance": 3.0, "dtype": "float32"}, figures)
    begin = report_files(Path("other-model")).begin
    target = ReportFiles(figures=figures, document=document, begin=begin)
    for text in ("no place", f"{END}\n{begin}"):
        document.write_text(text)
        with pytest.raises(ValueError, match="no place for figures"):
            update_document(target)
        assert document.read_text() == text
    one, other = (f"{report_files(Path(name)).begin}\nold {name}\n{END}" for name in ("model", "other-model"))
    document.write_text(f"before\n{one}\nbetween\n{other}\nafter")
    update_document(target)
    text = document.read_text()
    assert text.startswith(f"before\n{one}\nbetween")
    assert "| 256x256 | 20 | 3.0 | float32 | 64 | 50 % |" in text
    assert "old other-model" not in text
    assert text.endswith("after")
