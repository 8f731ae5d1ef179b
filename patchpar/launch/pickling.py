"""How objects are taken apart for a journey to another process, and put together there.

    tensors (any device), arrays, pictures   their bytes go to the block, the pickle holds the place
    torch.Generator                          kind of device and state; comes to life on the receiver's own device
    what a script or a notebook defines      by value, as cloudpickle does it: classes, functions, and what they name
    functions inside functions               by value too, but in their module: libraries hook such into networks
    modules                                  by name
    everything else                          as pickle does it

A tensor arrives on the CPU. Tensors that share a whole storage (tied weights) share it again on arrival; a view of a
part of a storage arrives as a tensor of its own. Neither torch, numpy, Pillow nor cloudpickle is imported before it
is needed.
"""

from __future__ import annotations

import ctypes
import importlib
import io
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from patchpar.launch.anonymous_file import ALIGNMENT
from patchpar.launch.shared_blocks import SharedBlockWriter

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

INLINE_BYTES = 64 * 1024  # what is smaller travels in the stream itself


class BlockPickler(pickle.Pickler):
    """Pickles by protocol 5; buffers of more than INLINE_BYTES go to the block."""

    def __init__(self, sink: io.BytesIO, writer: SharedBlockWriter) -> None:
        super().__init__(sink, protocol=5, buffer_callback=self._take)
        self.spans: list[tuple[int, int]] = []
        self._writer = writer
        self._storages: dict[tuple[str, int], _Storage] = {}
        self._alive: list[object] = []  # the keys above are addresses: what they point at must stay
        self._written: pickle.PickleBuffer | None = None
        self._cloud: Any = None  # cloudpickle's, which takes code apart

    def _take(self, buffer: pickle.PickleBuffer) -> bool:
        """Whether the buffer is to be kept in the stream."""
        if self._written is not None:
            self._written.release()  # or host copies of all of a GPU's weights would pile up until the end
            self._written = None
        with buffer.raw() as data:
            if data.nbytes <= INLINE_BYTES:
                return True
            self.spans.append(self._writer.append(data))
        self._written = buffer
        return False

    def reducer_override(self, value: Any) -> Any:
        """How our own kinds are taken apart; NotImplemented for all others."""
        parts: Any = NotImplemented
        if isinstance(value, (type, FunctionType)):
            parts = self._code_parts(value)
        elif isinstance(value, ModuleType):
            parts = importlib.import_module, (value.__name__,)
        elif isinstance(value, _Storage):
            parts = _storage, (value.data,)
        elif _is_a(value, "torch", "Generator"):
            parts = _generator, (value.device.type, value.initial_seed(), value.get_state())
        elif _is_a(value, "torch", "Tensor") and _is_plain(value):
            parts = self._reduce_tensor(value)
        elif _is_a(value, "PIL.Image", "Image"):
            parts = _image, _image_parts(value)
        elif _is_a(value, "numpy", "ndarray") and not (value.flags.forc or value.dtype.hasobject):
            parts = value.copy().__reduce_ex__(5)  # contiguous; numpy itself would put a copy into the stream
        return parts

    def _code_parts(self, value: type | FunctionType) -> Any:
        """Classes, and functions of a module, go by name; what workers cannot find by it goes by value.

        A class that comes back is the same class, as cloudpickle keeps count of them.
        """
        if _is_of_script(value) or (self._cloud is not None and _is_nameless(value)):
            return self._by_value(value)
        if isinstance(value, type) or _is_found_by_name(value):
            return NotImplemented
        # cloudpickle would send all that the function names in its module, be it the state of a library, or a lock.
        make, (code, _, *others), (attributes, slots), *rest = self._by_value(value)
        state = attributes, {**slots, "__globals__": {}, "_cloudpickle_submodules": []}
        return _function_of_module, (make, value.__module__, code, *others), state, *rest

    def _by_value(self, value: type | FunctionType) -> Any:
        if self._cloud is None:
            import cloudpickle

            self._cloud = cloudpickle.Pickler(io.BytesIO(), protocol=5)
            self.dispatch_table = self._cloud.dispatch_table  # for code, cells and what else such are made of
        return self._cloud.reducer_override(value)

    def _reduce_tensor(self, tensor: torch.Tensor) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        import torch

        whole = tensor.detach()
        if whole.numel() * whole.element_size() < whole.untyped_storage().nbytes():
            whole = whole.clone(memory_format=torch.contiguous_format)
        layout = (whole.storage_offset(), tuple(whole.shape), whole.stride())
        parameter = isinstance(tensor, torch.nn.Parameter)
        return _tensor, (self._storage(whole), whole.dtype, layout, parameter, tensor.requires_grad and tensor.is_leaf)

    def _storage(self, tensor: torch.Tensor) -> _Storage:
        storage = tensor.untyped_storage()
        key = (str(tensor.device), storage.data_ptr())
        if storage.nbytes() == 0:
            return _Storage(pickle.PickleBuffer(bytearray()))
        if key not in self._storages:
            self._storages[key] = _Storage(_bytes_of(tensor.cpu().untyped_storage()))
            self._alive.append(storage)
        return self._storages[key]


