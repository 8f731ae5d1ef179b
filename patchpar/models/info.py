"""A description of a pipeline for the controlling process: names and numbers, no weights."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from patchpar.errors import UnsupportedModel
from patchpar.models.call_parameters import parameters_of, passes_on
from patchpar.models.caption_words import caption_words
from patchpar.models.few_steps import FewSteps, few_steps_of, path_of
from patchpar.models.guiders import GUIDES, guider_branches, guides_above
from patchpar.plan.scalars import plain
from patchpar.shard.compiled import compiled_in, is_compiled, is_wrapped

DENOISERS = (
    ("unet", "transformer", "transformer_2", "unconditional_transformer", "image_unet"),
    ("decoder", "super_res_first", "super_res_last"),
    ("prior",),
)
"""Names of components that are called in each step, by kind; those that generate the image come first."""
AUTOENCODERS = ("vae", "movq", "vqvae", "vqgan", "vq_model")
NAMED_FOR_GUIDANCE = (
    "guidance_scale",
    "audio_guidance_scale",
    "true_cfg_scale",
    "max_guidance_scale",
    "decoder_guidance_scale",
    "guidance_schedule",
)
PERTURBED = "pag_scale"
OF_IMAGE = "image_guidance_scale"
SCALES_OF_IMAGES = {OF_IMAGE: "image", "img_guidance_scale": "input_images"}  # with the arguments that they are for
IMAGES_EACH = ("num_images_per_prompt", "num_videos_per_prompt", "num_waveforms_per_prompt")


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkInfo:
    """A network of a pipeline: its class and the names of its methods."""

    kind: str
    methods: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineInfo:
    """A pipeline in names and numbers. `parameters`: of its call, with defaults (None if there is none).

    `splits_into_tokens`: its denoisers consist of blocks and may be split by tokens; the first call shows whether they
    can be, and `unsplit_reason` why not. `native_only_reason`: why structure guidance is impossible beyond the native
    size; empty if structure guidance supports them, None if that is unknown. `one_batch_reason`: why prompts cannot be
    split over ranks; empty if they can. `decoded_bytes`: memory for decoding, per pixel, 0 if unknown.
    `guided_by_its_scale`: `guidance_scale` decides whether it applies guidance, although it has a `true_cfg_scale` too;
    `guides_above`: from which scale on, see `models.guiders`.
    `guider_branches`: see `models.guiders`. `few_steps`: what a model that is distilled to few steps is called with;
    None for others, as far as is known.
    `known_words`: the words of prompts that an embedded model has learnt; empty for others.
    """

    pipeline: str
    module: str
    denoisers: tuple[str, ...]
    splits_into_bands: bool
    splits_into_tokens: bool
    total_stride: int
    vae_scale: int
    size_unit: int
    parameters: Mapping[str, Any]
    takes_any: bool
    distilled: bool
    default_size: tuple[int, int] | None
    methods: frozenset[str]
    networks: Mapping[str, NetworkInfo]
    unsplit_reason: str = ""
    native_only_reason: str | None = None
    one_batch_reason: str = ""
    latent_channels: int = 4
    decoded_bytes: int = 0
    guided_by_its_scale: bool = False
    guides_above: float = 1.0
    guider_branches: int | None = None
    few_steps: FewSteps | None = None
    known_words: frozenset[str] = frozenset()

    def guided(self, kwargs: Mapping[str, Any]) -> bool:
        """Return whether a call with `kwargs` uses guidance of any kind, as far as its arguments show."""
        return self.branches(kwargs) > 1

    def branches(self, kwargs: Mapping[str, Any]) -> int:
        """Return the number of guidance branches of a call with `kwargs`, 1 without guidance.

        Perturbed attention (arXiv:2403.17377) adds one, and so does a scale for the image (arXiv:2211.09800).
        """
        if self.guider_branches is not None:
            return self.guider_branches
        perturbed = _number(kwargs.get(PERTURBED, self.parameters.get(PERTURBED))) > 0
        if not self._classifier_free(kwargs):
            return 1 + perturbed
        of_image = any(n in self.parameters and kwargs.get(i) is not None for n, i in SCALES_OF_IMAGES.items())
        return 2 + perturbed + of_image

    @property
    def guided_by_true_scale(self) -> bool:
        """Whether `true_cfg_scale` with a negative prompt decides whether it applies guidance, and no other scale."""
        return "true_cfg_scale" in self.parameters and not self.guided_by_its_scale

    def _classifier_free(self, kwargs: Mapping[str, Any]) -> bool:
        """Return whether a call has two branches. A distilled denoiser has them with `true_cfg_scale` only."""
        if self.guided_by_true_scale:
            negative = any(kwargs.get(name) is not None for name in ("negative_prompt", "negative_prompt_embeds"))
            return negative and _number(kwargs.get("true_cfg_scale", self.parameters["true_cfg_scale"])) > 1
        if self.distilled or _number(kwargs.get(OF_IMAGE, self.parameters.get(OF_IMAGE, 1))) < 1:
            return False
        scales = (_number(kwargs.get(name, self.parameters.get(name))) for name in NAMED_FOR_GUIDANCE)
        return any(scale > self.guides_above for scale in scales)

    def size(self, kwargs: Mapping[str, Any]) -> tuple[int, int] | None:
        """Return height and width in pixels of a call with `kwargs`; None if they are unknown."""
        height, width = (kwargs.get(name) or self.parameters.get(name) for name in ("height", "width"))
        if isinstance(height, int) and isinstance(width, int):
            return height, width
        if "height" not in self.parameters and hasattr(kwargs.get("image"), "size"):
            return _size_of_image(kwargs["image"])
        if self.default_size is None or any(kwargs.get(name) is not None for name in ("image", "latents", "video")):
            return None
        return height or self.default_size[0], width or self.default_size[1]


def describe(pipe: Any) -> PipelineInfo:
    """Return the description of a loaded pipeline."""
    from patchpar.shard.unet.discover import splits_into_bands

    denoisers = denoisers_of(pipe)
    first = next(iter(denoisers.values()), None)
    config = getattr(first, "config", None) or {}
    levels = config.get("block_out_channels") or (0,)
    scale = _vae_scale(pipe)
    bands = bool(denoisers) and all(splits_into_bands(module) for module in denoisers.values())
    return PipelineInfo(
        pipeline=type(pipe).__name__,
        module=type(pipe).__module__,
        denoisers=tuple(f"{name} ({type(module).__name__})" for name, module in denoisers.items()),
        splits_into_bands=bands,
        splits_into_tokens=bool(denoisers) and not bands and all(map(_has_blocks, denoisers.values())),
        total_stride=2 ** (len(levels) - 1) if bands else 1,
        vae_scale=scale,
        size_unit=_size_unit(pipe, config, scale),
        parameters=parameters_of(type(pipe)),
        takes_any=passes_on(type(pipe)),
        distilled=bool(config.get("guidance_embeds")) or config.get("time_cond_proj_dim") is not None,
        default_size=_default_size(pipe, config, scale),
        methods=_methods_of(pipe.__class__),
        latent_channels=_of_vae(pipe).get("latent_channels") or 4,
        decoded_bytes=_decoded_bytes(pipe),
        guided_by_its_scale=hasattr(type(pipe), GUIDES),
        guides_above=guides_above(pipe),
        guider_branches=guider_branches(pipe),
        few_steps=few_steps_of(pipe, config),
        known_words=caption_words(path_of(pipe)),
        networks={
            name: NetworkInfo(kind=type(each).__name__, methods=_methods_of(each.__class__))
            for name, each in networks_of(pipe).items()
        },
    )


def networks_of(pipe: Any) -> dict[str, Any]:
    """Return all networks of a pipeline by name."""
    return {name: each for name, each in pipe.components.items() if hasattr(each, "named_modules")}


def denoisers_of(pipe: Any) -> dict[str, Any]:
    """Return the networks that a pipeline calls in each step, by name: those that ranks split.

    Of a pipeline with several kinds, such as a prior and a decoder, those that generate the image.
    """
    kinds = ({name: pipe.components.get(name) for name in names} for names in DENOISERS)
    found = ({name: each for name, each in kind.items() if each is not None} for kind in kinds)
    return next(filter(None, found), {})


def is_name_of_denoiser(name: str) -> bool:
    """Return whether a component of this name may be a denoiser."""
    return any(name in names for names in DENOISERS)


def refuse_parallel(pipe: Any) -> None:
    """Raise UnsupportedModel if diffusers itself has split one of its networks over ranks."""
    for name, module in pipe.components.items():
        if getattr(module, "_parallel_config", None) is not None:
            raise UnsupportedModel(
                f"{name} is parallel already, by diffusers' enable_parallelism: load it without parallel_config and do "
                "not call enable_parallelism, whose hooks stay in the model"
            )


def refuse_compiled(network: Any) -> None:
    """Raise UnsupportedModel if a network is compiled as a whole, including its call."""
    if is_wrapped(network) or is_compiled(network):
        kind, way = type(network).__name__, "do not compile it"
        if is_wrapped(network):
            kind, way = type(network._orig_mod).__name__, "use the network itself, which is its attribute _orig_mod"
        raise UnsupportedModel(
            f"{kind} is compiled as a whole, including what wraps its forward: {way}, and compile its blocks "
            "instead, as pipe.transformer.compile_repeated_blocks() does"
        )


def refuse_compiled_denoisers(pipe: Any) -> None:
    """Raise UnsupportedModel if a denoiser is compiled as a whole."""
    for network in denoisers_of(pipe).values():
        refuse_compiled(network)


def refuse_to_send_compiled(components: Mapping[str, Any]) -> None:
    """Raise UnsupportedModel for a network with compiled parts, by its name: they cannot be sent to workers."""
    for name, network in components.items():
        if not hasattr(network, "named_modules"):
            continue
        if is_name_of_denoiser(name):
            refuse_compiled(network)
        if found := compiled_in(network):
            raise UnsupportedModel(
                f"pipe.{'.'.join(filter(None, (name, found[0])))} is compiled, and compiled code cannot be sent to "
                f"workers: pass it uncompiled and compile it there, as pipe.{name}.compile_repeated_blocks() of "
                "the ParallelPipeline does on all ranks"
            )


def _has_blocks(denoiser: Any) -> bool:
    return any(type(module).__name__ == "ModuleList" for module in denoiser.modules())


def _size_of_image(image: Any) -> tuple[int, int] | None:
    """Return height and width of a PIL image."""
    size = image.size
    return (size[1], size[0]) if isinstance(size, tuple) and len(size) == 2 else None


def _number(value: Any) -> float:
    """Return a number, the largest of a list, or 0 for anything else."""
    if isinstance(value, (list, tuple)):
        return max(map(_number, value), default=0.0)
    number = plain(value)
    return float(number) if isinstance(number, (int, float)) else 0.0


@lru_cache(maxsize=256)  # every rank asks for each network whenever a pipeline is loaded
def _methods_of(kind: type) -> frozenset[str]:
    members = {name: inspect.getattr_static(kind, name) for name in dir(kind) if not name.startswith("_")}
    return frozenset(
        name for name, each in members.items() if callable(each) or isinstance(each, (classmethod, staticmethod))
    )


def _vae_scale(pipe: Any) -> int:
    """Return the pixels per latent along a side; 1 for denoisers of pixels (DeepFloyd IF, DDPM)."""
    for name in ("vae_scale_factor", "vae_scale_factor_spatial"):
        scale = getattr(pipe, name, None)
        if isinstance(scale, int):
            return scale
    return 8 if any(pipe.components.get(name) is not None for name in AUTOENCODERS) else 1


def _size_unit(pipe: Any, config: Mapping[str, Any], scale: int) -> int:
    """Return the unit of height and width in pixels: the VAE's factor times the patch size of a transformer."""
    patch = config.get("patch_size") or 1
    processor = getattr(getattr(pipe, "image_processor", None), "config", None) or {}
    packed = processor.get("vae_scale_factor") or 1  # 16 of pipelines that pack 2 x 2 latents
    return max(8, scale * (patch if isinstance(patch, int) else patch[-1]), packed)


def _of_vae(pipe: Any) -> Mapping[str, Any]:
    """Return the configuration of the pipeline's VAE."""
    return getattr(pipe.components.get("vae"), "config", None) or {}


def _decoded_bytes(pipe: Any) -> int:
    """Return the bytes per pixel of six full-size maps of the decoder's last width, AutoencoderKL's peak."""
    config = _of_vae(pipe)
    levels = config.get("block_out_channels")
    if not levels:
        return 0
    element: int = 4 if config.get("force_upcast") else next(pipe.components["vae"].parameters()).element_size()
    return 6 * levels[0] * element


def _default_size(pipe: Any, config: Mapping[str, Any], scale: int) -> tuple[int, int] | None:
    size = getattr(pipe, "default_sample_size", None) or config.get("sample_size")
    if isinstance(size, int):
        return size * scale, size * scale
    if isinstance(size, (list, tuple)) and len(size) == 2:
        return size[0] * scale, size[1] * scale
    return None


def images_each(arguments: Mapping[str, Any]) -> int:
    """Return the number of results per prompt."""
    return next((arguments[name] for name in IMAGES_EACH if arguments.get(name)), 1)
