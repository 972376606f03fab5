"""The reader of torch's map-style data sets: encodes the values of `data[i]` without pickle.

Values may be tensors, arrays, numbers, strings, bytes and Pillow images, nested in tuples, lists
and dictionaries. Decoded samples have the same structure, with tuples for lists, tensors for
arrays, and PNG for Pillow images. Random augmentation belongs into `transform=`, which runs after
the tiers: a data set that returns different values each time cannot be cached.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dlio.data.index import fingerprint_of
from dlio.data.labels import LABEL_NAMES
from dlio.data.schema import Schema, array_kind, leaves
from dlio.errors import SourceError, UsageError
from dlio.plan.layout import cut_blocks
from dlio.plan.order import Order

__all__ = ["MapStyleData", "MapStyleReader"]

_VERSION: Final = 1
_SEED: Final = 0xD110
_PROBES: Final = 16
_THREADS: Final = 4
_DEPTH: Final = 16

Leaf = tuple[str, str, tuple[int, ...], Any]
"""(field, dtype or encoded kind, shape, value)"""


MapStyleData = Any
"""A user's data set: any object with `len` and `[i]`, as torch's DataLoader takes it."""


class MapStyleReader:
    """Read any object with `len` and `[i]`.

    If shapes differ between samples, or if a field is text or an image, opening reads every sample
    once to learn its size.

    Args:
        path: the data set.
        key: version of the data, for tiers that outlive a job. Without it, only changes in sixteen
            probed samples are noticed.

    Raises UsageError for samples that cannot be cached: random values, unsupported types, or
    differing fields.
    """

    format = "torch"
    objects = True
    objects_only = True

    def __init__(self, path: MapStyleData, key: str = "") -> None:
        self._data = path
        self._count = len(path)
        self.path = f"{type(path).__module__}.{type(path).__qualname__}"
        if not self._count:
            raise SourceError(f"{self.path} is empty: it has no samples")
        probes = np.unique(np.linspace(0, self._count - 1, _PROBES).astype(np.int64))
        shape = _Shape(self.path, _flatten(self._get(0), self.path))
        for probe in probes.tolist():
            shape.add(probe, _flatten(self._get(probe), self.path))
        if not shape.schema().is_fixed:
            with ThreadPoolExecutor(_THREADS) as pool:
                for sample, leaf in enumerate(pool.map(self._leaves, range(self._count))):
                    shape.add(sample, leaf)
        self.schema = shape.schema()
        self.sizes = shape.sizes(self._count)
        first, again = self.read(probes), self.read(probes)
        if first != again:
            raise UsageError(
                f"{self.path} gives different values each time a sample is read: move random "
                "operations into transform=, which is called for every use of a sample"
            )
        self.classes: Sequence[str] = _class_names(path)
        self._labels: npt.NDArray[np.int64] | None = None
        self.layout = cut_blocks(self.sizes, Order(self._count, _SEED, shuffled=True))
        self.fingerprint = fingerprint_of(
            "torch",
            _VERSION,
            self.path,
            key,
            self.schema.to_json(),
            self.layout.starts,
            *map(bytes, first),
        )

    @staticmethod
    def recognises(path: MapStyleData) -> str | None:
        if isinstance(path, str | bytes | list | tuple):
            return "is not a map-style data set"
        if hasattr(path, "__getitem__") and hasattr(path, "__len__"):
            return None
        return "lacks len() or [i]: an iterable does not allow random access"

    @property
    def labels(self) -> npt.NDArray[np.int64]:
        """Labels from the data set's `targets`, or else from every sample; shape (samples,)."""
        if self._labels is None:
            self._labels = self._find_labels()
        return self._labels

    def __len__(self) -> int:
        return self._count

    def name(self, sample: int) -> str:
        return f"{self.path}[{sample}]"

    def read(self, samples: npt.NDArray[np.int64]) -> list[bytes | memoryview]:
        numbers = [int(sample) for sample in samples]
        together = getattr(self._data, "__getitems__", None)
        if callable(together):
            try:
                items = together(numbers)
            except Exception as error:
                raise self._failed(numbers[0], error) from error
        else:
            items = map(self._get, numbers)
        return [self._join(n, item) for n, item in zip(numbers, items, strict=True)]

    def close(self) -> None:
        pass

    def _get(self, sample: int) -> Any:
        try:
            return self._data[sample]
        except Exception as error:
            raise self._failed(sample, error) from error

    def _leaves(self, sample: int) -> list[Leaf]:
        """Return the leaves with sizes in place of values, to save memory."""
        flat = _flatten(self._get(sample), self.path)
        return [(name, kind, shape, _body_bytes(value)) for name, kind, shape, value in flat]

    def _join(self, sample: int, item: Any) -> bytes:
        values = {name: value for name, _, _, value in _flatten(item, self.path)}
        if values.keys() != self.schema.kinds.keys():
            raise SourceError(
                f"{self.name(sample)} has the fields {', '.join(values)}, others have "
                f"{', '.join(self.schema.kinds)}: make them alike"
            )
        try:
            return self.schema.join(values)
        except ValueError as error:
            raise SourceError(
                f"{self.name(sample)} differs from the samples that were probed: {error}; make "
                "them alike"
            ) from error

    def _find_labels(self) -> npt.NDArray[np.int64]:
        targets = getattr(self._data, "targets", None)
        if targets is not None and len(targets) == self._count:
            try:
                return np.asarray(targets).astype(np.int64)
            except (TypeError, ValueError):
                pass
        name = next((n for n in LABEL_NAMES if n in self.schema.kinds), None)
        if name is None or "int" not in self.schema.kinds[name].text or "[" in name:
            return np.zeros(self._count, np.int64)
        payloads = (self.read(np.array([sample]))[0] for sample in range(self._count))
        return np.array([self.schema.split(payload)[name] for payload in payloads], np.int64)

    def _failed(self, sample: int, error: Exception) -> SourceError:
        return SourceError(f"{self.name(sample)} failed with {type(error).__name__}: {error}")


