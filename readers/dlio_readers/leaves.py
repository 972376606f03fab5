"""The values of a sample of any structure, as fields of a schema."""

from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from dlio.data.schema import Structure, Value, array_kind, leaves
from dlio.errors import UsageError

_DEPTH: Final = 16

Leaf = tuple[str, str, tuple[int, ...], Any]
"""(field, dtype or encoded kind, shape, value)"""


def flatten(item: Value, path: str) -> list[Leaf]:
    """Return the leaves of a sample. Raises UsageError for a value that cannot be stored."""
    return list(_walk(item, "", path, 0))


def _walk(item: Any, name: str, path: str, depth: int) -> Iterator[Leaf]:
    """Yield the leaves of a sample, named by their paths: `1.boxes`, where a number is an index."""
    if depth > _DEPTH:
        raise UsageError(f"{path}: samples are nested more than {_DEPTH} deep")
    if isinstance(item, tuple) and hasattr(item, "_asdict"):
        item = item._asdict()
    if isinstance(item, tuple | list):
        for k, value in enumerate(item):
            yield from _walk(value, f"{name}.{k}" if name else str(k), path, depth + 1)
    elif isinstance(item, dict):
        for key, value in item.items():
            part = str(key)
            if not isinstance(key, str) or "." in part or part.isdigit() or not part:
                raise UsageError(
                    f"{path}: the key {key!r} of a sample cannot be the name of a field: use words"
                )
            yield from _walk(value, f"{name}.{part}" if name else part, path, depth + 1)
    else:
        yield _leaf(item, name or "0", path)


def _leaf(item: Any, name: str, path: str) -> Leaf:
    import torch

    if isinstance(item, torch.Tensor):
        try:
            item = item.detach().cpu().numpy()
        except TypeError as error:
            raise UsageError(f"{path}: field {name!r} is {item.dtype}: convert it") from error
    if isinstance(item, bool):
        return name, "bool", (), item
    if isinstance(item, int):
        return name, "int64", (), item
    if isinstance(item, float):
        return name, "float64", (), item
    if isinstance(item, str):
        return name, "text", (), item.encode()
    if isinstance(item, bytes | bytearray | memoryview):
        return name, "bytes", (), bytes(item)
    if isinstance(item, np.ndarray | np.generic):
        array = np.asarray(item)
        try:
            array_kind(array.dtype)
        except ValueError as error:
            raise UsageError(f"{path}: field {name!r}: {error}") from error
        return name, array.dtype.name, array.shape, array
    if hasattr(item, "getbands") and hasattr(item, "convert"):
        return name, "png", (), _png(item, name, path)
    raise UsageError(
        f"{path}: field {name!r} is a {type(item).__name__}, which cannot be stored without "
        "pickle: return tensors, arrays, numbers, strings, bytes or Pillow images"
    )


def _png(picture: Any, name: str, path: str) -> bytes:
    """Encode a Pillow image losslessly."""
    from dlio.image.decoder import opencv

    if picture.mode not in ("L", "RGB", "RGBA", "I;16"):
        if picture.mode not in ("P", "1", "LA", "PA"):
            raise UsageError(f"{path}: field {name!r} is a {picture.mode} picture: convert it")
        picture = picture.convert("RGBA" if picture.mode in ("LA", "PA") else "RGB")
    pixels = np.asarray(picture)
    if pixels.ndim == 3:
        pixels = np.ascontiguousarray(pixels[..., [2, 1, 0, 3][: pixels.shape[2]]])
    cv2 = opencv()
    done, data = cv2.imencode(".png", pixels, [cv2.IMWRITE_PNG_COMPRESSION, 1])
    if not done:
        raise UsageError(f"{path}: field {name!r} cannot be encoded as PNG")
    return bytes(data)


def structure_of(names: list[str]) -> Structure | None:
    """Rebuild the structure from the paths in `names`; None for a plain dictionary of fields."""
    if names == ["0"]:
        return "0"
    if not any("." in name or name.isdigit() for name in names):
        return None
    tree: dict[str, Any] = {}
    for name in names:
        node = tree
        *ways, last = name.split(".")
        for way in ways:
            node = node.setdefault(way, {})
        node[last] = name
    structure: Structure = _listed(tree)
    assert sorted(leaves(structure)) == sorted(names)
    return structure


def _listed(tree: Any) -> Any:
    if isinstance(tree, str):
        return tree
    children = {key: _listed(value) for key, value in tree.items()}
    return list(children.values()) if all(key.isdigit() for key in children) else children
