"""Encoders that run on the first rank of an image; what they return travels to its other ranks.

Whatever the pipeline calls of an encoder is transferred: the network, one of its parts, such as the final norm for
`clip_skip`, or `generate` of a language model. Only the outermost call is. The others get the same bits and strides,
the same exception, and the same state of the default generators, so that they go on as if they had encoded.
"""

import pickle
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from patchpar.comm.collectives import Communicator
from patchpar.comm.pytree import tensors_in
from patchpar.errors import ExchangeError, UnsupportedModel
from patchpar.launch import accelerators
from patchpar.plan.mesh import Axis
from patchpar.shard.compiled import compiled_in
from patchpar.shard.encoders.absent_weights import AbsentNetworks, AbsentWeights
from patchpar.shard.encoders.transfer import PackedValue, ValueTransfer
from patchpar.shard.hooks import HookSet
from patchpar.shard.shared_noise import sampled_on_one_rank
from patchpar.shard.unsupported_model import in_one_line

GENERATE = "generate"  # of language models: one transfer instead of one for each token
MOVING_HOOKS = ("_hf_hook", "_diffusers_hook")
RandomStates = tuple[Tensor, Tensor | None]


class Encoded(NamedTuple):
    """What a call has returned or raised, and the default generators' states after it if it has used them."""

    where: str
    value: Any
    error: Exception | None
    random: RandomStates | None


@dataclass(frozen=True, slots=True)
class WaysOfEncoders:
    """How values of encoders get to other ranks, and how their weights are absent there."""

    transfer: Callable[[Communicator, Axis], ValueTransfer] = ValueTransfer
    weights: Callable[[Mapping[str, nn.Module], Iterable[nn.Module]], AbsentNetworks] = AbsentWeights


class OneRankEncoders:
    """`encoders`, by name, of which the ranks of `axis` except the first hold no weights until `give_back`.

    `others`: the pipeline's other networks. `device`: of this rank. `connect` returns the way to the other ranks when
    it is first needed; `ways`: how values and weights get there. Raises UnsupportedModel for encoders that cannot be
    on one rank only.
    """

    def __init__(
        self,
        encoders: Mapping[str, nn.Module],
        others: Iterable[nn.Module],
        axis: Axis,
        device: torch.device,
        connect: Callable[[], Communicator],
        ways: WaysOfEncoders | None = None,
    ) -> None:
        for name, network in encoders.items():
            _refuse_wrapped(name, network)
        self.axis, self.exchange, self._device, self._connect = axis, "on", device, connect
        self._ways = ways or WaysOfEncoders()
        self._weights = self._ways.weights(encoders, others)
        self._transfer: ValueTransfer | None = None
        self._inside = False
        self._hooks = HookSet()
        for name, network in encoders.items():
            self._intercept(name, network)
        if axis.rank > 0:
            self._weights.take_out(device)

    def give_back(self) -> None:
        """Let all ranks hold and run the encoders. Collective. Raises ExchangeError."""
        self._hooks.close()
        self._weights.give_back(self.transfer.comm, self.axis)

    @property
    def transfer(self) -> ValueTransfer:
        """The way to the other ranks."""
        if self._transfer is None:
            self._transfer = self._ways.transfer(self._connect(), self.axis)
        return self._transfer

    def _intercept(self, name: str, network: nn.Module) -> None:
        for path, module in network.named_modules():
            where = f"{name}.{path}" if path else name
            self._hooks.replace(module, "forward", self._transferred(where, module.forward))
            generate: Any = getattr(module, GENERATE, None)
            if callable(generate):
                self._hooks.replace(module, GENERATE, self._transferred(f"{where}.{GENERATE}", generate))

    def _transferred(self, where: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(plain)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                self.transfer.still_working(where)
                return plain(*args, **kwargs)
            return self._run(where, partial(plain, *args, **kwargs)) if self.axis.rank == 0 else self._receive(where)

        return call

    def _run(self, where: str, encode: Callable[[], Any]) -> Any:
        """Encode, and send what comes of it to the other ranks."""
        self.transfer.begin()
        before, value = self._random_states(), None
        error: Exception | None = None
        self._inside = True
        try:
            with sampled_on_one_rank():
                value = encode()
            _refuse_gradients(where, value)
        except Exception as raised:  # noqa: BLE001  all ranks raise it
            error = raised
        finally:
            self._inside = False
        after = self._random_states()
        packed, error = self._packed(Encoded(where, value, error, None if _are_equal(before, after) else after))
        self.transfer.send(where, packed)
        if error is not None:
            raise error
        return value

    def _packed(self, encoded: Encoded) -> tuple[PackedValue, Exception | None]:
        """Return the message for the others, and the exception that all ranks raise."""
        device = self.transfer.device
        if encoded.error is not None:
            sent = encoded.error if _is_picklable(encoded.error) else RuntimeError(in_one_line(encoded.error))
            return PackedValue.of(encoded._replace(value=None, error=sent), device), encoded.error
        try:
            return PackedValue.of(encoded, device), None
        except (AttributeError, TypeError, pickle.PicklingError) as unsendable:
            error = UnsupportedModel(
                f"what {encoded.where} returns cannot be sent to other ranks ({in_one_line(unsendable)}): "
                "use encoders=all"
            )
            return PackedValue.of(encoded._replace(value=None, error=error), device), error

    def _receive(self, where: str) -> Any:
        encoded: Encoded = self.transfer.receive(where)
        if encoded.where != where:
            raise ExchangeError(
                f"this rank calls {where}, but the rank with the encoders calls {encoded.where}: with encoders=one all "
                "ranks of an image make the same calls. Use encoders=all"
            )
        if encoded.random is not None:
            self._set_random_states(encoded.random)
        if encoded.error is not None:
            raise encoded.error
        if self.exchange == "off":
            for x in tensors_in(encoded.value):
                x.zero_()
        return encoded.value

    def _random_states(self) -> RandomStates:
        return torch.get_rng_state(), accelerators.random_state(self._device)

    def _set_random_states(self, states: RandomStates) -> None:
        cpu, accelerator = states
        torch.set_rng_state(cpu.cpu())
        if accelerator is not None:
            accelerators.set_random_state(accelerator.cpu(), self._device)


def _are_equal(before: RandomStates, after: RandomStates) -> bool:
    pairs = zip(before, after, strict=True)
    return all(old is new or (old is not None and new is not None and torch.equal(old, new)) for old, new in pairs)


def _is_picklable(error: Exception) -> bool:
    try:
        pickle.loads(pickle.dumps(error))  # our own
    except Exception:  # noqa: BLE001  whatever its class does
        return False
    return True


def _refuse_gradients(where: str, value: Any) -> None:
    if any(x.requires_grad for x in tensors_in(value)):
        raise UnsupportedModel(
            f"gradients are taken through {where}, which with encoders=one is on one rank only: use encoders=all"
        )


def _refuse_wrapped(name: str, network: nn.Module) -> None:
    """Raise UnsupportedModel for a network that is compiled, or whose weights a hook moves."""
    if compiled_in(network):
        raise UnsupportedModel(f"{name} is compiled, and so cannot be on one rank only: use encoders=all")
    if any(hook in vars(module) for module in network.modules() for hook in MOVING_HOOKS):
        raise UnsupportedModel(
            f"{name} has hooks that may move or convert its weights (offloading, layerwise casting): use encoders=all"
        )
