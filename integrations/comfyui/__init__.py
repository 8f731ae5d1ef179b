"""Nodes for ComfyUI: its own models on several GPUs, pipelines of diffusers on several devices, and a remote server."""

from .nodes import PatchparExtension


async def comfy_entrypoint() -> PatchparExtension:
    """Return the extension, as ComfyUI's V3 schema asks for it."""
    return PatchparExtension()
