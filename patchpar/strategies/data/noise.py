"""Random numbers on axis `data`, equal to those of one call with all prompts.

Each rank samples noise for all prompts and keeps its rows, so that generators end in the state of one call too.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from diffusers.utils import torch_utils
from torch import Tensor

from patchpar.errors import PlanError
from patchpar.shard.hooks import HookSet

BROWNIAN = "diffusers.schedulers.scheduling_dpmsolver_sde"
LEAST_DIMS = 4
"""Of what pipelines sample by torch itself and not by diffusers' function: fewer dims are of one image."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseRows:
    """The prompts of one rank, `own` of `total`, with so many `images` each. `rows(count)`: ours of `count` of all."""

    pipeline: str
    own: int
    total: int
    images: int
    rows: Callable[[int], slice]

    def check(self, rows: int) -> None:
        """Refuse rows of unknown order: sampled without the given generator, and not one for each image (PlanError)."""
        if rows != self.own * self.images:
            self.refuse(rows, "torch's own generator, though it was given another one")

    def refuse(self, rows: int, source: str) -> NoReturn:
        """Raise PlanError for rows of unknown order."""
        raise PlanError(
            f"{self.pipeline} samples noise for {rows} rows from {source}: which of them belong to which of "
            f"{self.own * self.images} images is not known, so that data ranks may give other images. Use data=1 for "
            "this call"
        )


class NoiseOfAll:
    """Samples noise for all prompts and returns our `rows`, where a pipeline samples with the generator it was `given`.

    It samples as the pipeline asks with other generators, and with those of a list.
    """

    def __init__(self, given: Any, rows: NoiseRows) -> None:
        self._given, self._rows, self._is_inside = given, rows, False
        self._randn_tensor, self._randn, self._randn_like = torch_utils.randn_tensor, torch.randn, torch.randn_like

    def randn_tensor(
        self, shape: Sequence[int], generator: Any = None, device: Any = None, dtype: Any = None, layout: Any = None
    ) -> Tensor:
        """In place of diffusers' function. Raises PlanError."""
        one = generator[0] if isinstance(generator, list) and len(generator) == 1 else generator  # as diffusers does
        return self._sampled(self._randn_tensor, shape, one, device=device, dtype=dtype, layout=layout)

    def randn(self, *size: Any, generator: Any = None, **more: Any) -> Tensor:
        """In place of torch's. Raises PlanError."""
        shape = size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size
        if len(shape) < LEAST_DIMS:
            return self._randn(*size, generator=generator, **more)
        return self._sampled(self._randn, shape, generator, **more)

    def randn_like(self, x: Tensor, **more: Any) -> Tensor:
        """In place of torch's, for a tensor of any shape. Raises PlanError."""
        if x.ndim < LEAST_DIMS or more:
            return self._randn_like(x, **more)
        return self._sampled(self._randn, x.shape, None, dtype=x.dtype, device=x.device)

    def brownian_tree(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """In place of diffusers' tree of noise, which schedulers such as DPM++ SDE seed once for the whole batch.

        A tree for each row, as of a list of seeds, stays as it is. The function raises PlanError.
        """

        def tree(x: Tensor, t0: float, t1: float, seed: Any = None, **more: Any) -> Callable[..., Tensor]:
            if isinstance(seed, list):
                return plain(x, t0, t1, seed, **more)
            if len(x) % self._rows.own:
                self._rows.refuse(len(x), "one seed")
            whole = plain(x.new_zeros(self._whole(x.shape)), t0, t1, seed, **more)
            return lambda *times: whole(*times)[self._rows.rows(len(x) // self._rows.own * self._rows.total)]

        return tree

    def _whole(self, shape: Sequence[int]) -> tuple[int, ...]:
        return shape[0] // self._rows.own * self._rows.total, *shape[1:]

    def _sampled(self, plain: Callable[..., Tensor], shape: Sequence[int], generator: Any, **more: Any) -> Tensor:
        if not self._is_of_all(shape[0], generator):
            return plain(shape, generator=generator, **more)
        self._is_inside = True
        try:
            noise = plain(self._whole(shape), generator=generator, **more)
        finally:
            self._is_inside = False
        return noise[self._rows.rows(len(noise))].clone()

    def _is_of_all(self, count: int, generator: Any) -> bool:
        if self._is_inside:  # of diffusers' function, which calls torch's
            return False
        if generator is None and self._given is not None:
            self._rows.check(count)
            return True
        is_shared = generator is self._given and not isinstance(generator, list)
        if is_shared and generator is not None and count % self._rows.own:
            self._rows.refuse(count, "one generator")
        return is_shared and count % self._rows.own == 0


@contextmanager
def noise_of_whole_batch(given: Any, rows: NoiseRows) -> Iterator[None]:
    """While open, noise is our part of that for all prompts, unless generators are `given` as a list (PlanError)."""
    noise, plain = NoiseOfAll(given, rows), torch_utils.randn_tensor
    with HookSet() as hooks:
        for module in [module for module in list(sys.modules.values()) if module is not torch_utils]:
            if getattr(module, "__dict__", {}).get("randn_tensor") is plain:
                hooks.replace(module, "randn_tensor", noise.randn_tensor)
        schedulers = sys.modules.get(BROWNIAN)  # loaded with a scheduler that uses it
        if schedulers is not None:
            hooks.replace(schedulers, "BatchedBrownianTree", noise.brownian_tree(schedulers.BatchedBrownianTree))
        hooks.replace(torch, "randn", noise.randn)
        hooks.replace(torch, "randn_like", noise.randn_like)
        yield


@contextmanager
def no_tokens_sampled(pipeline: str) -> Iterator[None]:
    """While open, sampling of tokens is refused (PlanError).

    Sampled tokens depend on those of the prompts before: of language models that rewrite a prompt or generate the
    tokens of an image, and of image models that sample their tokens.
    """

    def refuse(*_: Any, **__: Any) -> Any:
        raise PlanError(
            f"{pipeline} samples tokens: those of a prompt depend on the prompts before it, so that data ranks would "
            "give other images. Use data=1"
        )

    with HookSet() as hooks:
        hooks.replace(torch, "multinomial", refuse)
        yield
