"""Every entry of the zoo of pipelines, by the name of its class."""

from __future__ import annotations

from importlib import import_module

import diffusers

from .entry import Entry

_FAMILIES = (
    "bria",
    "cascade",
    "cosmos",
    "cross_text",
    "deprecated_own",
    "deprecated_sd",
    "editing",
    "single_videos",
    "flux",
    "guided",
    "hunyuan_video",
    "kandinsky",
    "kandinsky_transformers",
    "language",
    "linear",
    "ltx",
    "motion",
    "pixels",
    "sampled",
    "shap_e",
    "single_stream",
    "audio",
    "unets_rarer",
    "unets_sd",
    "unets_xl",
    "video",
    "wan_based",
    "zimage",
)
"""Modules of entries."""
_MODULES = [import_module(f".{family}", __package__) for family in _FAMILIES]
_ENTRIES = {entry.name: entry for module in _MODULES for entry in module.ENTRIES}

ZOO: dict[str, Entry] = {name: _ENTRIES[name] for name in sorted(_ENTRIES) if name in dir(diffusers)}
"""Class -> its entry, for all that the installed diffusers has."""

_NEEDS = {
    "librosa": ("AudioDiffusionPipeline",),
    "onnxruntime": (
        "OnnxStableDiffusionImg2ImgPipeline",
        "OnnxStableDiffusionInpaintPipeline",
        "OnnxStableDiffusionPipeline",
        "OnnxStableDiffusionUpscalePipeline",
        "StableDiffusionOnnxPipeline",
    ),
    "opencv-python": ("ConsisIDPipeline",),
    "sentencepiece": ("KolorsImg2ImgPipeline", "KolorsPAGPipeline", "KolorsPipeline"),
    "note-seq": ("SpectrogramDiffusionPipeline",),
}
"""Packages beyond those of the tests, and the classes that diffusers cannot import without them."""

LEFT_OUT: dict[str, str] = {
    **{name: f"needs {package}, which the tests do not install" for package, names in _NEEDS.items() for name in names},
    "BlipDiffusionPipeline": "its own call fails: what reads its image needs transformers before 5",
    "BlipDiffusionControlNetPipeline": "its own call fails: what reads its image needs transformers before 5",
    "LTX2LatentUpsamplePipeline": "it has no denoiser: a network makes latents larger in one call",
    "LTX2VideoDiffusionDecodePipeline": "it takes neither a prompt nor an image: it decodes latents",
    "LTXLatentUpsamplePipeline": "it has no denoiser: a network makes latents larger in one call",
    "DanceDiffusionPipeline": "takes neither a prompt nor an image: audio from noise",
    "DiffusionGemmaPipeline": "a language model: its steps write text",
    "LLaDA2Pipeline": "a language model: its steps write text",
    "RFD4ProteinaPipeline": "takes neither a prompt nor an image: it designs proteins from masks and coordinates",
    "VersatileDiffusionDualGuidedPipeline": "its own call fails: its blocks get an argument that they do not take",
    "VersatileDiffusionPipeline": "has no call: its methods make the pipelines of the same name",
    "EasyAnimateControlPipeline": "its own call fails: it gives its encode_prompt an argument that this does not take",
}
"""Class -> why it has no entry."""
