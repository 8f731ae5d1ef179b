"""Which calls new workers are told of: those that changed something that still holds."""

from pathlib import Path
from typing import Any

import pytest

from patchpar.changes import asked, change_of, with_whole_paths
from patchpar.launch.replay import Change, Replay, Replays

Call = tuple[str, dict[str, Any]]


def kept(*calls: str | Call, is_fresh: bool = True) -> list[str | Call]:
    """Those of a pipeline's calls that are repeated."""
    replays = Replays()
    for call in calls:
        path, kwargs = (call, {}) if isinstance(call, str) else call
        change = change_of(path, (), kwargs, is_fresh=is_fresh)
        if change is not None:
            replays.add(Replay(method=path, args=(), kwargs=kwargs, expected=0.0, sent=None, change=change))
    return [(entry.method, entry.kwargs) if entry.kwargs else entry.method for entry in replays]


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


def test_what_was_there_before_is_taken_back_again() -> None:
    """A pipeline that was handed over may have brought adapters, which taking back ours does not bring back."""
    pairs = ["load_lora_weights", "unload_lora_weights"] * 10
    assert kept(*pairs, is_fresh=False) == ["unload_lora_weights"]
    assert kept("unfuse_lora", "unload_lora_weights", is_fresh=False)[-1] == "unload_lora_weights"


def test_only_changes_may_take_an_hour_without_work() -> None:
    assert asked("vae.decode", (), {}, is_fresh=True)[1] == {"replay": False, "expected": 0.0}
    options = asked("load_lora_weights", (), {}, is_fresh=True)[1]
    assert isinstance(options["replay"], Change)
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
