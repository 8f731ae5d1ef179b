"""Which calls new workers are told of: those that changed something that still holds."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer

from patchpar.launch.replay import CallEffects, ReplayedCall, ReplayLog
from patchpar.pipeline.caller import CallController
from patchpar.pipeline.state_changes import engine_call, with_whole_paths
from tests import tiny
from tests.breadth import first_of

Call = tuple[str, dict[str, Any]]
Step = tuple[str, tuple[Any, ...]]


def kept(*calls: str | Call, is_fresh: bool = True) -> list[str | Call]:
    """Those of a pipeline's calls that are repeated."""
    replays = ReplayLog()
    for call in calls:
        path, kwargs = (call, {}) if isinstance(call, str) else call
        keep(replays, path, (), kwargs, is_fresh=is_fresh)
    return [(path, kwargs) if kwargs else path for path, _, kwargs in reported(replays)]


def keep(
    replays: ReplayLog, path: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_fresh: bool = True
) -> None:
    """As an executor does when a call has been made."""
    (method, *words), options = engine_call(path, args, kwargs, is_fresh=is_fresh)
    change = options["replay"]
    if change:
        replays.add(ReplayedCall(method=method, args=tuple(words), kwargs={}, expected=0.0, sent=None, change=change))


def reported(replays: ReplayLog) -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """Path, arguments and named arguments of the calls that are repeated."""
    return [(entry.args[0], entry.args[1], entry.args[2]) for entry in replays]


LOAD: Call = ("load_lora_weights", {"adapter_name": "a"})
TILED: Call = ("vae.enable_tiling", {"tile_sample_min_height": 256})


@pytest.mark.parametrize(
    ("calls", "repeated"),
    [
        (["encode_prompt", "vae.decode", "vae.tiled_decode", "get_timesteps", "prepare_latents"], []),
        (["load_lora_weights", "unload_lora_weights"] * 10, []),
        (
            [LOAD, "set_adapters", "disable_lora", "unet.set_adapters", "unload_lora_weights", "enable_tiling"],
            ["enable_tiling"],
        ),
        ([LOAD, "fuse_lora", "unload_lora_weights"], [LOAD, "fuse_lora", "unload_lora_weights"]),
        ([LOAD, "fuse_lora", "unfuse_lora", "unload_lora_weights"], []),
        ([LOAD, "unload_lora_weights", LOAD], [LOAD]),
        (["load_ip_adapter", "set_ip_adapter_scale", "unload_ip_adapter"], []),
        (["load_textual_inversion", "unload_textual_inversion"], []),
        (
            ["load_textual_inversion", ("load_textual_inversion", {"tokenizer": "2"}), "unload_textual_inversion"],
            [("load_textual_inversion", {"tokenizer": "2"})],
        ),
        (
            ["load_textual_inversion", ("unload_textual_inversion", {"tokens": ["x"]})],
            ["load_textual_inversion", ("unload_textual_inversion", {"tokens": ["x"]})],
        ),
        (["vae.enable_tiling", "vae.disable_tiling"] * 10, ["vae.disable_tiling"]),
        ([TILED, "vae.disable_tiling"], [TILED, "vae.disable_tiling"]),
        ([TILED, "vae.disable_tiling"] * 10 + [TILED], [TILED]),
        ([TILED, *["vae.disable_tiling", "vae.enable_tiling"] * 10], [TILED, "vae.enable_tiling"]),
        ([LOAD, *["set_adapters"] * 10], [LOAD, "set_adapters"]),
        (["set_adapters", LOAD, "set_adapters"], ["set_adapters", LOAD, "set_adapters"]),
        (["vae.enable_tiling", "vae_two.enable_tiling"] * 2, ["vae.enable_tiling", "vae_two.enable_tiling"]),
        (["a_method_of_somebody", "a_method_of_somebody"], ["a_method_of_somebody", "a_method_of_somebody"]),
    ],
)
def test_what_is_repeated(calls: list[str | Call], repeated: list[str | Call]) -> None:
    assert kept(*calls) == repeated


def load(name: str | None) -> Step:
    return "load_lora_weights", ("file", name)