@dataclass(frozen=True, slots=True, eq=False)
class _Storage:
    """The bytes under one or more tensors; as one object, so that pickle sees it a second time as the same."""

    data: pickle.PickleBuffer


def _bytes_of(storage: torch.UntypedStorage) -> pickle.PickleBuffer:
    """The bytes of a storage on the CPU, without a copy."""

    class Bytes(ctypes.c_ubyte * storage.nbytes()):  # type: ignore[misc]  # a class, to have room for an attribute
        pass

    array = Bytes.from_address(storage.data_ptr())
    array.owner = storage  # the array is only a view of its memory
    return pickle.PickleBuffer(array)


def _is_of_script(value: type | FunctionType) -> bool:
    """Whether a class or function is of the script or notebook itself, or a class inside a function."""
    if value.__module__ == "__main__":
        return True
    return isinstance(value, type) and "<locals>" in value.__qualname__ and not _is_found_by_name(value)


def _is_nameless(value: type | FunctionType) -> bool:
    """Whether a class is one of Python's own that no name leads to, such as that of code."""
    return value.__module__ == "builtins" and not _is_found_by_name(value)


def _is_found_by_name(function: type | FunctionType) -> bool:
    """Whether pickle can send a function or class as a mere name."""
    found: object = sys.modules.get(function.__module__)
    for part in function.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is function


def _function_of_module(make: Callable[..., FunctionType], module: str, code: Any, *others: Any) -> FunctionType:
    """A function inside a function of `module`, as cloudpickle makes it, that sees what the module holds here."""
    return make(code, importlib.import_module(module).__dict__, *others)


def _is_a(value: object, module: str, name: str) -> bool:
    """Whether `value` is of a class of a module that may not be imported; if it is not, it cannot be."""
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(value, kind)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether bytes, dtype, shape and strides are all there is to a tensor."""
    import torch

    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return False
    return not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor.is_meta)


def _image_parts(image: Image) -> tuple[Any, ...]:
    data = pickle.PickleBuffer(image.tobytes())  # loads a picture that is still in its file
    palette = image.palette
    colours = None if palette is None else (palette.mode, image.getpalette(palette.mode))
    return image.mode, image.size, image.info, colours, data


def _image(mode: str, size: tuple[int, int], info: dict[Any, Any], colours: Any, data: Any) -> Image:
    from PIL import Image

    image = Image.frombytes(mode, size, data)
    if colours is not None:
        image.putpalette(colours[1], colours[0])
    image.info = info
    return image


def _storage(data: Any) -> torch.UntypedStorage:
    import torch

    if memoryview(data).nbytes == 0:
        return torch.empty(0, dtype=torch.uint8).untyped_storage()
    data_n = torch.frombuffer(data, dtype=torch.uint8)
    if data_n.data_ptr() % ALIGNMENT:  # within the stream bytes lie anywhere, and kernels round by where a row begins
        data_n = data_n.clone()
    return data_n.untyped_storage()


def _tensor(
    storage: torch.UntypedStorage, dtype: torch.dtype, layout: tuple[Any, ...], parameter: bool, requires_grad: bool
) -> torch.Tensor:
    import torch

    tensor = torch.empty(0, dtype=dtype).set_(storage, *layout)
    if parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_(requires_grad)


def _generator(device: str, seed: int, state: torch.Tensor) -> torch.Generator:
    """A generator of the receiver's own device of that kind: a rank draws on its own card, not on the sender's."""
    import torch

    generator = torch.Generator(device)
    generator.manual_seed(seed)
    generator.set_state(state)
    return generator
