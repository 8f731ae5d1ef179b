"""A pickler for messages between processes.

    tensors (any device), arrays, images     their bytes go to the block, the pickle holds the offset
    torch.Generator                          device type and state; created on the receiver's own device
    classes and functions of a script        by value, through cloudpickle, with all that they refer to
    functions inside functions               by value too, but in their module: libraries install such in networks
    classes of parameters                    their tensor and their attributes: GGUF and bitsandbytes have such
    modules                                  by name
    methods of functions without a name      by their function, such as a partial: torchao puts such on layers
    everything else                          by pickle's rules

A tensor arrives on the CPU. Tensors that share a whole storage (tied weights) share it after unpickling too; a view of
part of a storage arrives as a separate tensor. torch, numpy, Pillow and cloudpickle are imported only when needed.
"""

from __future__ import annotations

import importlib
import io
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

from patchpar.launch.anonymous_file import ALIGNMENT
from patchpar.launch.shared_blocks import SharedBlockWriter

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

INLINE_BYTES = 64 * 1024  # buffers up to this size stay in the pickle stream


class _Buffers:
    """Large buffers of a pickle, written to the block. `spans` are (offset, length) of each, in bytes."""

    def __init__(self, writer: SharedBlockWriter) -> None:
        self.spans: list[tuple[int, int]] = []
        self._writer = writer
        self._written: pickle.PickleBuffer | None = None

    def take(self, buffer: pickle.PickleBuffer) -> bool:
        """Write a large buffer to the block; return whether it stays in the stream instead."""
        if self._written is not None:
            self._written.release()  # else host copies of all GPU weights would accumulate until the end
            self._written = None
        with buffer.raw() as data:
            if data.nbytes <= INLINE_BYTES:
                return True
            self.spans.append(self._writer.append(data))
        self._written = buffer
        return False


class BlockPickler(pickle.Pickler):
    """Pickles with protocol 5; buffers of more than INLINE_BYTES go to the block."""

    def __init__(self, sink: io.BytesIO, writer: SharedBlockWriter) -> None:
        # Not a method of this object: it would refer to itself, and keep all that it has pickled until it is collected.
        buffers = _Buffers(writer)
        super().__init__(sink, protocol=5, buffer_callback=buffers.take)
        self.spans = buffers.spans
        self._storages: dict[tuple[str, int], _Storage] = {}
        self._alive: list[object] = []  # the keys above are addresses, so the storages must not be freed
        self._cloud: Any = None  # cloudpickle's pickler, for code

    def reducer_override(self, value: Any) -> Any:
        """Return the reduction of the types listed above; NotImplemented for all others."""
        parts: Any = NotImplemented
        if isinstance(value, (type, FunctionType)):
            parts = self._code_parts(value)
        elif isinstance(value, (ModuleType, MethodType)):
            parts = _module_parts(value) if isinstance(value, ModuleType) else _method_parts(value)
        elif isinstance(value, _Storage):
            parts = _storage, (value.data,)
        elif _is_a(value, "torch", "Generator"):
            parts = _generator, (value.device.type, value.initial_seed(), value.get_state())
        elif _is_a(value, "torch", "Tensor"):
            parts = self._tensor_parts(value)
        elif _is_a(value, "PIL.Image", "Image"):
            parts = _image, _image_parts(value)
        elif _is_a(value, "numpy", "ndarray") and not (value.flags.forc or value.dtype.hasobject):
            parts = value.copy().__reduce_ex__(5)  # contiguous; otherwise numpy puts a copy into the stream
        return parts

    def _code_parts(self, value: type | FunctionType) -> Any:
        """Reduce classes and module functions by name, and what workers cannot import by value.

        A class that is sent back is the same class, because cloudpickle tracks classes that it has pickled.
        """
        if _is_of_script(value) or (self._cloud is not None and _is_nameless(value)):
            return self._by_value(value)
        if isinstance(value, type) or _is_found_by_name(value):
            return NotImplemented
        # cloudpickle would send all module globals that the function uses: perhaps a library's state, or a lock.
        make, (code, _, *others), (attributes, slots), *rest = self._by_value(value)
        state = attributes, {**slots, "__globals__": {}, "_cloudpickle_submodules": []}
        return _function_of_module, (make, value.__module__, code, *others), state, *rest

    def _by_value(self, value: type | FunctionType) -> Any:
        if self._cloud is None:
            import cloudpickle

            self._cloud = cloudpickle.Pickler(io.BytesIO(), protocol=5)
            self.dispatch_table = self._cloud.dispatch_table  # for code objects, cells and the like
        return self._cloud.reducer_override(value)

    def _tensor_parts(self, value: torch.Tensor) -> Any:
        if _is_plain(value):
            return self._reduce_tensor(value)
        return _parameter_parts(value) if _has_class_of_its_own(value) else NotImplemented

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
            # Not of the tensor's copy: that of an expanded tensor is not expanded.
            self._storages[key] = _Storage(_bytes_of(storage.cpu()))  # type: ignore[no-untyped-call]
            self._alive.append(storage)
        return self._storages[key]


