"""Run by torchrun on three ranks; reads MODEL, the folder RESULTS and perhaps a secret file from argv."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

from patchpar import ParallelPipeline, WorkerError

MODEL, RESULTS, *SECRETS = map(Path, sys.argv[1:])
SECRET_FILE = SECRETS[0] if SECRETS else None
RANK = int(os.environ["RANK"])
CALL = {"prompt": "a small red house", "height": 128, "width": 128, "num_inference_steps": 3, "output_type": "latent"}
found: dict[str, Any] = {"callback": []}


def seeded() -> torch.Generator:
    """A generator whose seed differs by rank; only that of rank 0 may matter."""
    return torch.Generator().manual_seed(7 + RANK)


def darken(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    found["callback"].append((step, pipe.num_timesteps))
    return {"latents": tensors["latents"] * 0.9}


def keep(name: str, output: Any) -> None:
    found[name] = (type(output).__name__, output.images, str(pipe.plan))


with ParallelPipeline.from_pretrained(MODEL, secret_file=SECRET_FILE) as pipe:
    pipe.set_progress_bar_config(disable=RANK != 0)
    generator = seeded()
    keep("idle", pipe(**CALL, generator=generator, callback_on_step_end=darken))  # one rank has no part in cfg=2
    found["state"] = generator.get_state()
    try:
        pipe(**CALL, generator=[seeded()] * 2)
    except (ValueError, WorkerError) as error:
        found["error beside an idle rank"] = (type(error).__name__, str(error))
    keep("bands", pipe(**{**CALL, "height": 192}, generator=seeded()))
    torch.manual_seed(20 + RANK)
    keep("without generator", pipe(**CALL))
    pipe.plan = "patch=3,encoders=one"
    keep("encoders on one rank", pipe(**{**CALL, "height": 192}, generator=seeded()))
    pipe.plan = "data=3"
    prompts = ["a red house", "a blue tower", "a pine"]
    generators = [torch.Generator().manual_seed(seed) for seed in range(3)]
    keep("data", pipe(**{**CALL, "prompt": prompts}, generator=generators))
    found["states"] = [generator.get_state() for generator in generators]
    found["tuple"] = pipe(**{**CALL, "prompt": prompts}, generator=seeded(), return_dict=False)
    try:
        pipe(**{**CALL, "prompt": prompts}, generator=[seeded()] * 2)
    except ValueError as error:
        found["error"] = str(error)
    pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config)
    torch.manual_seed(40 + RANK)
    shape = (1, 4, 64, 64, torch.float32, torch.device("cpu"))
    generator = seeded()
    found["sampled"] = [pipe.prepare_latents(*shape, given) for given in (None, generator, generator)]
    found["sampled"] += [pipe.prepare_latents(*shape, generator=generator), torch.randn(2)]
    found["sealed"] = pipe._executor._context.seal is not None
    found["module"] = type(pipe.unet).__name__
torch.save(found, RESULTS / f"{RANK}.pt")
