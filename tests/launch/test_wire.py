"""Objects travel whole, the large ones through shared memory that nobody has to clean up."""

import functools
import gc
import os
import subprocess
import sys
import threading
import types
import weakref
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch

from patchpar.errors import PlanError
from patchpar.launch.messages import INLINE_BYTES, decode, encode, encode_call, pack, unpack
from tests.launch import plain

MAPPED = "patchpar-block"


def there_and_back(value):
    message = encode(value)
    arrived = decode(message)
    message.close()
    return arrived


def mappings() -> int:
    return sum(MAPPED in line for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.parametrize("size", [0, 3, 100_000], ids=["empty", "small", "large"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64], ids=str)
def test_tensors_arrive_equal(dtype, size):
    x = torch.arange(size).to(dtype)
    y = there_and_back(x)
    assert y.dtype == x.dtype
    assert torch.equal(x, y)


def test_tensors_lie_in_memory_as_torch_lays_them():
    """Where a tensor begins decides how a kernel goes over it, and so how it rounds: results must not part by that."""
    sent = [torch.randn(n) for n in (1, 5, 16, 33, 1000, 50_000)]
    assert [x.data_ptr() % 64 for x in sent] == [0] * 6
    assert [x.data_ptr() % 64 for x in there_and_back(sent)] == [0] * 6


@pytest.mark.parametrize("shape", [(), (7,), (300, 500)], ids=str)
def test_shapes_and_strides_arrive(shape):
    x = torch.randn(shape)
    assert torch.equal(there_and_back(x), x)
    assert torch.equal(there_and_back(x.mT if x.ndim == 2 else x), x.mT if x.ndim == 2 else x)
    assert torch.equal(there_and_back(x[..., None].expand(*shape, 3)), x[..., None].expand(*shape, 3))


def test_the_copy_of_an_expanded_tensor_that_a_device_makes_is_not_expanded(monkeypatch):
    """Its storage, which is laid out otherwise, is not what travels."""
    monkeypatch.setattr(torch.Tensor, "cpu", torch.Tensor.contiguous)
    x = torch.arange(6.0).view(2, 3)
    for sent in (x[:, :, None].expand(2, 3, 4), x[None].expand(4, 2, 3), x.mT):
        assert torch.equal(there_and_back(sent), sent)


class Codes(torch.nn.Parameter):
    """As libraries keep quantised weights: a class of parameters with attributes, which all of its results have too."""

    def __new__(cls, data, requires_grad=False, kind=None):
        self = torch.Tensor._make_subclass(cls, data, requires_grad)
        self.kind = kind
        return self

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        found = super().__torch_function__(func, types, args, kwargs or {})
        return cls(found, kind=args[0].kind) if type(found) is torch.Tensor else found


@pytest.mark.parametrize("size", [3, 100_000], ids=["small", "large"])
def test_a_parameter_of_a_class_of_its_own_keeps_class_and_attributes(size):
    layer = torch.nn.Linear(1, 1)
    layer.weight = layer.tied = Codes(torch.arange(size).to(torch.uint8), kind="q8")
    layer.weight.layer = layer
    arrived = there_and_back(layer)
    assert type(arrived.weight) is Codes
    assert arrived.weight is arrived.tied
    assert (arrived.weight.kind, arrived.weight.layer, arrived.weight.requires_grad) == ("q8", arrived, False)
    assert bytes(arrived.weight.untyped_storage()) == bytes(layer.weight.untyped_storage())


def test_a_part_of_a_tensor_does_not_drag_the_whole_along():
    x = torch.randn(1000, 1000)
    message = encode(x[::100, ::100])
    assert message.block is None
    assert len(message.stream) < 2000
    assert torch.equal(decode(message), x[::100, ::100])


def test_tied_weights_stay_tied():
    model = torch.nn.Linear(300, 300)
    model.tied = model.weight
    model.view = model.weight.detach().T
    again = there_and_back(model)
    assert again.tied is again.weight
    assert again.view.data_ptr() == again.weight.data_ptr()
    assert isinstance(again.weight, torch.nn.Parameter)
    assert again.weight.requires_grad
    assert torch.equal(again.view, model.view)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(200_000.0).reshape(400, 500),
        np.arange(200_000.0).reshape(400, 500).T,
        np.arange(200_000.0).reshape(400, 500)[::3, ::2],
        np.array([{"a": 1}], dtype=object),
    ],
    ids=["plain", "transposed", "strided", "objects"],
)
def test_arrays_arrive_equal(array):
    assert np.array_equal(there_and_back(array), array)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P", "1", "F", "I;16", "CMYK"])