@dataclass(frozen=True, slots=True, eq=False)
class _Storage:
    """The bytes of a storage; one object for all tensors that share it, so that pickle's memo keeps the sharing."""

    data: pickle.PickleBuffer


def _bytes_of(storage: torch.UntypedStorage) -> pickle.PickleBuffer:
    """Return the bytes of a storage on the CPU, without a copy; they keep it alive."""
    import torch

    return pickle.PickleBuffer(torch.empty(0, dtype=torch.uint8).set_(storage).numpy().data)


def _is_of_script(value: type | FunctionType) -> bool:
    """Return whether a class or function is defined in the script or notebook, or is a class inside a function."""
    if value.__module__ == "__main__":
        return True
    return isinstance(value, type) and "<locals>" in value.__qualname__ and not _is_found_by_name(value)


def _is_nameless(value: type | FunctionType) -> bool:
    """Return whether this is a builtin class that cannot be found by name, such as the class of code objects."""
    return value.__module__ == "builtins" and not _is_found_by_name(value)


def _is_found_by_name(function: type | FunctionType) -> bool:
    """Return whether pickle can send a function or class by its name."""
    found: object = sys.modules.get(function.__module__)
    for part in function.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is function


def _module_parts(module: ModuleType) -> tuple[Any, ...]:
    return importlib.import_module, (module.__name__,)


def _method_parts(method: MethodType) -> Any:
    """Reduce a method that pickle cannot: it would look for it by the name of its function."""
    is_named = hasattr(method.__func__, "__name__")
    return NotImplemented if is_named else (_method, (method.__func__, method.__self__))


def _method(function: Callable[..., Any], owner: object) -> MethodType:
    return MethodType(function, owner)


def _function_of_module(make: Callable[..., FunctionType], module: str, code: Any, *others: Any) -> FunctionType:
    """Create a function with cloudpickle's `make`; its globals are those of `module` in this process."""
    return make(code, importlib.import_module(module).__dict__, *others)


def _is_a(value: object, module: str, name: str) -> bool:
    """Return whether `value` is an instance of `module`.`name`, without importing the module."""
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(value, kind)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether bytes, dtype, shape and strides describe a tensor completely."""
    import torch

    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return False
    return not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor.is_meta)


def _has_class_of_its_own(tensor: torch.Tensor) -> bool:
    """Return whether this is a parameter with attributes, of a class that leaves its reduction to torch.

    torch sends such as a plain parameter, and without end where the class wraps what torch functions return (GGUF).
    """
    import torch

    kind, of_torch = type(tensor), torch.nn.Parameter
    return (
        issubclass(kind, of_torch)
        and kind is not of_torch
        and kind.__reduce_ex__ is of_torch.__reduce_ex__
        and kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    )


def _parameter_parts(parameter: torch.Tensor) -> tuple[Any, ...]:
    """Return the reduction of one. Attributes are set when it is known, since they may refer to it."""
    import torch

    data = torch.Tensor._make_subclass(torch.Tensor, parameter)
    made_of = type(parameter), data, parameter.requires_grad
    return _parameter, made_of, vars(parameter), None, None, _set_attributes


def _parameter(kind: type[torch.Tensor], data: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    import torch

    return torch.Tensor._make_subclass(kind, data, requires_grad)


def _set_attributes(parameter: torch.Tensor, attributes: dict[str, Any]) -> None:
    vars(parameter).update(attributes)


def _image_parts(image: Image) -> tuple[Any, ...]:
    data = pickle.PickleBuffer(image.tobytes())  # tobytes also loads an image that is still in its file
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
    if data_n.data_ptr() % ALIGNMENT:  # bytes of the stream may be unaligned, and alignment changes kernels' rounding
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
    """Return a generator on the receiver's own device of this type, not on the sender's."""
    import torch

    generator = torch.Generator(device)
    generator.manual_seed(seed)
    generator.set_state(state)
    return generator
