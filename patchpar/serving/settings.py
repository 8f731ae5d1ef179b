"""Settings of `patchpar serve`: what is served, to whom, and what a request may ask for at most."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from patchpar.errors import PlanError
from patchpar.models.files import path_of
from patchpar.pipeline.call_placement import MAX_RETRIES
from patchpar.plan.plan import Plan
from patchpar.plan.scalars import is_whole
from patchpar.serving.api_keys import ApiKeys
from patchpar.serving.lora_registry import RegisteredLora
from patchpar.serving.scheduling.policies import POLICIES
from patchpar.web.server import HOME, check_port, is_local, names_of

MAX_BATCH = 32
MAX_BATCH_WAIT = 10.0
"""Seconds."""
QUALITIES = ("low", "medium", "high", "xhigh", "max", "standard", "hd")
"""Values of the field `quality`, beside auto."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The model: a folder or name, names of devices, a plan, and `options` of ParallelPipeline.from_pretrained.

    `per_request`: the devices that work on a request with an automatic plan; None is all of them, or what a policy
    gives it. Requests that leave devices free run at the same time. `measured`: where seconds of steps are kept, and of
    what they are. `loras`: those that requests may select. `batch`: most requests of one call; `batch_wait`: seconds
    for which an idle server waits for them. `quality_steps`: steps by the field `quality`. `recovers`: a request
    that has lost a worker goes on. Raises PlanError for a plan with axis data, or with a strategy that has no
    effect, two LoRAs of one name, an unknown quality, and numbers out of bounds.
    """

    model: str
    devices: tuple[str, ...]
    plan: Plan | str = "auto"
    per_request: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    measured: tuple[Any, ...] = ()
    loras: tuple[RegisteredLora, ...] = ()
    batch: int = 1
    batch_wait: float = 0.0
    quality_steps: Mapping[str, int] = field(default_factory=dict)
    recovers: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.plan, Plan) and self.plan.data > 1:
            raise PlanError(
                f"plan {self.plan}: axis data divides prompts, and a server makes one image after another: use cfg, "
                "patch or stage"
            )
        if isinstance(self.plan, Plan):
            self.plan.check_strategy()
        self._check_batches()
        names = [each.name for each in self.loras]
        if len(set(names)) < len(names):
            raise PlanError(f"--lora: {', '.join(names)}: each needs a name of its own")
        for name, steps in self.quality_steps.items():
            if name not in QUALITIES or not is_whole(steps):
                raise PlanError(f"--quality {name}={steps}: use {', '.join(QUALITIES)} with steps, as low=8,high=30")
        most = len(self.devices)
        if isinstance(self.plan, Plan) and (self.plan.world_size > most or self.plan.divides_weights):
            self.plan.check_devices(most)
        if self.per_request is not None and not is_whole(self.per_request, most=most):
            there_are = "there is 1 device: use 1" if most == 1 else f"there are {most} devices: use 1 to {most}"
            raise PlanError(f"--per-request {self.per_request}: {there_are}")

    def _check_batches(self) -> None:
        if not is_whole(self.batch, most=MAX_BATCH):
            raise PlanError(f"--batch {self.batch}: use 1, for none, to {MAX_BATCH}")
        wait, most = self.batch_wait * 1000, MAX_BATCH_WAIT * 1000
        if not 0 <= wait <= most:
            raise PlanError(f"--batch-wait-ms {wait:g}: use 0, for none, to {most:g}")
        if wait and self.batch == 1:
            raise PlanError(f"--batch-wait-ms {wait:g}: add --batch, or leave it out")

    @property
    def opened_with(self) -> Plan | str:
        """The plan that the pipeline is opened with: of one that divides weights, each device loads its part."""
        return self.plan if isinstance(self.plan, Plan) and self.plan.divides_weights else "auto"

    @property
    def max_retries(self) -> int:
        """How often a request is made again after it has lost a worker."""
        return MAX_RETRIES if self.recovers else 0

    def devices_of(self, plan: Plan | str) -> int:
        """Return how many devices work on a request with this plan."""
        return plan.world_size if isinstance(plan, Plan) else self.per_request or len(self.devices)

    @property
    def name(self) -> str:
        """The name by which clients request the model: a hub id, or the last part of a folder's path.

        Raises PlanError for a path that cannot be.
        """
        return _name_of(self.model)


@cache
def _name_of(model: str) -> str:
    folder = path_of(model)
    if folder.is_dir():  # also one that reads like a hub id, and one whose path has no name, as `.`
        return folder.name if folder.name not in ("", "..") else folder.resolve().name
    parts = model.rstrip("/").split("/")
    return model if len(parts) == 2 and parts[0] not in ("", ".", "..", "~") else parts[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """Most pixels of an image, denoising steps, images, frames, characters of a prompt, bytes of a body and of a form.

    `stream_seconds`: the longest stream.

    Raises PlanError for a limit below 1.
    """

    pixels: int = 2048 * 2048
    steps: int = 150
    images: int = 10
    frames: int = 257
    characters: int = 32_000
    body_bytes: int = 1 << 20
    form_bytes: int = 32 << 20
    stream_seconds: float = 3600.0

    def __post_init__(self) -> None:
        for name, flag in (("pixels", "--max-pixels"), ("steps", "--max-steps"), ("frames", "--max-frames")):
            if not is_whole(getattr(self, name)):
                raise PlanError(f"{flag} {getattr(self, name)}: it must be at least 1")
        if not 0 < self.stream_seconds < float("inf"):
            raise PlanError(f"--max-seconds {self.stream_seconds:g}: it must be a finite number of seconds above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptResults:
    """How long results of jobs are kept, in seconds, and how many; the oldest ones go first.

    `gigabytes`: of 10^9 bytes, what results in memory and videos take together, and files of images by themselves.
    `folder`: of videos; None is one that is deleted at the end. Raises PlanError for a limit that is too low, or no
    folder that can be written to.
    """

    seconds: float = 3600.0
    count: int = 256
    gigabytes: float = 4.0
    folder: Path | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.seconds < float("inf"):
            raise PlanError(f"--ttl {self.seconds:g}: it must be a finite number of seconds, at least 1")
        if not is_whole(self.count):
            raise PlanError(f"--max-kept {self.count}: it must be at least 1")
        if not 0 < self.gigabytes < float("inf"):
            raise PlanError(f"--max-kept-gb {self.gigabytes:g}: it must be a finite number of gigabytes above 0")
        if self.folder is not None and not self.folder.is_dir():
            raise PlanError(f"--files {self.folder}: there is no such folder; make it first")
        if self.folder is not None and not os.access(self.folder, os.W_OK | os.X_OK):
            raise PlanError(
                f"--files {self.folder}: it cannot be written to: change its permissions, or use another one"
            )

    @property
    def bytes(self) -> int:
        """What `gigabytes` are in bytes."""
        return int(self.gigabytes * 1e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Address, access and queue. `grace`: seconds for accepted requests to finish after a signal.

    `journal`: a folder for those that do not, which the next server goes on with. `page_paths`: begins of paths of a
    page, which has a log-in of its own. `max_queue`: most requests that wait; `max_per_key`: of one API key;
    `max_per_user`: of one user of a key, whom requests name.

    Raises PlanError for an address beyond this machine without a key, and for limits below 1.
    """

    host: str = HOME
    port: int = 8000
    keys: ApiKeys = field(default_factory=ApiKeys)
    admin_keys: ApiKeys = field(default_factory=ApiKeys)
    max_queue: int = 32
    max_per_key: int | None = None
    max_per_user: int | None = None
    policy: str = "latency"
    grace: float = 30.0
    kept: KeptResults = field(default_factory=KeptResults)
    journal: Path | None = None
    page_paths: tuple[str, ...] = ()
    limits: RequestLimits = field(default_factory=RequestLimits)

    def __post_init__(self) -> None:
        check_port(self.port, "--port")
        if self.policy not in POLICIES:
            raise PlanError(f"--policy {self.policy}: use one of {', '.join(POLICIES)}")
        for name in ("max_queue", "max_per_key", "max_per_user"):
            value = getattr(self, name)
            if value is not None and not is_whole(value):
                raise PlanError(f"--{name.replace('_', '-')} {value}: it must be at least 1")
        if not 0 <= self.grace < float("inf"):
            raise PlanError(f"--grace {self.grace:g}: it must be a finite number of seconds, or 0")
        if not is_local(self.host) and not self.keys:
            raise PlanError(
                f"--host {self.host}: everybody who reaches this machine could use it; add --api-key-file FILE with a "
                "key of your choice in it"
            )

    @property
    def host_names(self) -> list[str]:
        """Host names that requests may use."""
        return names_of(self.host)