def select(*names: str, weights: Any = None) -> Step:
    return "set_adapters", (list(names), weights)


def delete(*names: str) -> Step:
    return "delete_adapters", (list(names),)


ROUND = [load("x"), select("x"), delete("x")]
BESIDE = [load("x"), select("y", "x", weights=[0.5, 0.7]), delete("x")]
TWO = [load("y"), load("z")]
FREEU: Step = ("enable_freeu", (1.0,))


@pytest.mark.parametrize(
    ("steps", "repeated"),
    [
        (ROUND * 10, []),
        ([load("x"), ("delete_adapters", ("x",))] * 10, []),
        ([load("x"), load("y"), delete("x", "y")] * 10, []),
        ([load("x"), FREEU, delete("x")], [FREEU]),
        ([load("y"), *ROUND * 10], [load("y")]),
        ([load("y"), *BESIDE * 10], [load("y"), select("y", weights=[0.5])]),
        ([*TWO, *BESIDE * 10], [*TWO, select("y", weights=[0.5])]),
        ([*TWO, *ROUND], [*TWO, *ROUND]),  # either of the two may be active then
        ([*TWO, *ROUND * 10, select("y", "z")], [*TWO, select("y", "z")]),
        ([load("y"), select("y", weights=0.5), *ROUND], [load("y"), select("y", weights=0.5)]),
        ([*TWO, *[select("z"), select("y")] * 10], [*TWO, select("z"), select("y")]),
        ([*TWO, *[select("z"), select("y", "z")] * 10], [*TWO, select("y", "z")]),
        ([load(None), *ROUND], [load(None), *ROUND]),  # its name depends on how many there are
        ([load("x"), ("disable_lora", ()), delete("x")], [load("x"), ("disable_lora", ()), delete("x")]),
        ([load("x"), ("fuse_lora", ()), delete("x")], [load("x"), ("fuse_lora", ()), delete("x")]),
        ([load("x"), ("unet.delete_adapters", ("x",))], [load("x"), ("unet.delete_adapters", ("x",))]),
        ([load("y"), *ROUND, ("unload_lora_weights", ())], []),
    ],
)
def test_what_concerns_deleted_adapters_is_not_repeated(steps: list[Step], repeated: list[Step]) -> None:
    replays = ReplayLog()
    for path, args in steps:
        keep(replays, path, args, {})
    assert [(path, args) for path, args, _ in reported(replays)] == repeated


def test_adapters_that_were_there_before_count(tmp_path: Path) -> None:
    """Nobody knows which of them is active when one of ours is deleted."""
    replays = ReplayLog()
    for path, args in ROUND:
        keep(replays, path, args, {}, is_fresh=False)
    assert len(replays) == len(ROUND)


Networks = dict[str, tuple[list[str], dict[str, float]]]


def adapters_of(pipe: Any) -> Networks:
    """Which adapters are active in each layer, and the scales of all."""
    layers = [(name, module) for part in (pipe.unet, pipe.text_encoder) for name, module in part.named_modules()]
    adapted = {name: module for name, module in layers if isinstance(module, LoraLayer)}
    return {name: ([*each.active_adapters], {**each.scaling}) for name, each in adapted.items() if each.scaling}


@pytest.fixture(scope="module")
def weights() -> dict[str, dict[str, torch.Tensor]]:
    """Of four adapters: two of the UNet and a text encoder, two of the UNet alone."""
    pipe = tiny.build("sdxl").pipe
    parts = {"unet": (pipe.unet, "to_q"), "text_encoder": (pipe.text_encoder, "q_proj")}
    found = {}
    for part, (network, target) in parts.items():
        network.add_adapter(LoraConfig(r=2, target_modules=[target], init_lora_weights=False))
        found[part] = {f"{part}.{name}": x for name, x in get_peft_model_state_dict(network).items()}
    return {name: found["unet"] | (found["text_encoder"] if name in "ab" else {}) for name in "abcd"}


