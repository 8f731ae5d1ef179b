"""Tensors and JSON in one safetensors file, written and read without torch.

The file has each tensor's elements in order of memory, as [N]; the JSON in its metadata has shapes and strides.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from patchpar.errors import PlanError
from patchpar.models.files import MAX_HEADER
from patchpar.pipeline.messages import TensorBytes
from patchpar.plan.json_files import object_of

CODES = {
    **{"float64": ("F64", 8), "float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2)},
    **{"float8_e4m3fn": ("F8_E4M3", 1), "float8_e5m2": ("F8_E5M2", 1), "complex64": ("C64", 8)},
    **{"int64": ("I64", 8), "int32": ("I32", 4), "int16": ("I16", 2), "int8": ("I8", 1)},
    **{"uint8": ("U8", 1), "bool": ("BOOL", 1)},
}
"""By torch's name of a dtype: that of the format, and bytes."""
FACTS = "patchpar"
LENGTH = struct.Struct("<Q")


class TensorTable:
    """Tensors by number."""

    def __init__(self) -> None:
        self.tensors: list[TensorBytes] = []

    def add(self, tensor: TensorBytes) -> int:
        """Keep a tensor and return its number."""
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def get(self, number: object) -> TensorBytes:
        """Return the tensor of that number. Raises IndexError and TypeError."""
        if not isinstance(number, int) or number < 0:
            raise TypeError(f"{number!r} is no number of a tensor")
        return self.tensors[number]


def write_tensors(path: Path, table: TensorTable, facts: Mapping[str, Any]) -> None:
    """Write a file at once: either all of it is there, or what was there before. Raises OSError."""
    header: dict[str, Any] = {}
    forms, end = [], 0
    for number, each in enumerate(table.tensors):
        code, size = CODES.get(each.dtype, ("U8", 1))
        header[str(number)] = {
            "dtype": code,
            "shape": [len(each.data) // size],
            "data_offsets": [end, end + len(each.data)],
        }
        forms.append([each.dtype, each.shape, each.stride])
        end += len(each.data)
    header["__metadata__"] = {FACTS: json.dumps({**facts, "forms": forms})}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % LENGTH.size)
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("wb") as stream:
            stream.write(LENGTH.pack(len(text)) + text)
            stream.writelines(each.data for each in table.tensors)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def read_tensors(path: Path) -> tuple[TensorTable, dict[str, Any]]:
    """Return what `write_tensors` has written. Raises PlanError for a file that is not whole, or another one."""
    try:
        with path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            (length,) = LENGTH.unpack(stream.read(LENGTH.size))
            if length > min(size, MAX_HEADER):
                raise ValueError(f"its header has {length} bytes")
            header = object_of(stream.read(length), str(path))
            facts = object_of(header["__metadata__"][FACTS], f"the metadata of {path}")
            table, data = TensorTable(), stream.read()
        for number, (dtype, shape, stride) in enumerate(facts["forms"]):
            start, end = header[str(number)]["data_offsets"]
            table.add(_checked(dtype, shape, stride, data[start:end], end - start))
    except (OSError, struct.error, KeyError, TypeError, ValueError) as error:
        raise PlanError(f"{path} cannot be read as a suspended call: {error}") from error
    return table, facts


def _checked(dtype: Any, shape: Any, stride: Any, data: bytes, length: int) -> TensorBytes:
    """Return a tensor. Raises ValueError if its bytes are not those of this shape and these strides."""
    sizes, steps = tuple(map(int, shape)), tuple(map(int, stride))
    count = math.prod(sizes)
    if min(sizes, default=1) < 0 or len(data) != length or len(sizes) != len(steps) or min(steps, default=1) < 0:
        raise ValueError(f"a tensor of shape {sizes} and strides {steps} has {len(data)} of {length} bytes")
    last = sum((size - 1) * step for size, step in zip(sizes, steps, strict=True))
    known = CODES.get(dtype)
    if count and (last != count - 1 or (known is not None and len(data) != count * known[1])):
        raise ValueError(f"a tensor of shape {sizes} and strides {steps} does not have {len(data)} bytes")
    return TensorBytes(dtype=str(dtype), shape=sizes, stride=steps, data=data)
