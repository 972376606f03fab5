"""The verdict about a sample, which is the same for all commands and loaders."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from dlio.data.schema import IMAGES, TEXTS, Buffer, Schema
from dlio.errors import CorruptBlock, SourceError
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
        self._images = [name for name, kind in self._kinds.items() if kind in IMAGES]
        self._companion: Companion | None = None
        if any(name in self._kinds for name in _BESIDE):
            from dlio.loader.picture_targets import companion_of

            companion = companion_of(schema)
            if companion is not None and companion.moves:
                self._companion = companion

    def refused(self, payloads: Sequence[Buffer], names: Sequence[str]) -> int:
        """Return the number of samples that loaders refuse."""
        count = 0
        for k in self.doubtful(payloads):
            try:
                self.check(payloads[k], names[k])
            except (SourceError, CorruptBlock):
                count += 1
        return count

    def doubtful(self, payloads: Sequence[Buffer]) -> Sequence[int]:
        """Return the positions of the samples that `check` may refuse: all but those with nothing
        to decode but JPEGs, which one native call finds sound."""
        from dlio.image import native
        from dlio.image.decoder import MAX_PIXELS

        library, everyone, fields = native.find(), range(len(payloads)), self._images
        others = self._companion is not None or any(kind in TEXTS for kind in self._kinds.values())
        if library is None or others or not fields:
            return everyone
        try:
            values = [self._schema.split(payload) for payload in payloads]
        except CorruptBlock:
            return everyone
        sound = library.sound([each[field] for each in values for field in fields], MAX_PIXELS)
        width = len(fields)
        return [k for k in everyone if not all(sound[k * width : (k + 1) * width])]

    def check(self, payload: Buffer, name: object) -> None:
        """Decode the fields of a sample. Raises SourceError or CorruptBlock for one that loaders
        refuse."""
        values = self._schema.split(payload)
        for field, kind in self._kinds.items():
            is_beside = self._companion is not None and field != self._companion.image
            if kind in IMAGES and not is_beside:
                self._decode(values[field], name)
            elif kind in TEXTS:
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
