"""The verdict about a sample, which is the same for all commands and loaders."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from dlio.data.schema import IMAGES, Buffer, Schema
from dlio.errors import SourceError
from dlio.util.structured_text import parse_json

if TYPE_CHECKING:
    from dlio.loader.picture_targets import Companion

_BESIDE: Final = ("mask", "boxes")
"""Fields of which loaders make the target of a picture."""


class SampleCheck:
    """Decodes samples as loaders do. `decode` takes an image and the sample's name: it raises
    DecodeError for an image that loaders refuse."""

    def __init__(self, schema: Schema, decode: Callable[[Buffer, object], object]) -> None:
        self._schema, self._decode = schema, decode
        self._kinds = {name: kind.text for name, kind in schema.kinds.items()}
        self._companion: Companion | None = None
        if any(name in self._kinds for name in _BESIDE):
            from dlio.loader.picture_targets import companion_of

            companion = companion_of(schema)
            if companion is not None and companion.moves:
                self._companion = companion

    def check(self, payload: Buffer, name: object) -> None:
        """Decode the fields of a sample. Raises SourceError or CorruptBlock for one that loaders
        refuse."""
        values = self._schema.split(payload)
        for field, kind in self._kinds.items():
            is_beside = self._companion is not None and field != self._companion.image
            if kind in IMAGES and not is_beside:
                self._decode(values[field], name)
            elif kind in ("text", "json"):
                _check_text(values[field], kind, field, name)
        if self._companion is not None:
            self._companion.made(values, None, name)


def _check_text(value: Buffer, kind: str, field: str, name: object) -> None:
    try:
        if kind == "text":
            str(value, "utf-8")
        else:
            parse_json(value, f"{field} of {name}")
    except ValueError as error:
        raise SourceError(f"sample {str(name)!r} cannot be decoded: {field}: {error}") from error
