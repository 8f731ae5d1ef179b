"""Images of ComfyUI set the fields: what its graphs say, whatever nodes are between, and what they do not say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, PngImagePlugin

from app import comfyui_graph
from app.comfyui_graph import ComfyGraph
from app.image_parameters import MAX_GRAPH, add_parameters, loras_in, read_parameters
from app.requests import GenerateRequest
from patchpar import PlanError


def node(kind: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": kind, "inputs": inputs}


def plain(**changes: Any) -> dict[str, Any]:
    """The graph that ComfyUI opens with, and changed inputs of its sampler."""
    inputs = {"seed": 7, "steps": 12, "cfg": 6.5, "sampler_name": "euler", "scheduler": "normal", "denoise": 1}
    links = {"model": ["4", 0], "positive": ["6", 0], "negative": ["7", 0], "latent_image": ["5", 0]}
    return {
        "3": node("KSampler", **{**inputs, **links, **changes}),
        "4": node("CheckpointLoaderSimple", ckpt_name="sd.safetensors"),
        "5": node("EmptyLatentImage", width=512, height=768, batch_size=1),
        "6": node("CLIPTextEncode", text="a cat", clip=["4", 1]),
        "7": node("CLIPTextEncode", text="fog", clip=["4", 1]),
        "8": node("VAEDecode", samples=["3", 0], vae=["4", 2]),
        "9": node("SaveImage", filename_prefix="ComfyUI", images=["8", 0]),
    }


PLAIN = {"prompt": "a cat", "negative": "fog", "width": 512, "height": 768, "steps": 12, "guidance": 6.5, "seed": 7}
FLUX = {
    "5": node("EmptySD3LatentImage", width=1024, height=576, batch_size=1),
    "6": node("CLIPTextEncode", text="a cat", clip=["11", 0]),
    "11": node("DualCLIPLoader", clip_name1="t5", clip_name2="clip"),
    "12": node("UNETLoader", unet_name="flux"),
    "13": node(
        "SamplerCustomAdvanced",
        **{"noise": ["25", 0], "guider": ["22", 0], "sampler": ["16", 0], "sigmas": ["18", 0]},
        latent_image=["5", 0],
    ),
    "16": node("KSamplerSelect", sampler_name="euler"),
    "17": node("BasicScheduler", scheduler="simple", steps=28, denoise=1, model=["12", 0]),
    "18": node("SplitSigmas", sigmas=["17", 0], step=20),
    "22": node("BasicGuider", model=["12", 0], conditioning=["26", 0]),
    "25": node("RandomNoise", noise_seed=41),
    "26": node("FluxGuidance", conditioning=["6", 0], guidance=3.5),
}


def arguments(graph: dict[str, Any]) -> dict[str, Any]:
    return ComfyGraph.read(json.dumps(graph)).arguments()


def between() -> dict[str, Any]:
    """A ControlNet, whose outputs are both branches, a reroute, and numbers of nodes of their own."""
    graph = plain(positive=["20", 0], negative=["20", 1], seed=["22", 0], latent_image=["23", 0])
    image = {"control_net": ["21", 0], "image": ["24", 0], "strength": 1}
    return graph | {
        "20": node("ControlNetApplyAdvanced", positive=["25", 0], negative=["7", 0], **image),
        "21": node("ControlNetLoader", control_net_name="canny"),
        "22": node("PrimitiveInt", value=7),
        "23": node("Reroute", **{"": ["5", 0]}),
        "24": node("LoadImage", image="edges.png"),
        "25": node("ConditioningSetTimestepRange", conditioning=["6", 0], start=0, end=1),
    }


def twice() -> dict[str, Any]:
    """A second pass on the enlarged latents of the first, with other numbers; its nodes stand first."""
    second = {"seed": 9, "steps": 5, "cfg": 2, "latent_image": ["31", 0]}
    links = {"model": ["4", 0], "positive": ["6", 0], "negative": ["7", 0]}
    enlarged = node("LatentUpscale", samples=["3", 0], width=2048, height=2048)
    return {"30": node("KSampler", **second, **links), "31": enlarged, **plain()}


@pytest.mark.parametrize(
    ("graph", "found"),
    [
        (plain(), PLAIN),
        (between(), PLAIN),
        (twice(), PLAIN),
        (
            plain() | {"6": node("CLIPTextEncodeSDXL", text_g="a cat", text_l="a cat", width=4096, height=4096)},
            PLAIN,
        ),
        (plain() | {"7": node("ConditioningZeroOut", conditioning=["6", 0])}, {**PLAIN, "negative": ""}),
        (plain() | {"6": node("CLIPTextEncode", text=["40", 0]), "40": node("Text", value="a cat")}, PLAIN),
        (
            FLUX,
            {"prompt": "a cat", "negative": "", "width": 1024, "height": 576, "steps": 28, "guidance": 3.5, "seed": 41},
        ),
        (
            plain(latent_image=["50", 0]) | {"50": node("VAEEncode", pixels=["51", 0]), "51": node("LoadImage")},
            {name: value for name, value in PLAIN.items() if name not in ("width", "height")},
        ),
    ],
    ids=["plain", "between", "twice", "sdxl", "zeros", "linked", "flux", "from an image"],
)
def test_what_a_graph_says(graph: dict[str, Any], found: dict[str, Any]) -> None:
    assert arguments(graph) == found


def test_an_image_of_comfyui_sets_the_fields(tmp_path: Path) -> None:
    info = PngImagePlugin.PngInfo()
    lora = node("LoraLoader", lora_name="ink.safetensors", strength_model=0.8, strength_clip=1, model=["4", 0])
    info.add_text("prompt", json.dumps(plain(model=["10", 0]) | {"10": lora}))
    info.add_text("workflow", "{}")
    path = tmp_path / "ComfyUI_00001_.png"
    Image.new("RGB", (8, 8)).save(path, pnginfo=info)
    assert read_parameters(path) == GenerateRequest(**PLAIN)
    assert loras_in(path) == "ink.safetensors:0.8"


def test_parameters_beside_a_graph_are_those_that_count(tmp_path: Path) -> None:
    image, info = (
        add_parameters(Image.new("RGB", (8, 8)), GenerateRequest(prompt="a dog"), {}),
        PngImagePlugin.PngInfo(),
    )
    info.add_text("parameters", image.info["parameters"])
    info.add_text("prompt", json.dumps(plain()))
    image.save(tmp_path / "a.png", pnginfo=info)
    assert read_parameters(tmp_path / "a.png").prompt == "a dog"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "without a sampler that is known here: fill in the fields by hand"),
        ("[]", "cannot be read"),
        ("{", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        ('{"1": 2}', "cannot be read"),
        (json.dumps({str(each): node("Note") for each in range(1001)}), "1001 nodes: at most 1000 are read"),
        (
            json.dumps(plain() | {"6": node("CLIPTextEncodeFlux", clip_l="a cat", t5xxl="a dog")}),
            "whose prompt is made by several nodes",
        ),
        (
            json.dumps(plain() | {"6": node("CLIPTextEncode", text=["40", 0]), "40": node("Join", a="a", b="cat")}),
            "whose prompt is made by several nodes",
        ),
        (json.dumps(plain() | {"6": node("CLIPTextEncode", text="")}), "there is no prompt"),
        (json.dumps(plain(steps=2000)), "steps 2000: it is a whole number from 1 to 150"),
        (json.dumps(plain(cfg=float("nan"))), "guidance scale nan"),
    ],
)
def test_what_cannot_be_is_refused(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        GenerateRequest.of(**ComfyGraph.read(text).arguments())


def test_a_graph_that_is_made_to_take_long_is_read_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uploaded by anybody: each node leads to all others, by each of many outputs, and each is a sampler."""
    names = [str(number) for number in range(60)]
    links = {f"conditioning {name} {output}": [name, output] for name in names for output in range(5)}
    sampler = node("KSampler", positive=["0", 0], latent_image=["0", 0], text="a cat", **links)
    text, looked = json.dumps(dict.fromkeys(names, sampler)), 0

    def count(value: Any) -> Any:
        nonlocal looked
        looked += 1
        return link_of(value)

    link_of = comfyui_graph._link
    monkeypatch.setattr(comfyui_graph, "_link", count)
    with pytest.raises(PlanError):
        ComfyGraph.read(text).arguments()
    assert looked < 2 * comfyui_graph.MAX_SAMPLERS * len(names) * len(sampler["inputs"])


def test_a_graph_of_megabytes_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As JSON it would take seconds, in which the page answers nobody, and forty times its size in memory."""
    info = PngImagePlugin.PngInfo()
    info.add_text("prompt", "[" + "[]," * (MAX_GRAPH // 3) + "[]]")
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png", pnginfo=info)
    monkeypatch.setattr(comfyui_graph.json, "loads", lambda _: pytest.fail("it was read"))
    with pytest.raises(PlanError, match=f"at most {MAX_GRAPH} are read"):
        read_parameters(tmp_path / "a.png")
