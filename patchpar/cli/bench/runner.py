"""Generate the images of `patchpar bench`, by one process and under each plan, and compare them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from patchpar.cli.bench.records import BenchKey, BenchRecord, BenchSetting, RecordFile
from patchpar.cli.compare import WARM_UP_STEPS, of_one
from patchpar.cli.generate import images_of
from patchpar.cli.output_files import written_whole
from patchpar.errors import PlanError, UnsupportedModel

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from patchpar import ParallelPipeline, Plan, Run

Perceptual = Callable[[Any, Any], float]
"""LPIPS of two images (H, W, 3) in 0..1."""


class BenchPrompt(NamedTuple):
    """A prompt, and the seed of its noise."""

    text: str
    seed: int


class SingleImage(NamedTuple):
    """The image of one process, (H, W, C) in 0..1, and the seconds of its call."""

    image: NDArray[np.float32]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """The records of all cases, and why plans were refused."""

    records: list[BenchRecord]
    refused: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRunner:
    """Measures plans on a pipeline that is open. `call`: its arguments beside prompt, steps and generator.

    `devices`: those of the pipeline, of which a plan takes the first.
    `on_image` gets (finished, number) of the images of all cases.
    """

    pipe: ParallelPipeline
    devices: Sequence[str]
    call: dict[str, Any]
    file: RecordFile
    lpips: Perceptual | None
    on_image: Callable[[int, int], None]

    def measure(
        self, settings: Sequence[BenchSetting], plans: Sequence[Plan], prompts: Sequence[BenchPrompt]
    ) -> BenchResult:
        """Measure what the file does not have. A plan that this model cannot have is refused, and the others go on.

        Raises what a rank raises.
        """
        keys = {
            plan: [self._key(setting, prompt, plan) for setting in settings for prompt in prompts] for plan in plans
        }
        total, refused, done = sum(map(len, keys.values())), dict[str, str](), 0
        for plan, of_plan in keys.items():
            for key in of_plan:
                if str(plan) not in refused and self._is_missing(key):
                    try:
                        self.file.add(self._measured(plan, key))
                    except (PlanError, UnsupportedModel) as error:
                        refused[str(plan)] = str(error)
                done += 1
                self.on_image(done, total)
        known = self.file.records
        return BenchResult(records=[known[key] for of in keys.values() for key in of if key in known], refused=refused)

    def _key(self, setting: BenchSetting, prompt: BenchPrompt, plan: Plan) -> BenchKey:
        return BenchKey(setting, *prompt, str(plan), machine_of(self.devices[: plan.world_size]))

    def _is_missing(self, key: BenchKey) -> bool:
        known = self.file.records.get(key)
        return known is None or (self.lpips is not None and known.lpips is None)

    def _measured(self, plan: Plan, key: BenchKey) -> BenchRecord:
        from patchpar.pipeline.image_metrics import psnr, ssim

        single = self._single(of_one(plan), key)
        images, run = self._called(plan, key)
        pairs = list(zip(images, single.image, strict=True))
        return BenchRecord(
            key=key,
            devices=tuple(rank.device for rank in run.ranks),
            psnr_db=min(psnr(a, b) for a, b in pairs),
            ssim=min(ssim(a, b) for a, b in pairs),
            lpips=None if self.lpips is None else max(self.lpips(a, b) for a, b in pairs),
            bytes_per_step=max(run.bytes_per_step),
            seconds=run.seconds,
            single_seconds=single.seconds,
            waited=max(sum(rank.seconds_waited.values()) for rank in run.ranks),
            steps=run.steps,
            exact_steps=run.exact_steps,
        )

    def _single(self, plan: Plan, key: BenchKey) -> SingleImage:
        """Return the images of one process, generated where they are not kept yet."""
        of_one = self._key(key.setting, BenchPrompt(key.prompt, key.seed), plan)
        name = hashlib.sha256(repr(of_one).encode()).hexdigest()[:24]
        path = self.file.path.parent / "single" / f"{name}.npz"
        if not path.exists():
            images, run = self._called(plan, key)
            path.parent.mkdir(exist_ok=True)
            with written_whole(path) as temporary:
                np.savez(temporary, image=np.stack(images).astype(np.float32), seconds=run.seconds)
        with np.load(path, allow_pickle=False) as kept:
            return SingleImage(kept["image"], float(kept["seconds"]))

    def _called(self, plan: Plan, key: BenchKey) -> tuple[list[Any], Run]:
        """Return the images of a call, and its statistics. A short call before it installs the plan, uncounted."""
        from torch import Generator

        ranks = tuple(range(plan.world_size))
        for steps in (WARM_UP_STEPS, key.setting.steps):
            job = self.pipe.submit(
                prompt=key.prompt,
                generator=Generator("cpu").manual_seed(key.seed),
                num_inference_steps=steps,
                output_type="np",
                plan=plan,
                ranks=ranks,
                **self.call,
            )
            output = job.result()
        assert job.run is not None, "it has ended"
        return images_of(output) or [], job.run


def prompts_from(texts: Sequence[str], seed: int) -> Iterator[BenchPrompt]:
    """Yield prompts with the seeds from `seed` on."""
    for number, text in enumerate(texts):
        yield BenchPrompt(text, seed + number)


def machine_of(devices: Sequence[str]) -> str:
    """Return what seconds and, by its kernels, images depend on: devices, of accelerators the hardware too, and cores.

    Asks no driver, which would take memory of a card for this process, that computes nothing on it.
    """
    from patchpar.launch.accelerators import is_accelerator
    from patchpar.launch.devices import available_cores, hardware

    kinds = hardware() if any(map(is_accelerator, devices)) else ()
    return "; ".join([", ".join(devices), *filter(None, [", ".join(kinds)]), f"{available_cores()} cores"])


def model_name(model: str, options: dict[str, Any]) -> str:
    """Return the name of a model and a digest of the names, sizes and times of its files. Raises PlanError."""
    from patchpar.models.files import resolve_model

    path = Path(resolve_model(model, options)[0])
    if not path.is_dir():
        return model
    digest = hashlib.sha256()
    for file in sorted(each for each in path.rglob("*") if each.is_file()):
        stat = file.stat()
        digest.update(f"{file.relative_to(path)}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
    return f"{path.name} {digest.hexdigest()[:12]}"
