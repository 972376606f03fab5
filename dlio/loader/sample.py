"""A sample's fields as users get them.

Arrays become tensors over the payload's own memory. Images are decoded here, as late as possible.
"""

import json
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from dlio.data.labels import label_name
from dlio.data.schema import IMAGES, Buffer, Schema
from dlio.errors import CorruptBlock, SourceError
from dlio.image.decoder import decode_whole
from dlio.loader.contract import Sample
from dlio.loader.torch_private import collate_fn_map, tree_map
from dlio.util.structured_text import parse_json

_INTEGERS: Final = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")


class Texts(list[Any]):
    """A list of texts, or of such lists. A batch has a list of them, with torch's default_collate,
    too, which would group the texts of one place, and fail where the numbers of texts differ."""


collate_fn_map[Texts] = lambda batch, **_: list(batch)


def image_and_label(schema: Schema) -> tuple[str, str] | None:
    """Return the fields (image, label) of a data set of labelled images; None for any other.

    The image is the first image field. The label is the integer field with a label's name, or the
    only integer field. Crops leave all other fields out; nested samples are never cropped.
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
    """Return the integer field with a label's name (`dlio.data.labels`); None without one."""
    numbers = [name for name, kind in schema.fields if kind in _INTEGERS]
    return label_name(numbers)


def decode_sample(schema: Schema, payload: Buffer, name: object) -> Sample:
    """Decode a payload into a dictionary of its fields, or into the schema's structure of them.

    Numbers are Python's, arrays tensors, images uint8 tensors of shape (3, height, width), text a
    str, JSON its parsed value (`Texts` for lists of texts), anything else bytes. Arrays
    share the payload's memory where it is writable and aligned, and are copied otherwise. Errors
    name the sample by `name`, a str or what has `__str__`.

    Raises SourceError if the payload does not match its schema, DecodeError for a damaged image.
    """
    try:
        values = schema.split(payload)
        decoded = {
            field: decoded_field(schema.kinds[field].text, value, name)
            for field, value in values.items()
        }
    except (CorruptBlock, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise SourceError(f"sample {str(name)!r} cannot be decoded: {error}") from error
    return schema.arrange({field: decoded[field] for field, _ in schema.fields})


def decoded_field(kind: str, value: Any, name: object) -> Any:
    """Decode the value of one field, as `decode_sample` does.

    Raises DecodeError, UnicodeDecodeError or json.JSONDecodeError.
    """
    if kind in IMAGES:
        return picture_tensor(value, name)
    if isinstance(value, np.ndarray):
        return _tensor(value)
    if kind == "text":
        return str(value, "utf-8")
    if kind == "json":
        made = parse_json(value, f"{kind} of {name}")
        return Texts(made) if _is_of_texts(made) else made
    return bytes(value) if kind == "bytes" else value


def _is_of_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(v, str) or _is_of_texts(v) for v in value)


def no_samples(schema: Schema) -> Sample:
    """Return a batch of no samples, as default_collate would make it of what `decode_sample`
    returns: tensors of no rows, and of 0 where a dimension differs between samples; lists of texts,
    bytes and JSON."""
    made: dict[str, Any] = {}
    for name, text in schema.fields:
        kind = schema.kinds[name]
        if text in IMAGES:
            made[name] = torch.empty((0, 3, 0, 0), dtype=torch.uint8)
        elif kind.dtype is None:
            made[name] = []
        else:
            rows = torch.from_numpy(np.empty((0, *(size or 0 for size in kind.shape)), kind.dtype))
            is_bare = kind.scalar and kind.dtype != np.bool_
            # Python's numbers become int64 and float64.
            wide = torch.float64 if rows.is_floating_point() else torch.int64
            made[name] = rows.to(wide) if is_bare else rows
    # Lists where a sample has tuples, as default_collate has them.
    return made if schema.structure is None else tree_map(made.__getitem__, schema.structure)


def picture_tensor(value: Any, name: object, exact: bool = False) -> torch.Tensor:
    """Decode a picture: a uint8 tensor of shape (3, height, width), with Pillow's pixels if
    `exact`. Raises DecodeError."""
    if isinstance(value, np.ndarray):
        return _tensor(value)
    return _tensor(decode_whole(value, name, exact)).permute(2, 0, 1)


def _tensor(array: npt.NDArray[Any]) -> torch.Tensor:
    plain = array if array.flags.aligned and array.flags.writeable else array.copy()
    return torch.from_numpy(plain)
