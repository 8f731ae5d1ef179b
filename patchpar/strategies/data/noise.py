"""Random numbers on axis `data`, equal to those of one call with all prompts.

Each rank samples noise for all prompts and keeps its rows, so that generators end in the state of one call too.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.utils import torch_utils
from torch import Tensor

from patchpar.errors import PlanError
from patchpar.shard.hooks import HookSet

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
            raise PlanError(
                f"{self.pipeline} samples noise for {rows} rows from torch's own generator, though it was given "
                f"another one: which of them belong to which of {self.own * self.images} images is not known, so that "
                "data ranks may give other images. Use data=1 for this call"
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

    def _sampled(self, plain: Callable[..., Tensor], shape: Sequence[int], generator: Any, **more: Any) -> Tensor:
        if not self._is_of_all(shape[0], generator):
            return plain(shape, generator=generator, **more)
        self._is_inside = True
        try:
            whole = shape[0] // self._rows.own * self._rows.total, *shape[1:]
            noise = plain(whole, generator=generator, **more)
        finally:
            self._is_inside = False
        return noise[self._rows.rows(len(noise))].clone()

    def _is_of_all(self, count: int, generator: Any) -> bool:
        if self._is_inside:  # of diffusers' function, which calls torch's
            return False
        if generator is None and self._given is not None:
            self._rows.check(count)
            return True
        return generator is self._given and not isinstance(generator, list) and count % self._rows.own == 0


@contextmanager
def noise_of_whole_batch(given: Any, rows: NoiseRows) -> Iterator[None]:
    """While open, noise is our part of that for all prompts, unless generators are `given` as a list (PlanError)."""
    noise, plain = NoiseOfAll(given, rows), torch_utils.randn_tensor
    with HookSet() as hooks:
        for module in [module for module in list(sys.modules.values()) if module is not torch_utils]:
            if getattr(module, "__dict__", {}).get("randn_tensor") is plain:
                hooks.replace(module, "randn_tensor", noise.randn_tensor)
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
