"""The nodes, in ComfyUI's V3 schema."""

from __future__ import annotations

import gc
from typing import Any

import comfy.model_management
import torch
from comfy_api.latest import ComfyAPISync, ComfyExtension, io

from .generate import from_pipeline, from_server, key_in
from .parallel import TeamSettings, check_version, parallel

CATEGORY = "patchpar"
STRATEGIES = ["exact", "fresh-edges", "displaced", "pcpp"]
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
Pipeline = io.Custom("PATCHPAR_PIPELINE")


def sizes() -> list[Any]:
    """Inputs of an image: its prompt, its sides in pixels, and how it is generated."""
    return [
        io.String.Input("prompt", multiline=True),
        io.Int.Input("width", default=1024, min=64, max=8192, step=8),
        io.Int.Input("height", default=1024, min=64, max=8192, step=8),
        io.Int.Input("steps", default=25, min=1, max=150),
        io.Int.Input("seed", default=0, min=0, max=2**63 - 1, control_after_generate=True),
    ]


def reporting() -> dict[str, Any]:
    """How a node that waits reports its progress, and notices that the user interrupts it."""
    api = ComfyAPISync()
    return {
        "progress": lambda step, total: api.execution.set_progress(value=step, max_value=total),
        "check": comfy.model_management.throw_exception_if_processing_interrupted,
    }


class PatchparParallel(io.ComfyNode):
    """A model of ComfyUI, split over several GPUs."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="PatchparParallel",
            display_name="Split over GPUs (patchpar)",
            category=CATEGORY,
            is_experimental=True,  # not run inside ComfyUI yet
            description="Each call of the model's network is computed by several GPUs together: rows of a UNet, "
            "tokens of a transformer. exact gives the same image, to rounding.",
            inputs=[
                io.Model.Input("model"),
                io.Int.Input("gpus", default=2, min=1, max=16),
                io.Combo.Input("strategy", options=STRATEGIES, default="exact"),
                io.Combo.Input("split", options=["auto", "rows", "columns"], default="auto"),
            ],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model: Any, gpus: int, strategy: str, split: str) -> io.NodeOutput:
        if gpus == 1:
            return io.NodeOutput(model)
        check_version(model)
        devices = comfy.model_management.get_all_torch_devices(exclude_current=False)
        others = [each for each in devices if each != model.load_device]
        if len(others) < gpus - 1:
            raise ValueError(f"gpus={gpus}, but this machine has {len(others) + 1}: use {len(others) + 1} at most")
        return io.NodeOutput(parallel(model, others[: gpus - 1], TeamSettings(strategy=strategy, split=split)))


class PatchparPipeline(io.ComfyNode):
    """A pipeline of diffusers, loaded on several devices."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="PatchparPipeline",
            display_name="Load a diffusers pipeline (patchpar)",
            category=CATEGORY,
            is_experimental=True,  # not run inside ComfyUI yet
            inputs=[
                io.String.Input("model", default="embedded", tooltip="a folder or a name of the hub"),
                io.Int.Input("devices", default=2, min=1, max=64),
                io.String.Input("plan", default="auto", tooltip="such as cfg=2,patch=2"),
                io.Combo.Input("dtype", options=list(DTYPES), default="float16"),
            ],
            outputs=[Pipeline.Output()],
        )

    @classmethod
    def execute(cls, model: str, devices: int, plan: str, dtype: str) -> io.NodeOutput:
        from patchpar import ParallelPipeline

        comfy.model_management.unload_all_models()  # its workers need the memory that ComfyUI's models are in
        gc.collect()  # workers of a pipeline that ComfyUI has dropped end with it, which has circular references
        return io.NodeOutput(
            ParallelPipeline.from_pretrained(model, devices=devices, plan=plan, torch_dtype=DTYPES[dtype])
        )


class PatchparGenerate(io.ComfyNode):
    """Images of a loaded pipeline."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="PatchparGenerate",
            display_name="Generate with a diffusers pipeline (patchpar)",
            category=CATEGORY,
            is_experimental=True,  # not run inside ComfyUI yet
            inputs=[
                Pipeline.Input("pipeline"),
                *sizes(),
                io.Float.Input("guidance", default=5.0, min=0.0, max=30.0, step=0.1),
            ],
            outputs=[io.Image.Output()],
        )

    @classmethod
    def execute(  # noqa: PLR0913 - the inputs of the node
        cls, pipeline: Any, prompt: str, width: int, height: int, steps: int, seed: int, guidance: float
    ) -> io.NodeOutput:
        call = {
            "prompt": prompt,
            "width": width,
            "height": height,
            "num_inference_steps": steps,
            "guidance_scale": guidance,
            "generator": torch.Generator().manual_seed(seed),
        }
        return io.NodeOutput(from_pipeline(pipeline, call, **reporting()))


class PatchparRemote(io.ComfyNode):
    """Images of a server that runs `patchpar serve`."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="PatchparRemote",
            display_name="Generate on a server (patchpar)",
            category=CATEGORY,
            is_experimental=True,  # not run inside ComfyUI yet
            inputs=[
                io.String.Input("url", default="http://127.0.0.1:8000/v1"),
                io.String.Input("key_file", default="", tooltip="a file with the line # URL, and the server's API key"),
                *sizes(),
                io.Int.Input("images", default=1, min=1, max=10),
            ],
            outputs=[io.Image.Output()],
        )

    @classmethod
    def execute(  # noqa: PLR0913 - the inputs of the node
        cls, url: str, key_file: str, prompt: str, width: int, height: int, steps: int, seed: int, images: int
    ) -> io.NodeOutput:
        from pathlib import Path

        from openai import APIConnectionError, OpenAI

        key = key_in(Path(key_file).read_text(encoding="utf-8-sig"), url) if key_file else "none"
        call = {"prompt": prompt, "size": f"{width}x{height}", "n": images}
        extra = {"seed": seed, "num_inference_steps": steps}
        with OpenAI(base_url=url, api_key=key) as client:
            try:
                return io.NodeOutput(from_server(client, call, extra, **reporting()))
            except APIConnectionError as error:
                raise ValueError(
                    f"url={url!r} does not answer ({error}): run patchpar serve there, or correct the URL, which ends "
                    "with /v1"
                ) from error


class PatchparExtension(ComfyExtension):
    """What ComfyUI loads."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        """Return the nodes."""
        return [PatchparParallel, PatchparPipeline, PatchparGenerate, PatchparRemote]