def test_images_arrive_equal(mode):
    noise = np.random.default_rng(0).integers(0, 255, (40, 30, 3), dtype=np.uint8)
    image = PIL.Image.fromarray(noise).convert("I" if mode == "I;16" else mode)
    image = image.convert(mode)
    image.info["note"] = "kept"
    again = there_and_back(image)
    assert (again.mode, again.size, again.info) == (image.mode, image.size, image.info)
    assert again.tobytes() == image.tobytes()
    assert again.getpalette() == image.getpalette()


def test_an_image_still_in_its_file_arrives(tmp_path):
    PIL.Image.new("RGB", (9, 5), (10, 20, 30)).save(tmp_path / "picture.png")
    again = there_and_back(PIL.Image.open(tmp_path / "picture.png"))
    assert again.getpixel((8, 4)) == (10, 20, 30)


def test_a_generator_goes_on_where_it_was():
    generator = torch.Generator().manual_seed(5)
    torch.randn(3, generator=generator)
    again = there_and_back(generator)
    assert again.initial_seed() == 5
    assert torch.equal(torch.randn(4, generator=again), torch.randn(4, generator=generator))


def test_what_is_large_does_not_go_through_the_pipe():
    big = PIL.Image.new("RGB", (4000, 4000))  # 48 MB
    for value in (big, torch.zeros(1 << 22), np.zeros(1 << 22), b"x" * (1 << 22), {"deep": [{"er": big}]}):
        message = encode(value)
        assert len(message.stream) + 16 * len(message.spans) < INLINE_BYTES / 64
        assert message.block is not None
        message.close()


def test_large_tensors_and_arrays_are_mapped_and_later_unmapped():
    gc.collect()  # what earlier tests have left goes now, and not meanwhile
    before = mappings()
    value = there_and_back({"x": torch.ones(1 << 20), "y": np.ones(1 << 20)})
    assert mappings() == before + 1
    kept = value["y"][-5:]
    del value
    assert mappings() == before + 1
    assert kept.sum() == 5
    del kept
    assert mappings() == before


def test_receivers_may_write_and_do_not_see_one_another():
    x = torch.zeros(1 << 20)
    message = encode(x)
    first, second = decode(message), decode(message)
    message.close()
    first += 1
    assert second.sum() == 0
    assert x.sum() == 0


def test_no_descriptor_and_no_named_memory_is_kept():
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    gc.collect()  # what earlier tests have left goes now, or not before this one is over
    names = set(os.listdir("/dev/shm"))  # noqa: PTH208
    before = descriptors()
    values = [there_and_back(torch.zeros(1 << 16)) for _ in range(20)]
    assert descriptors() <= before
    assert set(os.listdir("/dev/shm")) == names  # noqa: PTH208
    assert len(values) == 20


@pytest.mark.parametrize("size", [16, 100_000], ids=["in the stream", "in the block"])
def test_what_was_sent_is_freed_with_its_last_reference(size):
    """As it is without workers: models are too large to wait for the garbage collector."""
    network = torch.nn.Linear(size, 1)
    freed = weakref.ref(network)
    gc.collect()
    gc.disable()
    try:
        encode(network).close()
        del network
        assert freed() is None
    finally:
        gc.enable()


def test_a_failed_encoding_keeps_nothing_either():
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(TypeError):
        encode([torch.zeros(1 << 20), threading.Lock()])
    assert len(list(Path("/proc/self/fd").iterdir())) <= before


def test_without_memfd_a_file_without_a_name_does(monkeypatch):
    def refuse(*_):
        raise OSError("not here")

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert there_and_back(torch.ones(1 << 20)).sum() == 1 << 20