class _Shape:
    """Kinds, shapes and sizes of all fields, gathered over samples."""

    def __init__(self, path: str, first: list[Leaf]) -> None:
        self._path = path
        self._kinds = {name: kind for name, kind, _, _ in first}
        self._shapes: dict[str, list[int | None]] = {
            name: list(shape) for name, _, shape, _ in first
        }
        self._structure: Any = None
        self._bodies: dict[str, dict[int, int]] = {name: {} for name in self._kinds}

    def add(self, sample: int, flat: list[Leaf]) -> None:
        names = [name for name, _, _, _ in flat]
        if names != list(self._kinds):
            raise UsageError(
                f"{self._path}[{sample}] has the fields {', '.join(names)}, the first sample "
                f"{', '.join(self._kinds)}: make them alike"
            )
        for name, kind, shape, value in flat:
            known = self._shapes[name]
            if kind != self._kinds[name] or len(shape) != len(known):
                raise UsageError(
                    f"{self._path}[{sample}]: field {name!r} is {kind}{list(shape)}, in others "
                    f"{self._kinds[name]}{known}: make them alike"
                )
            for axis, size in enumerate(shape):
                if known[axis] != size:
                    known[axis] = None
            self._bodies[name][sample] = _body_bytes(value)

    def schema(self) -> Schema:
        fields = []
        for name, kind in self._kinds.items():
            plain = kind in ("text", "bytes", "png")
            fields.append((name, kind if plain else array_kind(kind, self._shapes[name])))
        return Schema(tuple(fields), _structure_of(list(self._kinds)))

    def sizes(self, count: int) -> npt.NDArray[np.int64]:
        schema = self.schema()
        if schema.is_fixed:
            return np.broadcast_to(np.int64(schema.overhead), count)
        bodies = {
            name: np.array([known[sample] for sample in range(count)], np.int64)
            for name, known in self._bodies.items()
            if not schema.kinds[name].fixed
        }
        return schema.payload_sizes(count, bodies)


def _flatten(item: Any, path: str) -> list[Leaf]:
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
    from dlio.image.decode import opencv

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


def _body_bytes(value: Any) -> int:
    if isinstance(value, np.ndarray):
        return value.nbytes
    return value if isinstance(value, int) else len(value) if isinstance(value, bytes) else 0


def _structure_of(names: list[str]) -> Any:
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
    structure = _listed(tree)
    assert sorted(leaves(structure)) == sorted(names)
    return structure


def _listed(tree: Any) -> Any:
    if isinstance(tree, str):
        return tree
    children = {key: _listed(value) for key, value in tree.items()}
    return list(children.values()) if all(key.isdigit() for key in children) else children


def _class_names(data: Any) -> list[str]:
    names = getattr(data, "classes", None)
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        return []
    return list(names)
