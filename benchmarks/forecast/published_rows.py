"""Published times of calls on one device, with what is known of their software; the form of those on several."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.forecast.encoders import of_flux, of_flux_in_sglang, of_sd15, of_sdxl, with_encoders
from benchmarks.forecast.fp8 import in_fp8
from benchmarks.forecast.models import asking, before_torch_2_9, flux, qwen, sd15, sdxl, unguided, wan, with_vae
from patchpar.pipeline.planner.tape_recorder import ENCODE
from patchpar.plan.replay.price import ASSUMED, BLOCKS_COMPILED, COMPILED, CostAssumptions


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRow:
    """Seconds of so many steps on a device, or on a machine under a `plan`, with such `costs`.

    `note`: what is in it beside steps. `decoding`: costs of the VAE, which not all compile with the denoiser. `phase`:
    of the call that is meant alone.
    """

    what: str
    model: str
    device: str
    steps: int
    seconds: float
    source: str
    costs: CostAssumptions = ASSUMED
    decoding: CostAssumptions = ASSUMED
    phase: str = ""
    note: str = ""
    plan: str = "single"


MODELS = {
    "sd15": with_encoders(with_vae(sd15, 4), of_sd15),
    "sdxl": with_encoders(with_vae(sdxl, 4), of_sdxl),
    "sdxl-upcast": with_encoders(with_vae(sdxl, 4, upcast=True), of_sdxl),
    "flux": with_encoders(with_vae(flux, 16), of_flux),
    "flux-before-2.9": before_torch_2_9(with_encoders(with_vae(flux, 16), of_flux)),
    "flux-in-sglang": with_encoders(flux, of_flux_in_sglang),
    "flux-fp8": in_fp8(with_encoders(with_vae(flux, 16), of_flux)),
    "qwen-512": asking(qwen(512)),
    "qwen-1536": asking(qwen(1536)),
    "wan": unguided(wan),
    "wan-before-2.9": before_torch_2_9(unguided(wan)),
}
FASTER = "[flux-faster](https://github.com/xlite-dev/flux-faster)"
DIFFUSERS = "[diffusers](https://huggingface.co/docs/diffusers/tutorials/fast_diffusion)"
FAL = "[fal-ai](https://github.com/fal-ai/stable-diffusion-benchmarks)"
TENSORRT = "[fal-ai, TensorRT 9](https://github.com/fal-ai/stable-diffusion-benchmarks)"
"""Another software than that of the other rows of this source."""
OMNI = (
    "[vllm-omni #2707](https://github.com/vllm-project/vllm-omni/issues/2707), which "
    "[compiles blocks](https://docs.vllm.ai/projects/vllm-omni/en/latest/user_guide/diffusion/regional_compilation/)"
)
FLUXES = "[BenchmarkFlux](https://github.com/varadrane1707/BenchmarkFlux)"
ENCODERS = "[sglang #25517](https://github.com/sgl-project/sglang/pull/25517)"
WAN = "[diffusers #11605](https://github.com/huggingface/diffusers/pull/11605)"
WHOLE = "with encoders and VAE"
FLASH_1 = 110 / 187
"""Of the attention assumed on an A100: torch before 2.2 has FlashAttention 1, which reaches 110 TFLOP/s there by
the figures of its successor (Dao 2023, arXiv:2307.08691), where 187 are assumed."""
FLASH_2 = 0.35 / 0.6
"""Of the attention assumed on an H100: torch of the time of these rows has FlashAttention 2 (in one of the sources it
takes as long as torch's own), which reaches 35 % of the FLOP/s there (Shah et al. 2024, arXiv:2407.08608)."""
PNDM = 51
"""Calls of the denoiser in 50 steps of SD 1.5's own scheduler, which evaluates one step twice."""
IN_ITS_LAYOUT = replace(COMPILED, channels_last=True)
"""Kernels between products are fused, and maps are in the layout of convolutions."""
OLD, OLD_COMPILED = (replace(costs, attention_part=FLASH_1) for costs in (ASSUMED, COMPILED))
SECOND, SECOND_COMPILED = (replace(costs, attention_part=FLASH_2) for costs in (ASSUMED, COMPILED))
ROWS = (
    PublishedRow(
        what="SD 1.5, 512 x 512, SDPA",
        model="sd15",
        device="A100",
        steps=PNDM,
        seconds=1.604,
        source=FAL,
        costs=OLD,
        note=WHOLE,
    ),
    PublishedRow(
        what="SD 1.5, 512 x 512, compiled",
        model="sd15",
        device="A100",
        steps=PNDM,
        seconds=1.354,
        source=FAL,
        costs=OLD_COMPILED,
        note=WHOLE,
    ),
    PublishedRow(
        what="SD 1.5, 512 x 512, compiled, channels last",
        model="sd15",
        device="A100",
        steps=PNDM,
        seconds=1.058,
        source=FAL,
        costs=replace(OLD_COMPILED, channels_last=True),
        note=WHOLE,
    ),
    PublishedRow(
        what="SDXL, 1024 x 1024, SDPA",
        model="sdxl-upcast",
        device="A100",
        steps=50,
        seconds=5.933,
        source=FAL,
        costs=OLD,
        note=WHOLE,
    ),
    PublishedRow(
        what="SDXL, 1024 x 1024, compiled",
        model="sdxl-upcast",
        device="A100",
        steps=50,
        seconds=5.246,
        source=FAL,
        costs=OLD_COMPILED,
        note=WHOLE,
    ),
    PublishedRow(
        what="SDXL, 1024 x 1024, compiled, channels last",
        model="sdxl-upcast",
        device="A100",
        steps=50,
        seconds=5.132,
        source=FAL,
        costs=replace(OLD_COMPILED, channels_last=True),
        note=WHOLE,
    ),
    PublishedRow(
        what="SD 1.5, 512 x 512, TensorRT",
        model="sd15",
        device="A100",
        steps=50,
        seconds=0.819,
        source=TENSORRT,
        costs=IN_ITS_LAYOUT,
        decoding=IN_ITS_LAYOUT,
        note=WHOLE,
    ),
    PublishedRow(
        what="SDXL, 1024 x 1024, TensorRT",
        model="sdxl",
        device="A100",
        steps=50,
        seconds=4.102,
        source=TENSORRT,
        costs=IN_ITS_LAYOUT,
        decoding=IN_ITS_LAYOUT,
        note=WHOLE,
    ),
    PublishedRow(
        what="SDXL, 1024 x 1024, SDPA",
        model="sdxl",
        device="A100",
        steps=30,
        seconds=3.31,
        source=DIFFUSERS,
        note=WHOLE,
    ),
    PublishedRow(
        what="SDXL, 1024 x 1024, compiled, channels last",
        model="sdxl",
        device="A100",
        steps=30,
        seconds=2.54,
        source=DIFFUSERS,
        costs=IN_ITS_LAYOUT,
        decoding=IN_ITS_LAYOUT,
        note=WHOLE,
    ),
    PublishedRow(
        what="FLUX.1 dev, 1024 x 1024, eager",
        model="flux-before-2.9",
        device="L20",
        steps=28,
        seconds=24.94,
        source=FASTER,
        note=WHOLE,
    ),
    PublishedRow(
        what="FLUX.1 dev, 1024 x 1024, compiled",
        model="flux",
        device="L20",
        steps=28,
        seconds=20.24,
        source=FASTER,
        costs=COMPILED,
        decoding=COMPILED,
        note=WHOLE,
    ),
    PublishedRow(
        what="FLUX.1 dev, 1024 x 1024, compiled, Linears in FP8",
        model="flux-fp8",
        device="L20",
        steps=28,
        seconds=13.29,
        source=FASTER,
        costs=COMPILED,
        decoding=IN_ITS_LAYOUT,
        note=WHOLE,
    ),
    PublishedRow(
        what="FLUX.1 dev, 1024 x 1024, eager",
        model="flux-before-2.9",
        device="A100",
        steps=28,
        seconds=15.65,
        source=FLUXES,
        note=WHOLE,
    ),
    PublishedRow(
        what="FLUX.1 dev, 1024 x 1024, eager",
        model="flux-before-2.9",
        device="H100",
        steps=28,
        seconds=7.11,
        source=FLUXES,
        costs=SECOND,
        note=WHOLE,
    ),
    PublishedRow(
        what="text encoders of FLUX.1 dev, eager",
        model="flux-in-sglang",
        device="H100",
        steps=1,
        seconds=0.02411,
        source=ENCODERS,
        phase=ENCODE,
        note="encoders alone",
    ),
    PublishedRow(
        what="text encoders of FLUX.1 dev, eager",
        model="flux-in-sglang",
        device="RTX4090",
        steps=1,
        seconds=0.05715,
        source=ENCODERS,
        phase=ENCODE,
        note="encoders alone",
    ),
    PublishedRow(
        what="Wan 14B, 832 x 480, 81 frames, eager",
        model="wan-before-2.9",
        device="H100",
        steps=1,
        seconds=4.602,
        source=WAN,
        costs=SECOND,
        note="one forward",
    ),
    PublishedRow(
        what="Wan 14B, 832 x 480, 81 frames, compiled",
        model="wan",
        device="H100",
        steps=1,
        seconds=3.766,
        source=WAN,
        costs=SECOND_COMPILED,
        note="one forward",
    ),
    PublishedRow(
        what="Qwen-Image, 512 x 512, guided, blocks compiled",
        model="qwen-512",
        device="H100",
        steps=20,
        seconds=2.32,
        source=OMNI,
        costs=BLOCKS_COMPILED,
    ),
    PublishedRow(
        what="Qwen-Image, 1536 x 1536, guided, blocks compiled",
        model="qwen-1536",
        device="H100",
        steps=35,
        seconds=23.19,
        source=OMNI,
        costs=BLOCKS_COMPILED,
    ),
)
