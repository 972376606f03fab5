"""The schema of a sample, and the encoding of its fields as one payload.

Blocks store payloads, checksums cover them, tiers serve them and peers send them. A payload holds
the sample's fields one after another, little-endian: first the fields of fixed size, those of the
widest type first; then the sizes of all variable fields but the last (u32); then the variable
fields, that is arrays, each at a multiple of eight bytes, and encoded values. So arrays are aligned
wherever payloads are, and an image with a label is eight bytes longer than the image file.
dlio/storage/FORMAT.md has the details.
"""

import json
import math
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from dlio.errors import CorruptBlock
from dlio.util.memory import joined
from dlio.util.structured_text import parse_json

ENCODED: Final = ("jpeg", "png", "webp", "image", "bytes", "text", "json")
"""Kinds of any length that are stored unchanged; `image` is any image file."""
IMAGES: Final = ("jpeg", "png", "webp", "image")
TEXTS: Final = ("text", "json")
_CODES: Final = {
    "bool": "?",
    "int8": "b",
    "int16": "h",
    "int32": "i",
    "int64": "q",
    "uint8": "B",
    "uint16": "H",
    "uint32": "I",
    "uint64": "Q",
    "float16": "e",
    "float32": "f",
    "float64": "d",
}
DTYPES: Final = (*_CODES, "complex64")
MAX_FIELDS: Final = 256
MAX_DIMENSIONS: Final = 32
MAX_PAYLOAD: Final = 2**31 - 1
"""Bytes that a sample may have at most."""
_KIND: Final = re.compile(r"([a-z]+[0-9]*)(?:\[([0-9?]+(?:,[0-9?]+)*)?\])?")

