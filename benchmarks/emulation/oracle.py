"""The emulation: forwards of a UNet's convolutions, group norms and self-attentions, computed place by place."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.emulation.policy import EmulatedPolicy
from benchmarks.emulation.sight import (
    LEAST_BEFOREHAND,
    Conv,
    Cut,
    KeyValues,
    Moments,
    Partial,
    Span,
    as_tokens,
    attend,
    context_of,
    convolve,
    corrected,
    corrected_map,
    merge,
    merged,
    moments_of,
    narrow,
    normalise,
    part_of_line,
    tokens_of,
)
from patchpar.plan.bands import split_bands
from patchpar.shard.sdpa import AttentionCall, SdpaMode
from patchpar.shard.unet.discover import ExchangeSites, discover
from patchpar.shard.unet.spatial_arguments import map_of

DIMS = {"rows": -2, "columns": -1}
LEAST = {"corrected": 0.0, "guarded": 0.3}  # of the own variance: one below is replaced by it


def _refuse_options(call: AttentionCall) -> None:
    if call.attn_mask is not None or call.dropout_p or call.is_causal or call.enable_gqa:
        raise ValueError("only plain self-attention can be emulated, with no mask, dropout, causality or grouped heads")


class Emulation:
    """While open, calls of `unet` are computed as `places` ranks with this policy would.

    One call is one evaluation: both branches of the guidance belong in one batch. `reset()` before every image.
    `total_stride` is the unit of the bands, found by probing the UNet where it is not given. Raises ValueError for
    fewer than two places, for an unknown split, and for another shape of the latent without a reset.
    """

    def __init__(
        self,
        unet: nn.Module,
        patches: int,
        policy: EmulatedPolicy,
        *,
        total_stride: int | None = None,
        split: str = "rows",
    ) -> None:
        if patches < 2:
            raise ValueError(f"patches={patches}: one rank exchanges nothing, use at least 2")
        if split not in DIMS:
            raise ValueError(f"split={split!r} is neither rows nor columns")
        self.unet, self.patches, self.policy = unet, patches, policy
        self.evaluation = 0
        self.cache: dict[str, Any] = {}  # by layer: what was exchanged last, of all places
        self.partials: dict[str, list[Partial]] = {}  # by layer and place: attention to all remote tokens
        self.earlier: dict[str, Any] = {}  # by layer: keys and values of the evaluation before
        self.along: dict[str, list[list[Tensor]]] = {}  # by layer: parts of lines, of keys and of values, by place
        self.times: list[float] = []  # timesteps of all evaluations
        self._total_stride, self._dim = total_stride, DIMS[split]
        self._cut: Cut | None = None
        self._shape: torch.Size | None = None
        self._sites: ExchangeSites | None = None
        self._replaced: list[tuple[nn.Module, Callable[..., Any] | None]] = []

    def __enter__(self) -> Emulation:
        self.reset()
        self._replace(self.unet, self._call)
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the UNet as it was, and keep nothing."""
        while self._replaced:
            module, before = self._replaced.pop()
            if before is None:
                del module.__dict__["forward"]
            else:
                module.forward = before
        self._sites = None
        self.reset()

    def reset(self) -> None:
        """Begin an image: forget every earlier step."""
        self.evaluation, self._shape = 0, None
        self.cache.clear()
        self.partials.clear()
        self.earlier.clear()
        self.along.clear()
        self.times.clear()

    @property
    def synchronous(self) -> bool:
        """Whether this evaluation is exact."""
        return self.evaluation < self.policy.warmup_steps

    def _replace(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        """`forward(original, *args, **kwargs)` from now on."""
        original = module.forward
        self._replaced.append((module, module.__dict__.get("forward")))
        module.forward = functools.wraps(original)(functools.partial(forward, original))

    def _call(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._sites is None:
            self._sites = discover(self.unet, original, args, kwargs)
            self._install(self._sites)
        sample = map_of(args, kwargs)
        if self._shape not in (None, sample.shape):
            raise ValueError(f"a latent of {tuple(sample.shape)} after {tuple(self._shape)}: reset() between images")
        self._shape = sample.shape
        timestep = args[1] if len(args) > 1 else kwargs["timestep"]
        self.times.append(float(torch.as_tensor(timestep).flatten()[0]))
        size = (sample.shape[-2], sample.shape[-1])
        bands = split_bands(size[self._dim], self.patches, self._total_stride or self._sites.total_stride)
        self._cut = Cut(bands=bands, size=size, dim=self._dim)
        output = original(*args, **kwargs)
        self.evaluation += 1
        return output

    def _install(self, sites: ExchangeSites) -> None:
        modules: dict[str, Any] = dict(self.unet.named_modules())
        for norm in sites.norms:
            self._replace(modules[norm.path], functools.partial(self._norm, norm.path, modules[norm.path]))
        for conv in sites.convs:
            if conv.reads_sample and self.policy.halo != "none":
                continue  # every place holds the whole latent
            layer = functools.partial(self._conv, conv.path, modules[conv.path], conv.trailing)
            self._replace(modules[conv.path], layer)
        for number, path in enumerate(sites.attentions):  # in the order of execution
            self._replace(modules[path], functools.partial(self._attention, path, number))

    def _exchange(self, path: str, now: Any, *, fresh: bool) -> Any:
        """What a place has of the others, where `now` is everyone's of this step. Keeps it for the next evaluation."""
        if not self.policy.needs_past:
            return now
        before = self.cache.get(path)
        frozen = self.policy.frozen and not self.synchronous
        if not frozen:
            self.cache[path] = now
        return now if self.synchronous or (fresh and not frozen) else before

    def _conv(self, path: str, conv: Conv, trailing: int, original: Callable[..., Tensor], x: Tensor) -> Tensor:
        """`trailing` counts zero rows that the model itself has padded on at the end."""
        if self.policy.halo == "none":
            others = torch.zeros_like(x)
        else:
            others = self._exchange(path, x.clone(), fresh=self.policy.halo == "fresh")
        if self.synchronous:
            return original(x)
        spans = self._cut.spans(x.shape[self._dim] - trailing)
        return torch.cat([convolve(conv, original, x, others, span, self._dim) for span in spans], self._dim)

    def _norm(self, path: str, norm: nn.GroupNorm, original: Callable[..., Tensor], x: Tensor) -> Tensor:
        grid = self._cut.grid(x.shape[-1]) if x.dim() == 3 else x.shape[-2:]  # tokens [B, C, L], or a map
        maps = x.unflatten(-1, grid) if x.dim() == 3 else x
        pieces = [narrow(maps, self._dim, span) for span in self._cut.spans(grid[self._dim])]
        now = [moments_of(piece, norm.num_groups) for piece in pieces]
        then = self.cache.get(path)
        displayed = self._exchange(path, now, fresh=self.policy.moments == "fresh")
        if self.synchronous:
            return original(x)
        normalised = [
            normalise(norm, piece, *self._moments(group_rank, now, then, displayed))
            for group_rank, piece in enumerate(pieces)
        ]
        return torch.cat(normalised, self._dim).view(x.shape)

    def _moments(
        self, group_rank: int, now: Sequence[Moments], then: Sequence[Moments] | None, displayed: Sequence[Moments]
    ) -> tuple[Tensor, Tensor]:
        """Mean and variance that `group_rank` normalises with, from moments of this step, of the last, as shown."""
        others = [each for other, each in enumerate(displayed) if other != group_rank]
        if self.policy.moments in LEAST:
            mean, variance = corrected(merged(then), then[group_rank], now[group_rank], LEAST[self.policy.moments])
        else:
            seen = now[group_rank] if self.policy.moments == "separate" else merged([now[group_rank], *others])
            mean, variance = seen.mean_BG, seen.variance_BG
        if self.policy.published and self.policy.moments not in ("fresh", "separate"):
            count = now[group_rank].count
            variance = variance * (count / (count - 1))
        return mean, variance

    def _attention(self, path: str, number: int, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        seen: list[AttentionCall] = []

        def attend(call: AttentionCall) -> Tensor:
            seen.append(call)
            return self._attend(path, number, call)

        with SdpaMode(attend):
            result = original(*args, **kwargs)
        if not seen:
            raise ValueError(f"{path} does not call scaled_dot_product_attention")
        return result

    def _ahead(self) -> float:
        """How far this evaluation goes beyond the last, in units of the one before."""
        before, last, now = self.times[-3:]
        return 0.0 if last == before else min(2.0, max(0.0, (now - last) / (last - before)))

    def _ahead_of(self, before: KeyValues, earlier: KeyValues) -> KeyValues:
        """The last evaluation's keys and values, extrapolated from those of the one before."""
        line = ((new.double(), new.double() - old.double()) for new, old in zip(before, earlier, strict=True))
        return KeyValues(*((new + self._ahead() * moved).to(before.key.dtype) for new, moved in line))

    def _displayed(self, path: str, now: KeyValues, spans: Sequence[Span]) -> KeyValues:
        """The others' keys and values as they are attended to, of this evaluation or older."""
        policy, before, earlier = self.policy, self.cache.get(path), self.earlier.get(path)
        displayed = self._exchange(path, now, fresh=policy.context == "fresh")
        if policy.extrapolated:
            self.earlier[path] = before
            if displayed is before and earlier is not None and not policy.frozen:
                displayed = self._ahead_of(before, earlier)
        if policy.correction == "none" or policy.frozen:
            return displayed
        if not self.synchronous:
            return self._corrected(path, (now, displayed, before), spans)
        if policy.by_owners and before is not None:
            ahead = before if earlier is None else self._ahead_of(before, earlier)
            self._note_lines(path, (now, ahead, before), spans)
        return displayed

    def _corrected(self, path: str, maps: tuple[KeyValues, ...], spans: Sequence[Span]) -> KeyValues:
        """What is shown, corrected. `maps`: now, as shown, and of the last evaluation."""
        kind, dim = self.policy.correction, self._dim
        if not self.policy.by_owners:
            return KeyValues(*(corrected_map(kind, each, spans, dim) for each in zip(*maps, strict=True)))
        along = self.along.get(path) or [[torch.tensor(LEAST_BEFOREHAND, dtype=torch.float64)] * len(spans)] * 2
        self._note_lines(path, maps, spans)
        pairs = zip(zip(*maps, strict=True), along, strict=True)
        return KeyValues(*(corrected_map(kind, each, spans, dim, parts) for each, parts in pairs))

    def _note_lines(self, path: str, maps: tuple[KeyValues, ...], spans: Sequence[Span]) -> None:
        """Note which part of their line the tokens of every place went."""
        self.along[path] = [
            [part_of_line(self.policy.correction, *tokens) for tokens in tokens_of(each, spans, self._dim)]
            for each in zip(*maps, strict=True)
        ]

    def _refreshes(self, number: int) -> bool:
        """Whether the attention layer of this number looks at the others' keys anew."""
        due = (self.evaluation + number) % self.policy.refresh == 0
        return self.synchronous or (due and not self.policy.frozen)

    def _attend(self, path: str, number: int, call: AttentionCall) -> Tensor:
        """`number` is the layer's place in the order of execution."""
        _refuse_options(call)
        scale = call.query.shape[-1] ** -0.5 if call.scale is None else call.scale
        grid, dim = self._cut.grid(call.key.shape[2]), self._dim
        spans = self._cut.spans(grid[dim])
        now = KeyValues(call.key.mT.unflatten(-1, grid), call.value.mT.unflatten(-1, grid))
        displayed = self._displayed(path, now, spans)
        query = call.query.mT.unflatten(-1, grid)
        queries = [narrow(query, dim, span).flatten(-2).mT for span in spans]
        remote = [
            list(context_of(group_rank, displayed, spans, dim, self.policy)) for group_rank in range(self.patches)
        ]
        cached = self.policy.context == "partials"
        if cached and self._refreshes(number):
            self.partials[path] = [attend(*each, scale) for each in zip(queries, remote, strict=True)]
        if self.synchronous:
            return call.run()
        outputs = []
        for group_rank, span in enumerate(spans):
            own = as_tokens(now.piece(dim, span))
            if cached:
                out = merge(attend(queries[group_rank], [own], scale), self.partials[path][group_rank])
            else:
                out = attend(queries[group_rank], [own, *remote[group_rank]], scale).out
            outputs.append(out.mT.unflatten(-1, narrow(query, dim, span).shape[-2:]))
        return torch.cat(outputs, dim).flatten(-2).mT.to(call.query.dtype)
