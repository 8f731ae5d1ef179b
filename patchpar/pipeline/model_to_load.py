"""The model that ranks load or adopt: what its weights take, and the plan by which each rank holds them.

Torch is imported only where a forecast is needed.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patchpar.errors import UnsupportedModel
from patchpar.launch.executor import Executor
from patchpar.launch.host_memory import FreeMemory, free_memory
from patchpar.models.files import ModelFolder, check_memory, needed_bytes, resolve_model
from patchpar.models.hub import cached_model
from patchpar.models.info import networks_of
from patchpar.models.split_facts import SplitFacts
from patchpar.pipeline.auto_weights import ModelForecast, WeightChoice, advice, choose_weights, is_small, shortage
from patchpar.pipeline.validate import check_plan
from patchpar.plan.plan import Plan

CPU = "cpu"
log = logging.getLogger(__name__)


class ModelToLoad(ABC):
    """A model, before any rank has it. `method`: of the engine, which loads it."""

    method: str

    @property
    @abstractmethod
    def is_fresh(self) -> bool:
        """Whether all of it is from files."""

    @property
    @abstractmethod
    def weight_bytes(self) -> int:
        """Bytes of all weights; 0 where they are unknown."""

    @abstractmethod
    def forecast(self) -> ModelForecast | None:
        """Return what it takes; None where that is unknown, as of quantised weights before they are loaded."""

    @abstractmethod
    def arguments(self, plan: Plan | None) -> tuple[Any, ...]:
        """Return the arguments of the method, for ranks that hold what `plan` says; None: everything."""

    def split_facts(self) -> SplitFacts:
        """Return what is known of the plans that it takes."""
        return SplitFacts()

    def check(self, devices: Sequence[str], plan: Plan | None) -> None:  # noqa: B027 - most have nothing to check
        """Raise PlanError if ranks of `devices` lack host memory for the weights."""

    def weights_for(self, devices: Sequence[str], wanted: Plan | None) -> WeightChoice | None:
        """Return the weights with plan="auto", before ranks start; None where only ranks know what is free.

        `wanted`: the plan; None for "auto". Raises PlanError, also for a plan that the model is known not to take.
        """
        if wanted is not None:
            check_plan(self.split_facts(), wanted)
        if wanted is not None or all(device == CPU for device in devices):
            host = FreeMemory(device=None, host=free_memory())
            choice = self.chosen(len(devices), host) if wanted is None else WeightChoice()
            self.check(devices, choice.plan if wanted is None else wanted)
            return choice
        return None

    def weights_on(self, ranks: Executor, devices: Sequence[str]) -> WeightChoice:
        """Return the weights with plan="auto" for ranks that have started. Raises PlanError."""
        if not self.weight_bytes:
            return WeightChoice()
        found = ranks.call("free_memory", everywhere=ranks.kind != "local")
        free = FreeMemory.least([each for each in found if each is not None])
        choice = self.chosen(ranks.world_size, free)
        self.check(devices, choice.plan)
        return choice

    def chosen(self, devices: int, free: FreeMemory) -> WeightChoice:
        """Return the weights with plan="auto" for so many devices. Raises PlanError where no plan fits."""
        if is_small(self.weight_bytes, devices, free):
            return WeightChoice()
        forecast = self.forecast()
        return WeightChoice() if forecast is None else choose_weights(forecast, devices, free)


def folder_of_hub(name: str, options: Mapping[str, Any]) -> ModelFolder | None:
    """Return the folder of a hub name in the cache, where its files are after this; None if it is refused later.

    Fetched here, a model is forecast in its first run too, and ranks that load it do not wait. Raises PlanError.
    """
    folder = cached_model(name, options)
    if folder is None:
        from patchpar.models.loading import fetch_model  # imports torch

        folder = fetch_model(name, options)
    return folder


@dataclass(frozen=True, slots=True)
class ModelInFiles(ModelToLoad):
    """A model folder; None for one that is refused when it is loaded. `options`: of from_pretrained."""

    source: str
    options: Mapping[str, Any]
    folder: ModelFolder | None
    method = "load"

    @classmethod
    def of(cls, model: str | Path, options: Mapping[str, Any]) -> "ModelInFiles":
        """Return a model by its folder or name. Files of a hub name are fetched if need be. Raises PlanError."""
        source, options, folder = resolve_model(model, options)
        return cls(source, options, folder or folder_of_hub(source, options))

    @property
    def is_fresh(self) -> bool:
        """See ModelToLoad."""
        return not any(map(callable, self.options.values()))

    @property
    def weight_bytes(self) -> int:
        """See ModelToLoad."""
        return needed_bytes(self.folder, self.options)

    @property
    def path(self) -> Path | None:
        """The folder; None for a model that is refused when it is loaded."""
        return None if self.folder is None else self.folder.path

    def split_facts(self) -> SplitFacts:
        """See ModelToLoad."""
        return SplitFacts.of_folder(self.path, self.options)

    def forecast(self) -> ModelForecast | None:
        """See ModelToLoad."""
        return ModelForecast.of_folder(self.path, self.options)

    def arguments(self, plan: Plan | None) -> tuple[Any, ...]:
        """See ModelToLoad."""
        need = self.weight_bytes
        return self.source, self.options, need if plan is None else plan.held_bytes(need), plan

    def check(self, devices: Sequence[str], plan: Plan | None) -> None:
        """See ModelToLoad."""
        base, free = plan or Plan(patch=len(devices)), FreeMemory(device=None, host=free_memory())
        check_memory(self.source, self.folder, self.options, devices, plan, lambda: advice(base, self.forecast(), free))
        if plan is None or set(devices) != {CPU} or is_small(self.weight_bytes, len(devices), free):
            return
        text = shortage(plan, self.forecast(), free)
        if text:
            log.warning("%s", text)


@dataclass(frozen=True, slots=True)
class ModelInMemory(ModelToLoad):
    """A pipeline in memory."""

    pipe: Any
    method = "adopt"

    @property
    def is_fresh(self) -> bool:
        """See ModelToLoad."""
        return False

    @property
    def weight_bytes(self) -> int:
        """See ModelToLoad."""
        from patchpar.models.dry_run.dry_run import weight_bytes  # imports torch

        return sum(map(weight_bytes, networks_of(self.pipe).values()))

    def forecast(self) -> ModelForecast | None:
        """See ModelToLoad."""
        from patchpar.models.dry_run.empty_pipeline import emptied_copy  # imports diffusers

        try:
            return ModelForecast.of(emptied_copy(self.pipe))
        except UnsupportedModel:  # quantised
            return None

    def arguments(self, plan: Plan | None) -> tuple[Any, ...]:
        """See ModelToLoad."""
        return self.pipe, plan