WholeNumbers: TypeAlias = npt.NDArray[np.integer[Any]]
"""Whole numbers of any size."""
Buffer = bytes | bytearray | memoryview
Value = Any
"""Value of a field in a user's sample; the field's kind decides whether it is a number, a numpy
array, bytes, or a str for text and JSON."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Kind of a field's values: `int64`, `float32[3,224,224]`, `float32[?,3]`, `jpeg`."""

    text: str
    dtype: np.dtype[Any] | None
    """None for encoded kinds."""
    shape: tuple[int | None, ...]
    """None for a dimension that differs from sample to sample; () for scalars."""

    @property
    def fixed(self) -> bool:
        """True if all values have the same size."""
        return self.dtype is not None and None not in self.shape

    @property
    def scalar(self) -> bool:
        """True for numbers."""
        return self.text in _CODES

    @property
    def bytes(self) -> int:
        """Bytes of a value, of a fixed kind."""
        assert self.dtype is not None
        return self.dtype.itemsize * math.prod(size or 0 for size in self.shape)

    @property
    def head(self) -> int:
        """Bytes before a variable array's data, which hold its variable dimensions."""
        return -(-4 * self.shape.count(None) // 8) * 8


_Fixed = tuple[str, Kind, int, struct.Struct | None]
"""Name, kind and offset of a field of fixed size, and the code of a number."""


def parse_kind(text: str) -> Kind:
    """Parse a kind as it is written in schemas. Raises ValueError for an unknown one."""
    if text in ENCODED:
        return Kind(text, None, ())
    match = _KIND.fullmatch(text)
    if match is None or match[1] not in DTYPES:
        raise ValueError(f"kind {text!r} is not known")
    shape: tuple[int | None, ...] = ()
    if match[2]:
        sizes = match[2].split(",")
        if len(sizes) > MAX_DIMENSIONS or any(len(size) > 10 for size in sizes):
            raise ValueError(f"kind {text!r} is too large")
        if any("?" in size and size != "?" for size in sizes):
            raise ValueError(f"kind {text!r} is not known")
        shape = tuple(None if size == "?" else int(size) for size in sizes)
    kind = Kind(text, np.dtype(match[1]).newbyteorder("<"), shape)
    if kind.fixed and kind.bytes > MAX_PAYLOAD:
        raise ValueError(f"kind {text!r} is larger than {MAX_PAYLOAD} bytes")
    return kind


def array_kind(dtype: npt.DTypeLike, shape: Sequence[int | None] = ()) -> str:
    """Return the kind of arrays of a type and shape. `shape` has None for a dimension that differs
    from sample to sample.

    Raises ValueError for types that cannot be stored.
    """
    name = np.dtype(dtype).name
    if name not in DTYPES:
        raise ValueError(f"arrays of {name} cannot be stored: convert them to {', '.join(DTYPES)}")
    sizes = ",".join("?" if size is None else str(int(size)) for size in shape)
    return f"{name}[{sizes}]" if len(shape) or name not in _CODES else name


Structure: TypeAlias = str | Sequence["Structure"] | Mapping[str, "Structure"]
"""Lists and dictionaries, nested, with the names of fields as leaves: `["0", "1"]` is a tuple of
two."""


@dataclass(frozen=True, slots=True)
class Schema:
    """Names and kinds of a sample's fields."""

    fields: tuple[tuple[str, str], ...]
    """(name, kind) each; see `Kind`."""
    structure: Structure | None = None
    """None where a sample is a dictionary of its fields."""
    kinds: Mapping[str, Kind] = field(init=False, repr=False, compare=False)
    overhead: int = field(init=False, repr=False, compare=False)
    """Bytes of a payload beyond the bodies of its encoded fields and variable arrays."""
    _fixed: tuple[_Fixed, ...] = field(init=False, repr=False, compare=False)
    _variable: tuple[tuple[str, Kind], ...] = field(init=False, repr=False, compare=False)
    _sizes: struct.Struct = field(init=False, repr=False, compare=False)
    _sizes_at: int = field(init=False, repr=False, compare=False)
    _aligned: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        kinds = _checked_kinds(self.fields, self.structure)
        fixed, at = _place_fixed(kinds)
        arrays = [item for item in kinds.items() if item[1].dtype is not None and not item[1].fixed]
        encoded = [item for item in kinds.items() if item[1].dtype is None]
        variable = (*arrays, *encoded)
        sizes = struct.Struct(f"<{max(0, len(variable) - 1)}I")
        ends = at + sizes.size
        for name, value in (
            ("kinds", kinds),
            ("_fixed", fixed),
            ("_variable", variable),
            ("_sizes", sizes),
            ("_sizes_at", at),
            ("_aligned", bool(arrays)),
            ("overhead", -(-ends // 8) * 8 if arrays else ends),
        ):
            object.__setattr__(self, name, value)
        if self.overhead > MAX_PAYLOAD:
            raise CorruptBlock(f"schema: a sample has {self.overhead} bytes, over {MAX_PAYLOAD}")

    def __reduce__(self) -> tuple[Any, ...]:
        return Schema, (self.fields, self.structure)

    def join_fixed(
        self, count: int, columns: Mapping[str, npt.NDArray[np.generic]]
    ) -> list[bytes | memoryview]:
        """Encode many samples of a schema without variable fields, one column at a time. `columns`
        has values by field, of shape (count, *shape of the field).

        Returns the payloads. Raises ValueError for a column of the wrong kind.
        """
        single = len(self._fixed) == 1
        rows: npt.NDArray[np.uint8] = np.empty((0 if single else count, self.overhead), np.uint8)
        for name, kind, at, _ in self._fixed:
            column = columns[name]
            fits = column.shape == (count, *kind.shape)
            is_kind = column.dtype == kind.dtype or column.dtype.newbyteorder("<") == kind.dtype
            if not fits or not is_kind:
                raise ValueError(
                    f"field {name!r} is {kind.text}, but these samples' are "
                    f"{column.dtype.name}{list(column.shape[1:])}"
                )
            flat = np.ascontiguousarray(column, kind.dtype).reshape(-1).view(np.uint8)
            if single:
                rows = flat  # Its values are the payloads.
            else:
                rows[:, at : at + kind.bytes] = flat.reshape(count, kind.bytes)
        data = rows.reshape(-1).data
        size = self.overhead
        return [data[k * size : (k + 1) * size] for k in range(count)]

    def places(self) -> Iterator[tuple[str, Kind, int]]:
        """Yield (name, kind, offset in a payload) of each fixed field."""
        for name, kind, at, _ in self._fixed:
            yield name, kind, at

    def scalars_in(self, part: Buffer, begin: int, end: int) -> Iterator[tuple[str, Value]]:
        """Yield (name, value) of the numbers in a part of a payload. It has the bytes from `begin`
        to `end`."""
        for name, _, at, code in self._fixed:
            if code is not None and begin <= at < end:
                yield name, code.unpack_from(part, at - begin)[0]

    @property
    def is_fixed(self) -> bool:
        """True if all payloads have the same size, `overhead`."""
        return not self._variable

    def to_json(self) -> str:
        """Return the text that `from_json` parses."""
        rows: Any = [list(row) for row in self.fields]
        if self.structure is not None:
            rows = {"fields": rows, "structure": self.structure}
        return json.dumps(rows, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> "Schema":
        """Parse `to_json`'s text. Raises CorruptBlock for anything else."""
        try:
            return cls.from_rows(parse_json(text, "schema"))
        except (ValueError, RecursionError) as error:
            raise CorruptBlock(f"schema is not JSON: {error}") from error

    @classmethod
    def from_rows(cls, rows: object) -> "Schema":
        """Make a schema of parsed JSON. Raises CorruptBlock."""
        structure = None
        try:
            pairs: Any = rows
            if isinstance(rows, dict):
                pairs, structure = rows["fields"], rows["structure"]
            return cls(tuple((str(name), str(kind)) for name, kind in pairs), structure)
        except (KeyError, ValueError, TypeError, RecursionError) as error:
            raise CorruptBlock(f"schema is not a list of (name, kind): {error!r}") from error

    def payload_sizes(
        self, count: int, bodies: Mapping[str, WholeNumbers]
    ) -> npt.NDArray[np.int64]:
        """Return the payload bytes of `count` samples; shape (count,). `bodies` has the bytes of
        the values of each variable field: of an array's data, or of an encoded value."""
        sizes = np.full(count, self.overhead, np.int64)
        for name, kind in self._variable:
            if kind.dtype is not None and name != self._variable[-1][0]:
                sizes += np.add(bodies[name], kind.head + 7, dtype=np.int64) // 8 * 8
            else:  # Without another array of this length.
                sizes += bodies[name]
                sizes += kind.head
        return sizes

    def join(self, values: Mapping[str, Value]) -> bytes | memoryview:
        """Encode one sample's fields as its payload (one copy).

        Raises ValueError for a value that is not of its field's kind.
        """
        parts = [
            _fixed_bytes(name, kind, code, values[name]) for name, kind, _, code in self._fixed
        ]
        heads: list[bytes] = []
        bodies: list[Buffer] = []
        for name, kind in self._variable:
            if kind.dtype is None:
                heads.append(b"")
                bodies.append(_encoded_bytes(name, kind, values[name]))
            else:
                dims, body = _array_bytes(name, kind, values[name])
                heads.append(struct.pack(f"<{len(dims)}I", *dims).ljust(kind.head, b"\0"))
                bodies.append(body)
        parts.append(
            self._sizes.pack(
                *(len(h) + len(b) for h, b in zip(heads[:-1], bodies[:-1], strict=True))
            )
        )
        if self._aligned:
            parts.append(bytes(self.overhead - self._sizes_at - self._sizes.size))
        last = len(bodies) - 1
        for k, (head, body) in enumerate(zip(heads, bodies, strict=True)):
            parts += (head, body)
            if self._variable[k][1].dtype is not None and k != last:
                parts.append(bytes(-(len(head) + len(body)) % 8))
        return joined(parts)

    def split(self, payload: Buffer) -> dict[str, Value]:
        """Decode a payload into its fields, without copies.

        Values are Python numbers, numpy arrays that are views, and memoryviews of encoded fields.

        Raises CorruptBlock when the payload is not as long as its fields claim.
        """
        view = memoryview(payload)
        if len(view) < self.overhead:
            raise CorruptBlock(
                f"payload of {len(view)} bytes is shorter than its {self.overhead} fixed bytes"
            )
        values: dict[str, Value] = {}
        for name, kind, at, code in self._fixed:
            if code is not None:
                values[name] = code.unpack_from(view, at)[0]
            else:
                assert kind.dtype is not None
                shape = [size or 0 for size in kind.shape]
                values[name] = np.ndarray(shape, kind.dtype, view, at)
        if not self._variable:
            if len(view) != self.overhead:
                raise CorruptBlock(f"payload of {len(view)} bytes goes on after its last field")
            return values
        for name, kind, body in self.bodies(view):
            values[name] = body if kind.dtype is None else _array(name, kind, body)
        return values

    def bodies(self, view: memoryview) -> Iterator[tuple[str, Kind, memoryview]]:
        """Yield the encoded values of a payload's fields of variable size. Raises CorruptBlock."""
        sizes = self._sizes.unpack_from(view, self._sizes_at)
        at, last = self.overhead, len(sizes)
        for k, (name, kind) in enumerate(self._variable):
            end = len(view) if k == last else at + sizes[k]
            if end > len(view):
                raise CorruptBlock(f"payload of {len(view)} bytes ends before its fields do")
            yield name, kind, view[at:end]
            at = end if kind.dtype is None else -(-end // 8) * 8

    def arrange(self, values: Mapping[str, Value]) -> object:
        """Return the fields in the sample's own structure; lists become tuples."""
        if self.structure is None:
            return dict(values)
        return _map(self.structure, values.__getitem__)


def leaves(structure: object) -> Iterator[str]:
    """Yield the field names in a structure, in order. Raises CorruptBlock for anything else."""
    if isinstance(structure, str):
        yield structure
    elif isinstance(structure, list):
        for item in structure:
            yield from leaves(item)
    elif isinstance(structure, dict):
        for item in structure.values():
            yield from leaves(item)
    else:
        raise CorruptBlock(f"schema: {structure!r} in its structure is not a field")


def _checked_kinds(fields: Sequence[tuple[str, str]], structure: Any) -> dict[str, Kind]:
    """Return the kinds of a schema's fields by name. Raises CorruptBlock for an invalid schema."""
    names = [name for name, _ in fields]
    if not names or len(set(names)) != len(names) or len(names) > MAX_FIELDS:
        raise CorruptBlock(
            f"schema with fields {names[:8]!r}: their names must be 1 to {MAX_FIELDS}, and differ"
        )
    kinds = {}
    for name, text in fields:
        try:
            kinds[name] = parse_kind(text)
        except ValueError as error:
            raise CorruptBlock(
                f"schema field {name!r}: {error} to this version of dlio: upgrade dlio, or "
                "pack the data set again"
            ) from error
    if structure is not None and sorted(leaves(structure)) != sorted(names):
        raise CorruptBlock("schema: its structure does not hold each field once")
    return kinds


def _place_fixed(kinds: Mapping[str, Kind]) -> tuple[tuple[_Fixed, ...], int]:
    """Return the fields of fixed size with their offsets, widest type first, and their bytes."""
    widest_first = sorted(
        (item for item in kinds.items() if item[1].fixed),
        key=lambda item: -item[1].dtype.itemsize if item[1].dtype else 0,
    )
    fixed, at = [], 0
    for name, kind in widest_first:
        code = struct.Struct("<" + _CODES[kind.text]) if kind.scalar else None
        fixed.append((name, kind, at, code))
        at += kind.bytes
    return tuple(fixed), at


IMAGE_LABEL: Final = Schema((("image", "image"), ("label", "int64")))
"""Labelled images, as class folders hold them: (image file's bytes, class number)."""
LABEL: Final = struct.Struct("<q")
"""Format of the bytes before the image in a payload of IMAGE_LABEL."""


def _map(structure: Structure, of: Callable[[str], object]) -> object:
    if isinstance(structure, str):
        return of(structure)
    if isinstance(structure, Mapping):
        return {key: _map(item, of) for key, item in structure.items()}
    return tuple(_map(item, of) for item in structure)


def _fixed_bytes(name: str, kind: Kind, code: struct.Struct | None, value: Value) -> Buffer:
    """Encode a value of fixed size. Raises ValueError if it is not of its field's kind."""
    if code is None:
        return _array_bytes(name, kind, value)[1]
    try:
        encoded: bytes = code.pack(value)
    except struct.error as error:
        raise ValueError(f"field {name!r} ({kind.text}): {error}") from error
    return encoded


def _array_bytes(name: str, kind: Kind, value: Value) -> tuple[list[int], Buffer]:
    """Return (variable dimensions, data) of an array, after checking its kind."""
    array = np.asarray(value)
    assert kind.dtype is not None
    fits = array.ndim == len(kind.shape) and all(
        wanted in (None, size) for wanted, size in zip(kind.shape, array.shape, strict=False)
    )
    if not fits or array.dtype.newbyteorder("<") != kind.dtype:
        raise ValueError(
            f"field {name!r} is {kind.text}, but this sample's is "
            f"{array.dtype.name}{list(array.shape)}"
        )
    dims = [size for wanted, size in zip(kind.shape, array.shape, strict=True) if wanted is None]
    data = np.ascontiguousarray(array, kind.dtype).reshape(-1).view(np.uint8)
    return dims, data.data


def _encoded_bytes(name: str, kind: Kind, value: Value) -> Buffer:
    if isinstance(value, str) and kind.text in TEXTS:
        return value.encode()
    if isinstance(value, bytes | bytearray | memoryview):
        return value
    raise ValueError(f"field {name!r} is {kind.text}, but this sample's is {type(value).__name__}")


def _array(name: str, kind: Kind, body: memoryview) -> npt.NDArray[Any]:
    """Make a variable array of its dimensions and data. Raises CorruptBlock if they disagree."""
    assert kind.dtype is not None
    missing = kind.shape.count(None)
    if len(body) < kind.head:
        raise CorruptBlock(f"field {name!r}: {len(body)} bytes are too few for {kind.text}")
    dims = iter(struct.unpack_from(f"<{missing}I", body))
    shape = [next(dims) if size is None else size for size in kind.shape]
    if math.prod(shape) * kind.dtype.itemsize != len(body) - kind.head:
        raise CorruptBlock(
            f"field {name!r}: {len(body) - kind.head} bytes are not {kind.dtype.name}{shape}"
        )
    try:
        return np.ndarray(shape, kind.dtype, body, kind.head)
    except ValueError as error:  # Dimensions beyond numpy's, of which one is zero.
        raise CorruptBlock(f"field {name!r}: its shape {shape} is invalid") from error
