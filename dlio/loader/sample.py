"""From a payload to what a user gets of a sample whose fields are not an image and its label.

Arrays become tensors over the payload's own memory; images are decoded, as late as here.
"""

import json
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from dlio.data.schema import IMAGES, Buffer, Schema
from dlio.errors import CorruptBlock, SourceError
from dlio.image.decode import decode_whole

_LABELS: Final = ("label", "labels", "cls", "class", "target", "targets", "fine_label", "y", "1")
_INTEGERS: Final = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")


def image_and_label(schema: Schema) -> tuple[str, str] | None:
    """The fields of a data set of labelled images; None for any other.

    The first image, and the whole number that is called as labels are called, or is the only one.
    What else a sample holds beside them is left out of crops; nested samples are never cropped.
    """
    images = [name for name, kind in schema.fields if kind in IMAGES]
    numbers = [name for name, kind in schema.fields if kind in _INTEGERS]
    label = label_field(schema)
    if label is None and len(numbers) == 1:
        label = numbers[0]
    if not images or label is None or schema.structure not in (None, [images[0], label]):
        return None
    return images[0], label


def label_field(schema: Schema) -> str | None:
    """The whole number that is called as labels are called."""
    numbers = [name for name, kind in schema.fields if kind in _INTEGERS]
    return next((name for name in _LABELS if name in numbers), None)


def decode_sample(schema: Schema, payload: Buffer, name: str) -> Any:
    """A sample as users get it: a dictionary of its fields, or the schema's structure of them.

    Numbers are Python's, arrays tensors, images uint8 tensors of shape (3, height, width), text a
    str, JSON what it says, anything else bytes. Arrays share the payload's memory where it is
    writable and aligned, and are copied where it is not.

    Args:
        name: what to call the sample in errors.

    Raises SourceError when the payload does not hold what its schema says, DecodeError for a
    damaged image.
    """
    try:
        values = schema.split(payload)
        made = {
            field: _decode(schema.kinds[field].text, value, name) for field, value in values.items()
        }
    except (CorruptBlock, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise SourceError(f"sample {name!r} cannot be decoded: {error}") from error
    return schema.arrange({field: made[field] for field, _ in schema.fields})


def _decode(kind: str, value: Any, name: str) -> Any:
    if isinstance(value, np.ndarray):
        return _tensor(value)
    if kind in IMAGES:
        return _tensor(decode_whole(value, name)).permute(2, 0, 1)
    if kind == "text":
        return str(value, "utf-8")
    if kind == "json":
        return json.loads(bytes(value))
    return bytes(value) if kind == "bytes" else value


def _tensor(array: npt.NDArray[Any]) -> torch.Tensor:
    plain = array if array.flags.aligned and array.flags.writeable else array.copy()
    return torch.from_numpy(plain)
