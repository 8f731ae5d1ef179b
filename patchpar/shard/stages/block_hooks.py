"""Hooks on the blocks of a network: a pass numbers their calls, and may return outputs without running blocks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from patchpar.comm.pytree import tensors_in
from patchpar.comm.transport import TensorSpec
from patchpar.errors import UnsupportedModel
from patchpar.shard.hooks import ForwardHook, HookSet
from patchpar.shard.stages.block_outputs import OutputStructure
from patchpar.shard.stages.layout import Given, RecordedCall
from patchpar.shard.weights.packed import blocks_of

HOOK = "patchpar_stage"
Run = partial[Any]
GivenTo = Callable[[Run], Given]
"""What the block is given that the argument runs. It changes on all ranks that call a block together, or on none."""
OnCall = Callable[[int, str, Run], Any]
"""What a block call returns, from its number, the path of the block, and a function that runs it."""


class BlockHooks:
    """Hooks on the blocks of `network`, until `close`. Outside a pass blocks run as without them."""

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        self.paths = [path for path, block in blocks_of(network).items() if any(True for _ in block.parameters())]
        self._on_call: OnCall | None = None
        self._number, self._hooks = 0, HookSet()
        for path in self.paths:
            self._hooks.install(network.get_submodule(path), ForwardHook(partial(self._run, path)), HOOK)

    def pass_through(self, on_call: OnCall, forward: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, int]:
        """Return the output of `forward(*args, **kwargs)` and how many block calls it made, each given to `on_call`."""
        self._on_call, self._number = on_call, 0
        try:
            return forward(*args, **kwargs), self._number
        finally:
            self._on_call = None

    def _run(self, path: str, _: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return the output of a block. A block that another one calls is part of that."""
        on_call = self._on_call
        if on_call is None:
            return forward(*args, **kwargs)
        self._on_call = None
        try:
            output = on_call(self._number, path, partial(forward, *args, **kwargs))
        finally:
            self._on_call = on_call
        self._number += 1
        return output

    def close(self) -> None:
        """Remove the hooks. Idempotent."""
        self._hooks.close()


def given_to(run: Run) -> Given:
    """Return what a block is given that `run` runs."""
    return tuple(map(TensorSpec.of, tensors_in((run.args, run.keywords))))


class Recorder:
    """Records the block calls of a pass in which all blocks run, with the work of each.

    Work is counted as multiplications by the weights of Linears and convolutions, with hooks on these modules. A
    dispatch mode such as torch's FlopCounterMode would also count attention, but fails in flex attention, and what
    Dynamo keeps of the failure breaks later calls.
    """

    def __init__(self, network: nn.Module, given: GivenTo = given_to) -> None:
        self.calls: list[RecordedCall] = []
        self._network, self._given = network, given

    def __call__(self, number: int, path: str, run: Run) -> Any:
        """Run a block. Raises UnsupportedModel for an output that cannot be sent."""
        given = self._given(run)
        with _multiplications(self._network.get_submodule(path)) as counts:
            output = run()
        form = OutputStructure.of(output)
        if form is None:
            raise UnsupportedModel(
                f"{path} of {type(self._network).__name__} returns a {type(output).__name__} with more than tensors "
                "and numbers, which cannot be sent to another stage: use stage=1"
            )
        self.calls.append(RecordedCall(path, given, form, sum(counts)))
        return output


@contextmanager
def _multiplications(block: nn.Module) -> Iterator[list[int]]:
    counts: list[int] = []

    def count(module: nn.Module, _: Any, output: Any) -> None:
        weight = module.weight
        if isinstance(output, Tensor) and isinstance(weight, Tensor):
            counts.append(output.numel() // weight.shape[0] * weight.numel())

    with HookSet() as hooks:
        for module in block.modules():
            if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)):
                hooks.after(module, count)
        yield counts