def a_step(chance: random.Random, there: set[str]) -> Step:
    names = sorted(there)
    what = chance.choice(["load", "select", "delete"]) if there else "load"
    if what == "load" and len(there) < 4:
        return load(chance.choice(sorted(set("abcd") - there)))
    some = chance.sample(names, chance.randint(1, len(names)))
    return select(*some, weights=[chance.random() for _ in some]) if what == "select" else delete(*some)


@pytest.mark.filterwarnings("ignore:Adapter . was active")
@pytest.mark.parametrize("seed", first_of(range(6), 0))
def test_new_workers_have_the_same_adapters(seed: int, weights: dict[str, dict[str, torch.Tensor]]) -> None:
    """Whatever was loaded, selected and deleted, in whatever order, each by itself at one scale or another."""
    chance, pipe, replays, there = random.Random(seed), tiny.build("sdxl").pipe, ReplayLog(), set[str]()
    wanted: list[Networks] = []

    def does(pipe: Any, path: str, args: tuple[Any, ...]) -> None:
        getattr(pipe, path)(*((dict(weights[args[1]]), *args[1:]) if path == "load_lora_weights" else args))

    for number in range(12):
        path, args = a_step(chance, there)
        does(pipe, path, args)
        keep(replays, path, args, {})
        there = there - set(args[0]) if path == "delete_adapters" else there | {args[1]} if "load" in path else there
        if number % 4 < 3:
            continue
        new = tiny.build("sdxl").pipe
        for path, args, _ in reported(replays):
            does(new, path, args)
        wanted.append(adapters_of(pipe))
        assert adapters_of(new) == wanted[-1]
    assert any(wanted), "nothing was compared with nothing"


def test_what_was_there_before_is_taken_back_again() -> None:
    """A pipeline that was handed over may have brought adapters, which taking back ours does not bring back."""
    pairs = ["load_lora_weights", "unload_lora_weights"] * 10
    assert kept(*pairs, is_fresh=False) == ["unload_lora_weights"]
    assert kept("unfuse_lora", "unload_lora_weights", is_fresh=False)[-1] == "unload_lora_weights"


def test_only_changes_may_take_an_hour_without_work() -> None:
    assert engine_call("vae.decode", (), {}, is_fresh=True)[1] == {"replay": False, "expected": 0.0}
    options = engine_call("load_lora_weights", (), {}, is_fresh=True)[1]
    assert isinstance(options["replay"], CallEffects)
    assert options["expected"] > 0


def test_files_are_named_from_the_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lora.safetensors").touch()
    args, kwargs = with_whole_paths("load_lora_weights", ("lora.safetensors",), {"weight_name": "lora.safetensors"})
    assert args == (str(tmp_path / "lora.safetensors"),)
    assert kwargs == {"weight_name": "lora.safetensors"}, "a name within a folder"
    assert with_whole_paths("load_lora_weights", ("org/lora",), {})[0] == ("org/lora",), "of the hub"
    assert with_whole_paths("load_textual_inversion", (["lora.safetensors", "a"],), {})[0] == ([args[0], "a"],)
    assert with_whole_paths("anything", (Path("x"), "lora.safetensors"), {})[0] == (tmp_path / "x", "lora.safetensors")
    named = {"pretrained_model_name_or_path_or_dict": "lora.safetensors"}
    assert list(with_whole_paths("unet.load_lora_adapter", (), named)[1].values()) == [args[0]]
    encoder = {"image_encoder_pretrained_model_name_or_path": "lora.safetensors", "subfolder": "lora.safetensors"}
    assert list(with_whole_paths("load_ip_adapter", (), encoder)[1].values()) == [args[0], "lora.safetensors"]
    of_transformers = {"peft_model_id": "lora.safetensors"}
    assert list(with_whole_paths("text_encoder.load_adapter", (), of_transformers)[1].values()) == [args[0]]


def test_files_that_a_callback_names_are_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks may have been started somewhere else."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lora.safetensors").touch()
    caller = CallController(None, {}, kind="local", output_module="diffusers")
    caller.apply("load_lora_weights", ("lora.safetensors",), {})
    assert caller.changes[0].args == (str(tmp_path / "lora.safetensors"),)
