"""Where the error of half precision comes from: one forward of plain diffusers, of which one kind of operation is wide.

    python -m benchmarks.parity.rounding --write docs/figures/rounding.md
    python -m benchmarks.parity.rounding sdxl flux

Weights and inputs are in a half format. An operation computed in fp32 either rounds its result, as kernels of half
formats do by themselves, or hands it on as it is. What is left of the error tells whether it is one of arithmetic,
which better kernels would take away, or one of values being stored in few bits between operations. Exit code 1 if
nearly nothing is not left with everything in fp32: the control.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from benchmarks.page import publish
from benchmarks.parity import parsed

NAMES = ("sd", "sdxl", "flux", "sd3")
DTYPE = torch.bfloat16
SEEDS = range(4)
LEFT = 0.05
"""What may be left of the error with everything in fp32: inputs that diffusers rounds, such as embedded timesteps."""
TIMESTEP = "of these, timestep times 1000"
KINDS = {
    "convolutions, linear layers": ("convolution", "addmm", "mm", "bmm", "baddbmm"),
    "norms": ("native_group_norm", "native_layer_norm", "_fused_rms_norm", "rsqrt", "mean", "pow", "var_mean"),
    "attention": ("_scaled_dot_product_flash_attention_for_cpu", "_softmax"),
    "activations": ("silu", "gelu", "sigmoid", "tanh"),
    "sums and products": ("add", "sub", "mul", "div", "neg"),
    TIMESTEP: (),
}
KIND_OF = {operation: kind for kind, operations in KINDS.items() for operation in operations}
HALF = (torch.float16, torch.bfloat16)


def kind_of(operation: str, args: Sequence[Any], chosen: Collection[str]) -> str | None:
    """Return the kind of an operation, the narrower one where that is chosen; None for one that rounds nothing."""
    is_timestep = operation == "mul" and 1000 in [x for x in args if isinstance(x, int | float)]
    return TIMESTEP if is_timestep and TIMESTEP in chosen else KIND_OF.get(operation)


class WideOperations(TorchDispatchMode):
    """Operations of some kinds are computed in fp32; those of the `kept` kinds hand their results on unrounded.

    The network sees half formats everywhere: what is not rounded goes beside them, from operation to operation.
    """

    def __init__(self, computed: Collection[str], kept: Collection[str]) -> None:
        super().__init__()
        self._computed, self._kept = frozenset(computed), frozenset(kept)
        self._wide: dict[int, tuple[Tensor, Tensor]] = {}  # by id: a tensor, which stays alive, and its values in fp32

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator."""
        kind, kwargs = kind_of(func.overloadpacket.__name__, args, self._computed), kwargs or {}
        native = func(*args, **kwargs)
        has_wide = any(id(x) in self._wide for x in tree_leaves((args, kwargs)))
        if not (has_wide or kind in self._computed):
            return native
        wide = func(*tree_map(self._widened, args), **tree_map(self._widened, kwargs))
        return tree_map(partial(self._handed_on, kind), native, wide)

    def _widened(self, x: Any) -> Any:
        return self._wide[id(x)][1] if id(x) in self._wide else in_fp32(x)

    def _handed_on(self, kind: str | None, native: Any, wide: Any) -> Any:
        if not isinstance(native, Tensor) or not native.is_floating_point():
            return native
        found = native if kind is None and native.dtype in HALF else wide.to(native.dtype)
        if native.dtype in HALF and (kind is None or kind in self._kept):
            self._wide[id(found)] = found, wide
        return found


def in_fp32(x: Any) -> Any:
    """Return a tensor, or a dtype, of a half format in fp32, and anything else as it is."""
    if isinstance(x, torch.dtype):
        return torch.float32 if x in HALF else x
    return x.float() if isinstance(x, Tensor) and x.dtype in HALF else x


def calls_of(name: str) -> tuple[nn.Module, list[dict[str, Any]]]:
    """Return a tiny denoiser in the half format, and what it is called with in the first step of some images."""
    from tests import tiny

    found = tiny.build(name)
    found.pipe.to(DTYPE)
    calls: list[dict[str, Any]] = []

    class Called(Exception):
        """The call is known."""

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        calls.append({"args": args, "kwargs": kwargs})
        raise Called

    hook = found.denoiser.register_forward_pre_hook(note, with_kwargs=True)
    for seed in SEEDS:
        try:
            found.pipe(**found.call_kwargs | {"generator": torch.Generator().manual_seed(seed)})
        except Called:
            continue
    hook.remove()
    return found.denoiser, calls


def forward(denoiser: nn.Module, call: dict[str, Any]) -> Tensor:
    """Return a prediction, in fp32."""
    with torch.no_grad():
        found = denoiser(*call["args"], **call["kwargs"])
    return (found[0] if isinstance(found, tuple) else found.sample).float()


def errors(name: str) -> dict[str, list[float]]:
    """Mean relative error of a forward: as it is, then by what is computed in fp32."""
    from tests.tensors import relative

    denoiser, calls = calls_of(name)
    denoiser.float()
    truths = [forward(denoiser, tree_map(in_fp32, call)) for call in calls]
    denoiser.to(DTYPE)

    def error(computed: Collection[str], kept: Collection[str]) -> float:
        with WideOperations(computed, kept):
            found = [forward(denoiser, call) for call in calls]
        return sum(relative(*each) for each in zip(found, truths, strict=True)) / len(calls)

    found = {"nothing": [error((), ()), error((), ())]}
    for kind in KINDS:
        found[kind] = [error([kind], ()), error([kind], [kind])]
    found["all of these"] = [error(KINDS, ()), error(KINDS, KINDS)]
    return found


def lines_of(names: Sequence[str]) -> Iterator[str]:
    """Yield the table, and what stands above it. Raises ValueError if the control fails."""
    yield "# Rounding in half precision"
    yield ""
    yield (
        f"How far a forward of plain diffusers in {str(DTYPE).removeprefix('torch.')} is from the same weights and "
        f"inputs computed in fp32: mean relative error over {len(SEEDS)} inputs, tiny networks with random weights, "
        "CPU, one process. `rounded`: operations of this kind are computed in fp32, and their results rounded, so that "
        "what is left is the error of results being stored in few bits. `kept`: their results go on in fp32. Measured "
        "by `python -m benchmarks.parity.rounding`, written with `--write docs/figures/rounding.md`."
    )
    yield ""
    heads = [f"{name}, {how}" for name in names for how in ("rounded", "kept")]
    found = {name: errors(name) for name in names}
    yield f"| in fp32 | {' | '.join(heads)} |"
    yield "|---" * (1 + len(heads)) + "|"
    for kind in ("nothing", *KINDS, "all of these"):
        cells = [f"{value:.1e}" for name in names for value in found[name][kind]]
        yield f"| {kind} | {' | '.join(cells)} |"
    for name, each in found.items():
        if each["all of these"][1] > LEFT * each["nothing"][0]:
            raise ValueError(f"{name}: with everything in fp32 {each['all of these'][1]:.1e} is left of the error")


def main() -> int:
    """Print the table, and write it."""
    options = parsed(__doc__, NAMES, has_steps=False)
    torch.set_num_threads(1)
    publish(lines_of(options.names), options.write)
    return 0


if __name__ == "__main__":
    sys.exit(main())
