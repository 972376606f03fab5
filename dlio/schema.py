"""The schema of a sample, and how its fields make one payload.

A payload is what blocks store, checksums cover, tiers serve and peers send: the sample's
fields, encoded one after another. Fixed fields come first, in schema order, then the sizes
of all variable fields but the last (u32, little-endian), then the variable fields' bytes.
An image with a label is thus eight bytes longer than the image file.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from dlio.errors import CorruptBlock

VARIABLE_KINDS: Final = ("jpeg", "png", "image", "bytes", "text")
FIXED_KINDS: Final = {"int64": struct.Struct("<q"), "float32": struct.Struct("<f")}

Buffer = bytes | bytearray | memoryview
Value = int | float | Buffer


@dataclass(frozen=True, slots=True)
class Schema:
    """Names and kinds of a sample's fields."""

    fields: tuple[tuple[str, str], ...]
    """(name, kind) each; kinds are those of FIXED_KINDS and VARIABLE_KINDS."""

    def __post_init__(self) -> None:
        names = [name for name, _ in self.fields]
        if not names or len(set(names)) != len(names) or len(names) > 256:
            raise CorruptBlock(f"schema {self.fields!r}: field names must be 1 to 256, and differ")
        for name, kind in self.fields:
            if kind not in FIXED_KINDS and kind not in VARIABLE_KINDS:
                raise CorruptBlock(
                    f"schema field {name!r} is of kind {kind!r}, which this version of dlio "
                    "does not know: upgrade dlio, or pack the data set again"
                )

    @property
    def fixed(self) -> list[tuple[str, str]]:
        return [field for field in self.fields if field[1] in FIXED_KINDS]

    @property
    def variable(self) -> list[tuple[str, str]]:
        return [field for field in self.fields if field[1] in VARIABLE_KINDS]

    @property
    def overhead(self) -> int:
        """Bytes of a payload beyond the variable fields' own."""
        fixed = sum(FIXED_KINDS[kind].size for _, kind in self.fixed)
        return fixed + 4 * max(0, len(self.variable) - 1)

    def to_json(self) -> str:
        return json.dumps([list(field) for field in self.fields], separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> "Schema":
        """Parse `to_json`'s text. Raises CorruptBlock for anything else."""
        try:
            rows = json.loads(text)
            return cls(tuple((str(name), str(kind)) for name, kind in rows))
        except (ValueError, TypeError, RecursionError) as error:
            raise CorruptBlock(f"schema is not a list of (name, kind): {error}") from error

    def join(self, values: Mapping[str, Value]) -> bytes:
        """Encode one sample's fields as its payload (one copy)."""
        parts: list[Buffer] = []
        for name, kind in self.fixed:
            parts.append(FIXED_KINDS[kind].pack(values[name]))
        bodies: Sequence[Buffer] = [_bytes(values[name]) for name, _ in self.variable]
        parts.extend(struct.pack("<I", len(body)) for body in bodies[:-1])
        parts.extend(bodies)
        return b"".join(parts)

    def split(self, payload: Buffer) -> dict[str, Value]:
        """Decode a payload into its fields; variable ones are views, nothing is copied.

        Raises CorruptBlock when the payload is shorter than its fields claim.
        """
        view = memoryview(payload)
        if len(view) < self.overhead:
            raise CorruptBlock(
                f"payload of {len(view)} bytes is shorter than its {self.overhead} fixed bytes"
            )
        values: dict[str, Value] = {}
        at = 0
        for name, kind in self.fixed:
            values[name] = FIXED_KINDS[kind].unpack_from(view, at)[0]
            at += FIXED_KINDS[kind].size
        variable = self.variable
        sizes = [struct.unpack_from("<I", view, at + 4 * k)[0] for k in range(len(variable) - 1)]
        at += 4 * len(sizes)
        if at + sum(sizes) > len(view):
            raise CorruptBlock(f"payload of {len(view)} bytes ends before its fields do")
        for (name, _), size in zip(variable, sizes, strict=False):
            values[name] = view[at : at + size]
            at += size
        if variable:
            values[variable[-1][0]] = view[at:]
        elif at != len(view):
            raise CorruptBlock(f"payload of {len(view)} bytes goes on after its last field")
        return values


IMAGE_LABEL: Final = Schema((("image", "image"), ("label", "int64")))
"""Labelled images, as class folders hold them: (image file's bytes, class number)."""


def _bytes(value: Value) -> Buffer:
    if isinstance(value, int | float):
        raise TypeError("a variable field takes bytes")
    return value
