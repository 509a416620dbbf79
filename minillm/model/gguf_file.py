"""The container of GGUF: metadata, then tensors, mapped into memory. Built in chapter 15.

    "GGUF" | version | number of tensors | number of keys
    key | type | value                                      for each key: numbers, strings, arrays of them
    name | number of sizes | sizes | type | offset          for each tensor, its sizes from the inside out
    padding | data, at the offsets

Lengths and numbers are little-endian. The `gguf` library has a reader too, which takes 25 µs for each string of the
tokenizer: with 150,000 tokens, and as many merges, 8 seconds for every look at the file; this one takes 0.4.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as shown
from typing import Any

import gguf  # the library, for the sizes of its types
import numpy as np

from minillm.model.files import check_file
from minillm.rounding import round_up

VERSIONS = (2, 3)
MOST_SIZES = 4  # dimensions of a tensor, in ggml
MOST_VALUES = 2**24  # of an array, or bytes of a text: the largest tokenizers have under 2**20 tokens
STRING, ARRAY = 8, 9  # types of values
NUMBERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as the file has it."""

    name: str
    shape: tuple[int, ...]  # rows first, as torch counts
    kind: gguf.GGMLQuantizationType
    data: np.ndarray  # uint8 [rows, bytes of a row], part of the file; of a vector one row


class Container:
    """Metadata by key and tensors by name of the file at `path`.

    Raises ValueError for a file that is something else, cut off, or of a version or type that is not known.
    """

    def __init__(self, path: Path):
        check_file(path)
        with open(path, "rb") as file:
            if (magic := file.read(4)) != b"GGUF":
                raise ValueError(f"it is not a GGUF file: it begins with {magic!r}, not b'GGUF'")
            # Pages are copied if they are written, and never are: torch wants writable memory.
            self.buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self.at, self.reading = 4, "its version"
        version = self._number("<I")
        if version not in VERSIONS:
            raise ValueError(
                f"it is of GGUF version {version}; readable are {', '.join(map(str, VERSIONS))}, lowest byte first"
            )
        self.reading = "the counts"
        num_tensors, num_keys = self._number("<Q"), self._number("<Q")
        self.metadata: dict[str, Any] = {}
        for index in range(num_keys):
            self.reading = f"key {index + 1} of {num_keys}"
            key = self._string()
            if key in self.metadata:
                raise ValueError(f"its metadata has {key!r} twice; fetch it again")
            self.metadata[key] = self._value(self._number("<I"))
        found = []
        for index in range(num_tensors):
            self.reading = f"the name of tensor {index + 1} of {num_tensors}"
            found.append(self._tensor_info())
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= 2**20:
            raise ValueError(
                f"general.alignment={shown(alignment)} is not allowed; allowed: 1 to {2**20:,}; fetch it again"
            )
        start = round_up(self.at, alignment)
        self.tensors: dict[str, StoredTensor] = {}
        end, before = start, None
        for name, shape, kind, offset in sorted(found, key=lambda tensor: tensor[3]):
            if name in self.tensors:
                raise ValueError(f"{name} stands in it twice; fetch it again")
            if start + offset < end:
                raise ValueError(f"it is damaged: the data of {before} and {name} overlap; fetch it again")
            if start + offset > end:
                raise ValueError(
                    f"it is damaged: the data of {name} should begin at byte {end - start:,} of all data, not at "
                    f"{offset:,}; fetch it again"
                )
            self.tensors[name] = self._tensor(name, shape, kind, start + offset)
            end, before = round_up(self.at, alignment), name
        if len(self.buffer) > end:
            raise ValueError(
                f"it is damaged: it has {len(self.buffer):,} bytes, the data of its tensors ends after {end:,}; "
                "fetch it again"
            )

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name, num_sizes = self._string(), self._number("<I")
        if not 1 <= num_sizes <= MOST_SIZES:
            raise ValueError(f"it is damaged: {shown(name)} has {num_sizes} sizes; allowed: 1 to {MOST_SIZES}")
        sizes = [self._number("<Q") for _ in range(num_sizes)]
        return name, tuple(reversed(sizes)), self._number("<I"), self._number("<Q")

    def _tensor(self, name: str, shape: tuple[int, ...], number: int, start: int) -> StoredTensor:
        try:
            kind = gguf.GGMLQuantizationType(number)
            block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError) as error:
            raise ValueError(
                f"{name} is of type {number}, which the gguf library does not know; a newer one may"
            ) from error
        if 0 in shape or shape[-1] % block:
            raise ValueError(f"{name} is {list(shape)}, but {kind.name} is written in blocks of {block}")
        row_bytes = shape[-1] // block * block_bytes
        rows = int(np.prod(shape[:-1], dtype=object))
        self.at, self.reading = start, f"the data of {name}"
        data = np.frombuffer(self._take(rows * row_bytes), np.uint8)
        return StoredTensor(name, shape, kind, data.reshape(rows, row_bytes))

    def _value(self, kind: int) -> Any:
        if kind in NUMBERS:
            return self._number(NUMBERS[kind])
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            raise ValueError(f"{self.reading} is of type {kind}, which is not known")
        inner, count = self._number("<I"), self._number("<Q")
        if inner not in NUMBERS and inner != STRING:
            raise ValueError(f"{self.reading} is an array of type {inner}; readable are numbers and texts")
        self._check_count(count)
        if inner in NUMBERS:
            form = NUMBERS[inner]
            return np.frombuffer(self._take(count * struct.calcsize(form)), form).tolist()
        return [self._value(inner) for _ in range(count)]

    def _string(self) -> str:
        count = self._number("<Q")
        self._check_count(count)
        return bytes(self._take(count)).decode("utf-8", errors="replace")

    def _check_count(self, count: int) -> None:
        """Whether so many values or bytes can be there, before room is made for them."""
        if count > len(self.buffer) - self.at:
            self._take(count)  # which names what is cut off
        if count > MOST_VALUES:
            raise ValueError(f"it is damaged: {self.reading} has a length of {count:,}; allowed: up to {MOST_VALUES:,}")

    def _number(self, form: str) -> Any:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _take(self, count: int) -> memoryview:
        if self.at + count > len(self.buffer):
            raise ValueError(
                f"it is damaged or cut off: {self.reading} would end after its {len(self.buffer):,} bytes; "
                "fetch it again"
            )
        self.at += count
        return memoryview(self.buffer)[self.at - count : self.at]
