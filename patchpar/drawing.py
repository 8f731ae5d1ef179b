"""One call of the pipeline on one rank: its random numbers, its steps, its callback. The pipeline runs untouched.

caller                       rank
  | <-- ("step", 3, 30) ------ |     scheduler.step has returned
  | <-- StepEnd -------------- |     the caller has a callback_on_step_end
  | --- StepAnswer ----------> |     every rank takes it
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from patchpar.call import DrawOptions, RandomState, StepAnswer, StepEnd, generators_of
from patchpar.clock import StepClock
from patchpar.exchange import Door, Gather
from patchpar.launch.context import RankContext
from patchpar.launch.wire import encode, pack, unpack
from patchpar.mesh import Axis

PLAIN = (bool, int, float, str, type(None))


class Drawing:
    """One call. `steps` counts those of the scheduler."""

    def __init__(self, pipe: Any, context: RankContext, clock: StepClock, options: DrawOptions) -> None:
        self.pipe, self.context, self.clock, self.options = pipe, context, clock, options
        self.steps = 0

    def run(self, kwargs: Mapping[str, Any]) -> Any:
        """Call the pipeline."""
        arguments = dict(kwargs)
        if self.options.has_callback:
            arguments["callback_on_step_end"] = self._ask_callback
        with ExitStack() as stack:
            stack.enter_context(self._stepping())
            stack.enter_context(_marking(self.pipe, self.context))
            if self.options.quiet or self.context.rank > 0:
                stack.enter_context(_no_progress_bar(self.pipe))
            return self.pipe(**arguments)

    def _ask_callback(self, pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        """The caller's callback runs where the caller is; all ranks take its answer."""
        first = self.context.rank == 0
        question = StepEnd(step=step, timestep=timestep, tensors=tensors, facts=facts_of(pipe)) if first else None
        answer: StepAnswer = self.context.ask(question)
        for name, value in answer.attributes.items():
            setattr(pipe, name, value)
        return {name: _moved(value, tensors.get(name)) for name, value in answer.tensors.items()}

    @contextmanager
    def _stepping(self) -> Iterator[None]:
        """Tick the clock whenever the scheduler steps; rank 0 tells the caller."""
        scheduler = getattr(self.pipe, "scheduler", None)
        if scheduler is None:
            yield
            return
        original = scheduler.step

        @functools.wraps(original)  # diffusers reads the signature of scheduler.step
        def step(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self._stepped(scheduler)
            return result

        scheduler.step = step
        try:
            yield
        finally:
            del scheduler.step

    def _stepped(self, scheduler: Any) -> None:
        self.clock.tick()
        self.steps += 1
        self.context.mark(f"step {self.steps}")
        if self.context.rank == 0:
            self.context.emit(("step", self.steps, _total_steps(self.pipe, scheduler)))


def facts_of(pipe: Any) -> dict[str, Any]:
    """The pipeline's own attributes of plain types, such as `num_timesteps` or `_guidance_scale`."""
    public = {name for name in dir(type(pipe)) if isinstance(getattr(type(pipe), name), property)}
    names = [name for name in (*vars(pipe), *public) if not name.startswith("__")]
    found = {name: _attribute(pipe, name) for name in names}
    return {name: value for name, value in found.items() if isinstance(value, PLAIN)}


def _attribute(pipe: Any, name: str) -> Any:
    try:
        return getattr(pipe, name)
    except Exception:  # noqa: BLE001  a property may need what this call does not have
        return ...


def _total_steps(pipe: Any, scheduler: Any) -> int:
    timesteps = getattr(scheduler, "timesteps", None)
    count = getattr(pipe, "_num_timesteps", None)
    return int(count) if isinstance(count, int) else (len(timesteps) if timesteps is not None else 0)


def _moved(value: Any, like: Any) -> Any:
    return value.to(like.device) if isinstance(value, Tensor) and isinstance(like, Tensor) else value


@contextmanager
def _no_progress_bar(pipe: Any) -> Iterator[None]:
    before = getattr(pipe, "_progress_bar_config", None)
    pipe.set_progress_bar_config(**{**(before or {}), "disable": True})
    try:
        yield
    finally:
        if before is None:
            del pipe._progress_bar_config
        else:
            pipe._progress_bar_config = before


@contextmanager
def _marking(pipe: Any, context: RankContext) -> Iterator[None]:
    """Mark whenever a block of a network begins, so that slow is not taken for hung. Only where somebody watches."""
    if context.world_size == 1:
        yield
        return
    networks = {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}
    handles = [
        block.register_forward_pre_hook(_marker(context.mark, f"{name}.{path}"))
        for name, network in networks.items()
        for path, block in blocks_of(network)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def blocks_of(network: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(path, block) of every item of a ModuleList in `network`, at any depth: what it repeats."""
    for path, module in network.named_modules():
        if isinstance(module, nn.ModuleList):
            for name, block in module.named_children():
                yield f"{path}.{name}", block


def _marker(mark: Callable[[str], None], where: str) -> Callable[[nn.Module, Any], None]:
    return lambda module, args: mark(where)


def take_random_state(state: RandomState, device: torch.device) -> None:
    """Stand where the caller stands, so that no generator means what it means in plain diffusers.

    A rank on a GPU draws from the state of the caller's GPU if there is one, else from a seed out of its CPU state.
    """
    if state.seed is not None:
        torch.manual_seed(state.seed)
        return
    torch.set_rng_state(state.cpu)
    if device.type != "cuda":
        return
    if state.cuda is not None:
        torch.cuda.set_rng_state(state.cuda, device)
    else:
        torch.cuda.manual_seed(int(torch.randint(2**62, ())))


def random_state(device: torch.device) -> RandomState:
    """Where this rank's default random numbers stand."""
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return RandomState(cpu=torch.get_rng_state(), cuda=cuda)


def agree_on_random_state(kwargs: Mapping[str, Any], context: RankContext, device: torch.device) -> None:
    """Under torchrun every process has generators of its own: all take the states of rank 0's."""
    generators = generators_of(kwargs)
    states, default = context.ask(([generator.get_state() for generator in generators], random_state(device)))
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)
    take_random_state(default, device)


def emptied(output: Any) -> Any:
    """An output of the same class that holds nothing: what ranks other than 0 return under torchrun."""
    if isinstance(output, tuple):
        return (None,) * len(output)
    if isinstance(output, Mapping):
        return type(output)(**dict.fromkeys(output))
    return None


def gather_objects(door: Door, axis: Axis, own: Any) -> list[Any]:
    """Any picklable object from every place of `axis`, in order."""
    data = pack(encode(own))
    packed = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(door.transport.device)
    gather = Gather(door, axis, "output", "output")
    sizes = [int(size) for size in gather.same(torch.tensor([len(packed)], device=packed.device))]
    return [unpack(part.cpu().numpy().tobytes()) for part in gather.shares(packed, 0, sizes)]