def test_no_room_is_said(monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(MemoryError, match=r"4,194,304 bytes of shared memory.*No space left"):
        encode(torch.ones(1 << 20))


def make_counter():
    count = 0

    def step(by=1, *, twice=False):
        nonlocal count
        count += by * (2 if twice else 1)
        return count if count < 3 else step.__name__

    return step


def test_a_function_inside_a_function_travels_with_what_it_holds():
    step = make_counter()
    step()
    again = there_and_back(step)
    assert again() == 2
    assert again(twice=True) == "step"
    assert step() == 2, "the sender's own is another"


def test_a_method_of_a_function_without_a_name_travels():
    """torchao describes its layers by such."""
    layer = torch.nn.Linear(2, 2)
    layer.extra_repr = types.MethodType(functools.partial(described, "int8", before=layer.extra_repr), layer)
    assert there_and_back(layer).extra_repr() == "int8 of Linear, in_features=2, out_features=2, bias=True"


def described(kind, layer, before):
    return f"{kind} of {type(layer).__name__}, {before()}"


def test_a_module_travels_by_name():
    assert there_and_back({"backend": torch.cpu})["backend"] is torch.cpu


def test_an_argument_that_cannot_be_sent_is_named():
    with pytest.raises(PlanError, match=r"generate: argument 'lock' \(a lock\) cannot be sent.*pickle"):
        encode_call("generate", [1, "x"], {"fine": 2, "lock": threading.Lock()}, 0.0)
    with pytest.raises(PlanError, match=r"generate: argument 2\[1\] \(a lock\)"):
        encode_call("generate", [1, [2, threading.Lock()]], {}, 0.0)
    with pytest.raises(PlanError, match=r"generate: argument 'video' \(a generator\) cannot be sent.*generator"):
        encode_call("generate", [{"prompt": "a fox", "video": (frame for frame in ())}, 3], {}, 0.0)
    with pytest.raises(PlanError, match=r"generate: argument 'attention_kwargs'\['scale'\] \(a lock\)"):
        encode_call("generate", [{"prompt": "a fox", "attention_kwargs": {"scale": threading.Lock()}}], {}, 0.0)
    with pytest.raises(PlanError, match=r"^pipe\.scheduler \(a lock\) cannot be sent to worker processes: .*pickle"):
        encode_call("set", ["scheduler", threading.Lock()], {"everywhere": False}, 0.0)
    with pytest.raises(PlanError, match=r"^pipe\.vae\.tile\(\): argument 2 \(a lock\)"):
        encode_call("apply", ["vae.tile", (1, threading.Lock()), {}], {}, 0.0)
    with pytest.raises(PlanError, match=r"^pipe\.vae\.tile\(\): argument 'size' \(a lock\)"):
        encode_call("apply", ["vae.tile", (), {"size": threading.Lock()}], {}, 0.0)


SCRIPT = """
import torch

FACTOR = 2
table = torch.ones(1 << 16)

class Base:
    factor = FACTOR

class Mine(Base):
    def __init__(self):
        self.also = table

    def twice(self, x):
        return helper(x * super().factor)

def helper(x):
    return Mine, x * table[:2]
"""


@pytest.fixture
def script(monkeypatch):
    """What a script of that text defines. Its module is `__main__`, as in a notebook."""
    defined = {"__name__": "__main__"}
    exec(SCRIPT, defined)
    return defined


def test_what_the_script_defines_goes_by_value(script):
    """Its classes are themselves again when they come back, and what large tensors it names go through the block."""
    mine = script["Mine"]()
    message = encode(mine)
    assert message.block is not None
    assert len(message.stream) < INLINE_BYTES
    arrived = decode(message)
    message.close()
    assert type(arrived) is script["Mine"]
    kind, x = arrived.twice(3)
    assert kind is script["Mine"]
    assert x.tolist() == [6.0, 6.0]
    assert torch.equal(arrived.also, script["table"])


def test_another_process_gets_what_the_script_defines(script):
    """One that has no such script."""
    message = pack(encode([script["Mine"](), script["helper"]]))
    reads = "import sys; from patchpar.launch.messages import unpack; m, f = unpack(sys.stdin.buffer.read()); "
    says = "print(type(m).__name__, type(m).__module__, m.twice(3)[1].tolist(), f(1)[0] is type(m))"
    found = subprocess.run([sys.executable, "-c", reads + says], input=message, capture_output=True, check=True)
    assert found.stdout.decode().strip() == "Mine __main__ [6.0, 6.0] True"


def test_a_class_inside_a_function_goes_by_value():
    class Inside:
        x = 3

    assert type(there_and_back(Inside())) is Inside


def test_what_the_script_holds_on_to_must_travel_too(script):
    script["table"] = threading.Lock()
    with pytest.raises(PlanError, match=r"generate: argument 1 \(a function\) cannot be sent.*lock"):
        encode_call("generate", [script["helper"]], {}, 0.0)


def test_packed_messages_need_no_descriptor():
    value = {"x": torch.randn(1 << 16), "text": "y" * INLINE_BYTES * 2, "small": torch.ones(2)}
    again = unpack(pack(encode(value)))
    assert torch.equal(again["x"], value["x"])
    assert again["text"] == value["text"]
    again["x"] += 1


def test_a_function_inside_a_function_sees_what_its_module_holds():
    """It is its module's own state that it uses, and not a copy of what it was when the function was sent."""
    again = there_and_back(plain.guarded())
    plain.COUNTED.clear()
    assert [again("word"), again("word")] == [1, 2]
    assert plain.COUNTED == ["word", "word"]


def test_functions_that_hold_on_to_themselves_and_each_other():
    def even(n):
        return n == 0 or odd(n - 1)

    def odd(n):
        return n > 0 and even(n - 1)

    first, second = there_and_back([even, odd])
    assert first(10)
    assert not second(10)
    assert first.__closure__[0].cell_contents is second
    assert (first.__qualname__, first.__module__) == (even.__qualname__, __name__)
