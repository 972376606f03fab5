"""The reader of torch's map-style data sets: encodes the values of `data[i]` without pickle.

Values may be tensors, arrays, numbers, strings, bytes and Pillow images, nested in tuples, lists
and dictionaries. Decoded samples have the same structure, with tuples for lists, tensors for
arrays, and PNG for Pillow images. Random augmentation belongs into `transform=`, which runs after
the tiers: a data set that returns different values each time cannot be cached.
"""

import dis
import random
import threading
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dlio.comm import Communicator
from dlio.comm.data_ranks import place
from dlio.data.flow import MOST_REQUESTS, Flow
from dlio.data.index import fingerprint_of
from dlio.data.labels import LabelColumn, SampleLabels, label_name, not_scalar, whole_labels
from dlio.data.reader_contract import Abilities, PathRules
from dlio.data.schema import Buffer, Schema, Structure, Value, array_kind, leaves
from dlio.errors import DlioError, SourceError, UsageError
from dlio.plan.layout import Layout, shuffled_layout
from dlio.util.arguments import whole_number
from dlio.util.forks import new_lock
from dlio.util.object_graph import reachable
from dlio.util.parallel import each_of
from dlio.util.printable import tell_once
from dlio.util.shared_state import shared_state_of
from dlio.util.thread_copies import mine
from dlio.util.units import counted

# The values of a sample of any structure, as fields of a schema

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


# Signs that a data set returns other values each time: see `MapStyleReader`

_UNSEEDED: Final = ("default_rng", "RandomState", "Random", "SystemRandom", "uuid4", "seed")
"""Called without arguments, these take entropy of the system."""
_ENTROPY: Final = ("urandom", "token_bytes", "token_hex", "getrandbits", "SystemRandom")
_PASSED_OVER: Final = ("PRECALL", "PUSH_NULL", "CACHE", "EXTENDED_ARG", "NOP")


class RandomState:
    """The state of the generators of random numbers that a data set may use.

    Other threads of the process may use the global ones too: that they have advanced is a sign,
    and not a proof.
    """

    def __init__(self, data: object) -> None:
        kinds = (random.Random, np.random.Generator, np.random.RandomState)
        self._held: list[Any] = [each for each in reachable(data) if isinstance(each, kinds)]
        self._held += [each for each in reachable(data) if type(each).__name__ == "Generator"]
        self._before = self._states()

    def advanced(self) -> bool:
        """True if one of them has been used since."""
        return self._states() != self._before

    def _states(self) -> list[object]:
        import torch

        states: list[object] = [
            random.getstate(),
            _key_of(np.random.get_state(legacy=False)),  # noqa: NPY002 - the data set's choice
            torch.get_rng_state().numpy().tobytes(),
        ]
        for each in self._held:
            if isinstance(each, random.Random):
                states.append(each.getstate())
            elif isinstance(each, np.random.RandomState):
                states.append(_key_of(each.get_state(legacy=False)))
            elif isinstance(each, np.random.Generator):
                states.append(repr(each.bit_generator.state))
            elif isinstance(each, torch.Generator):
                states.append(each.get_state().numpy().tobytes())
        return states


def _key_of(state: Any) -> tuple[bytes, int]:
    """Return the state of a Mersenne twister, for comparison."""
    return state["state"]["key"].tobytes(), int(state["state"]["pos"])


def may_be_random(data: object) -> bool:
    """True if code of the data set, or of what it holds, makes a generator without a seed."""
    held = [each for each in reachable(data) if isinstance(each, types.FunctionType)]
    codes = [each.__code__ for each in held]
    while codes:
        code = codes.pop()
        codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
        if any(name in _ENTROPY for name in code.co_names) or _calls_unseeded(code):
            return True
    return False


def _calls_unseeded(code: types.CodeType) -> bool:
    if not any(name in _UNSEEDED for name in code.co_names):
        return False
    named = False
    for instruction in dis.get_instructions(code):
        if instruction.opname in _PASSED_OVER:
            continue
        if named and instruction.opname.startswith("CALL") and instruction.arg == 0:
            return True
        named = instruction.argval in _UNSEEDED
    return False


# Samples

_VERSION: Final = 2
_PROBES: Final = 16
_ASKED_AGAIN: Final = 8
_MOST_REQUESTS: Final = 4096
_SHARED_BYTES: Final = 64 << 20
"""Bytes of inspected samples that one rank hands to the others."""
_WAITS_S: Final = 1e-3

MapStyleData = Any
"""A user's data set: any object with `len` and `[i]`, as torch's DataLoader takes it."""


@dataclass(frozen=True, slots=True)
class _DatasetFacts:
    """The knowledge of a data set that follows from sixteen of its samples."""

    schema: Schema
    size: int
    """Payload bytes of a sample, or an estimate of their mean."""
    estimated: bool
    layout: Layout
    fingerprint: str


class MapStyleReader:
    """Read any object with `len` and `[i]`.

    Sixteen samples, spread evenly, are read when it is opened; they tell the fields and their
    kinds, and are kept until they are used, so that no sample is asked for twice. In a job of
    several ranks one rank does so for all, when the tiers are opened.

    If shapes differ between these samples, or if a field is text or an image, `sizes` is an
    estimate: the size of a sample is known when it has been read.

    Samples that differ each time they are asked for are noticed if generators of random numbers
    advance meanwhile (Python's, NumPy's and torch's global ones, or some that the data set holds),
    or if the code of the data set makes one without a seed. Eight samples are then asked for
    again, and compared.

    Args:
        path: the data set. It is used by several threads, unless `requests` is 1.
        key: version of the data, for tiers that outlive a job. Without it, only changes in sixteen
            probed samples are noticed.
        requests: samples that are asked for at a time, at most; 64 by default. As many are as
            their latency makes worth it: four if the data set computes, more if it waits.

    Raises UsageError for samples that cannot be cached: random values, unsupported types, or
    differing fields.
    """

    format = "torch"
    objects = True
    path_rules = PathRules(takes_objects=True)

    def __init__(self, path: MapStyleData, key: str = "", requests: int | None = None) -> None:
        if requests is not None:
            requests = whole_number("requests", requests, 1, _MOST_REQUESTS)
        self._data = path
        self._key, self._requests = key, requests
        self._count = len(path)
        self.path = f"{type(path).__module__}.{type(path).__qualname__}"
        if not self._count:
            raise SourceError(f"{self.path} is empty: it has no samples")
        state = shared_state_of(path)
        if state is not None and state.seeds:
            raise UsageError(
                f"{self.path}: {state}, which the threads that read samples would share: give each "
                "sample a generator of its own, as torch.Generator().manual_seed(index), or leave "
                "out tiers= and dlio.open"
            )
        if state is not None:
            tell_once(f"{self.path}: {state}, which the threads that read samples share")
        self._facts: _DatasetFacts | None = None
        self._prepare()
        if place()[1] == 1:
            self._known()

    def _prepare(self) -> None:
        self._flow = Flow(MOST_REQUESTS if self._requests is None else self._requests)
        """Limits the samples that are asked for at a time."""
        self._turns = threading.Semaphore(self._flow.most)
        """Whoever reads, the data set is not asked for more at a time."""
        self._lock = new_lock()
        self._kept: dict[int, bytes | memoryview] = {}
        """Payloads of inspected samples that have not been used."""

    def __getstate__(self) -> dict[str, Any]:
        left_out = ("_flow", "_turns", "_lock", "_kept")
        return {name: each for name, each in self.__dict__.items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._prepare()

    @staticmethod
    def recognises(path: MapStyleData) -> str | None:
        if isinstance(path, str | bytes | list | tuple):
            return "is not a map-style data set"
        if hasattr(path, "__getitem__") and hasattr(path, "__len__"):
            return None
        return "lacks len() or [i]: an iterable does not allow random access"

    @property
    def abilities(self) -> Abilities:
        facts = self._facts
        several, agree = _takes_several(self._data), self._agree
        if facts is None:
            # Whoever asks for more asks for `schema` first, which reads samples.
            return Abilities(is_inspected=False, flow=self._flow, multi_get=several, agree=agree)
        return Abilities(
            flow=self._flow,
            multi_get=several,
            sizes_are_estimates=facts.estimated,
            data_bytes=facts.size * self._count,
            agree=agree,
        )

    @property
    def schema(self) -> Schema:
        return self._known().schema

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """Payload bytes of each sample; shape (samples,)."""
        return np.broadcast_to(np.int64(self._known().size), self._count)

    @property
    def layout(self) -> Layout:
        return self._known().layout

    @property
    def fingerprint(self) -> str:
        return self._known().fingerprint

    @property
    def labels(self) -> npt.NDArray[np.int64]:
        """Labels from the data set's `targets`, or else from every sample; shape (samples,)."""
        labelling = self._given_labels
        if labelling.numbers is None:
            labelling = self._read_labels
        none = np.broadcast_to(np.int64(0), self._count)
        return none if labelling.numbers is None else labelling.numbers

    @property
    def classes(self) -> Sequence[str]:
        """The data set's `classes`, or those of its `targets` if these are texts."""
        return self._given_labels.classes

    @cached_property
    def unlabelled(self) -> str:
        """Why the field with a label's name gives no labels; empty if it may."""
        name = label_name(self.schema.kinds)
        if name is None or self._given_labels.numbers is not None:
            return ""
        kind = self.schema.kinds[name]
        if kind.text == "text":
            text = f"its {name} is text, of which no classes are made: give the data set `targets`"
            return "" if len(self.classes) else text
        if not kind.scalar:
            return f"its {name} {not_scalar(kind.text)}"
        seen = [self.schema.split(payload)[name] for payload in list(self._kept.values())]
        is_whole = not seen or whole_labels(np.asarray(seen)) is not None
        return "" if is_whole else f"its {name} has numbers with fractions, or none (NaN)"

    @cached_property
    def _given_labels(self) -> SampleLabels:
        """The labels that the data set has as its `targets`; without them its classes alone.

        Raises SourceError for a target that is an empty text.
        """
        classes = _class_names(self._data)
        targets = getattr(self._data, "targets", None)
        try:
            count = -1 if targets is None else len(targets)
            values = np.asarray(targets)
        except (TypeError, ValueError):
            return SampleLabels(None, classes)
        labels = LabelColumn(classes)
        if count != self._count or not values.ndim:
            return SampleLabels(None, classes)
        if values.dtype.kind in "US":
            labels.add_texts(values.reshape(-1).tolist() if values.size == count else [])
        else:
            labels.add_numbers(values)
        labelling = labels.labels("target", self.name)
        return (
            labelling
            if labelling.numbers is not None
            else SampleLabels(None, classes, labelling.reason)
        )

    @cached_property
    def _read_labels(self) -> SampleLabels:
        """The labels that the samples hold, which reads each of them."""
        name = label_name(self.schema.kinds)
        if name is None or self.unlabelled:
            return SampleLabels(None, [])
        labels = LabelColumn(self.classes)
        for sample in range(self._count):
            value = self.schema.split(self.read(np.array([sample]))[0])[name]
            if self.schema.kinds[name].text == "text":
                labels.add_texts([bytes(value)])
            else:
                labels.add_numbers(np.asarray(value).reshape(1))
            if labels.is_refused:
                break
        return labels.labels(name, self.name)

    def __len__(self) -> int:
        return self._count

    def name(self, sample: int) -> str:
        return f"{self.path}[{sample}]"

    def read(self, samples: npt.NDArray[np.int64]) -> list[bytes | memoryview]:
        numbers = [int(sample) for sample in samples]
        schema = self._known().schema
        kept = {n: self._kept.pop(n, None) for n in numbers} if self._kept else {}
        here = {n: payload for n, payload in kept.items() if payload is not None}
        missing = [n for n in numbers if n not in here]
        items = self._items(missing) if missing else []
        fresh = {n: self._join(schema, n, item) for n, item in zip(missing, items, strict=True)}
        return [here[n] if n in here else fresh[n] for n in numbers]

    def _agree(self, comm: Communicator) -> None:
        """Have rank 0 inspect the data set for all ranks. Collective.

        Raises the same error on all ranks.
        """
        record: dict[str, Any] = {}
        kept: list[tuple[int, bytes | memoryview]] = []
        if comm.rank == 0:
            try:
                facts = self._known()
                kept = list(self._kept.items())
                if sum(len(payload) for _, payload in kept) > _SHARED_BYTES:
                    kept = []
                record = {
                    "schema": facts.schema.to_json(),
                    "rest": [facts.size, facts.estimated, facts.fingerprint],
                    "kept": [[sample, len(payload)] for sample, payload in kept],
                }
            except DlioError as error:
                record = {"error": str(error), "usage": isinstance(error, UsageError)}
        record = comm.tell(record)
        if "error" in record:
            raise (UsageError if record["usage"] else SourceError)(record["error"])
        memory = np.zeros(sum(size for _, size in record["kept"]), np.uint8)
        if comm.rank == 0:
            memory[:] = np.frombuffer(b"".join(payload for _, payload in kept), np.uint8)
        if len(memory):
            comm.bcast(memory)
        self._adopt(record, memory)

    def close(self) -> None:
        pass

    def _adopt(self, record: dict[str, Any], memory: npt.NDArray[np.uint8]) -> None:
        """Use what another rank has found, unless this one has looked itself."""
        with self._lock:
            if self._facts is not None:
                return
            at = 0
            for sample, size in record["kept"]:
                self._kept[sample] = memory[at : at + size].tobytes()
                at += size
            size, estimated, fingerprint = record["rest"]
            schema, layout = Schema.from_json(record["schema"]), _layout(self._count, size)
            self._facts = _DatasetFacts(schema, size, estimated, layout, fingerprint)

    def _known(self) -> _DatasetFacts:
        facts = self._facts
        if facts is None:
            with self._lock:
                facts = self._facts = self._facts or self._inspect()
        return facts

    def _inspect(self) -> _DatasetFacts:
        """Read some samples, and learn from them about all; they are kept."""
        probes = np.unique(np.linspace(0, self._count - 1, _PROBES).astype(np.int64)).tolist()
        draws = RandomState(self._data)
        items = self._probe(probes)
        drawn = draws.advanced()
        shape = _Shape(self.path, flatten(items[0], self.path))
        for probe, item in zip(probes, items, strict=True):
            shape.add(probe, flatten(item, self.path))
        schema = shape.schema()
        payloads = [self._join(schema, n, each) for n, each in zip(probes, items, strict=True)]
        if drawn or may_be_random(self._data):
            self._check_again(schema, probes[:_ASKED_AGAIN], payloads)
        size = schema.overhead if schema.is_fixed else _mean([len(each) for each in payloads])
        layout = _layout(self._count, size)
        about = (self.path, self._key, schema.to_json())
        fingerprint = fingerprint_of(
            "torch", _VERSION, *about, layout.starts, *map(bytes, payloads)
        )
        self._kept = dict(zip(probes, payloads, strict=True))
        return _DatasetFacts(schema, size, not schema.is_fixed, layout, fingerprint)

    def _probe(self, probes: list[int]) -> list[Any]:
        """Ask for samples, at a time if that is allowed; begin the flow with as many if they wait
        rather than compute."""
        threads = min(self._flow.most, len(probes))
        if threads == 1 or _takes_several(self._data):
            return list(self._items(probes))
        spent: list[tuple[float, float]] = []

        def ask(sample: int) -> Any:
            began, computed = time.perf_counter(), time.thread_time()
            item = self._get(sample)
            spent.append((time.perf_counter() - began, time.thread_time() - computed))
            return item

        began = time.perf_counter()
        items = each_of(ask, probes, threads, "the data set", may_be_long=True)
        whole = time.perf_counter() - began
        waited, computed = np.array(spent).T
        if np.median(waited) >= _WAITS_S and computed.sum() < whole / 2:
            self._flow.raise_to(threads)
        return items

    def _check_again(self, schema: Schema, probes: list[int], first: Sequence[Buffer]) -> None:
        """Raise UsageError if samples have other values when they are asked for again."""
        for sample, payload in zip(probes, first, strict=False):
            if self._join(schema, sample, self._get(sample)) != payload:
                raise UsageError(
                    f"{self.path} gives different values each time a sample is read: move random "
                    "operations into transform=, which is called for every use of a sample"
                )

    def _items(self, numbers: list[int]) -> list[Any]:
        if not _takes_several(self._data):
            return [self._get(number) for number in numbers]
        try:
            with self._turns:
                given = mine(self._data).__getitems__(numbers)
                items = [] if isinstance(given, Mapping) else list(given)
        except BaseException as error:
            if _stops_the_program(error):
                raise
            raise self._failed(numbers[0], error) from error
        if len(items) != len(numbers):
            raise SourceError(
                f"{self.path}: __getitems__ returned a {type(given).__name__} in place of a list "
                f"of {counted(len(numbers), 'sample')}: tiers keep samples one by one"
            )
        return items

    def _get(self, sample: int) -> Any:
        try:
            with self._turns:
                return mine(self._data)[sample]
        except BaseException as error:
            if _stops_the_program(error):
                raise
            raise self._failed(sample, error) from error

    def _join(self, schema: Schema, sample: int, item: Any) -> bytes | memoryview:
        values = {name: value for name, _, _, value in flatten(item, self.path)}
        if values.keys() != schema.kinds.keys():
            raise SourceError(
                f"{self.name(sample)} has the fields {', '.join(values)}, others have "
                f"{', '.join(schema.kinds)}: make them alike"
            )
        try:
            return schema.join(values)
        except ValueError as error:
            raise SourceError(
                f"{self.name(sample)} differs from the samples that were probed: {error}; make "
                "them alike"
            ) from error

    def _failed(self, sample: int, error: BaseException) -> SourceError:
        return SourceError(f"{self.name(sample)} failed with {type(error).__name__}: {error}")


class _Shape:
    """Kinds, shapes and sizes of all fields, gathered over samples."""

    def __init__(self, path: str, first: list[Leaf]) -> None:
        self._path = path
        self._kinds = {name: kind for name, kind, _, _ in first}
        self._shapes: dict[str, list[int | None]] = {
            name: list(shape) for name, _, shape, _ in first
        }

    def add(self, sample: int, flat: list[Leaf]) -> None:
        names = [name for name, _, _, _ in flat]
        if names != list(self._kinds):
            raise UsageError(
                f"{self._path}[{sample}] has the fields {', '.join(names)}, the first sample "
                f"{', '.join(self._kinds)}: make them alike"
            )
        for name, kind, shape, _ in flat:
            known = self._shapes[name]
            if kind != self._kinds[name] or len(shape) != len(known):
                raise UsageError(
                    f"{self._path}[{sample}]: field {name!r} is {kind}{list(shape)}, in others "
                    f"{self._kinds[name]}{known}: make them alike"
                )
            known[:] = [a if a == b else None for a, b in zip(known, shape, strict=True)]

    def schema(self) -> Schema:
        """Return the schema; if one field's size varies, so may the dimensions of all arrays,
        because few samples were seen."""
        plain = ("text", "bytes", "png")
        varies = any(
            kind in plain or None in self._shapes[name] for name, kind in self._kinds.items()
        )
        fields = []
        for name, kind in self._kinds.items():
            shape = [None if varies else size for size in self._shapes[name]]
            fields.append((name, kind if kind in plain else array_kind(kind, shape)))
        return Schema(tuple(fields), structure_of(list(self._kinds)))


def _stops_the_program(error: BaseException) -> bool:
    """True for SystemExit, Ctrl-C and their like in the main thread. In other threads they would
    end only the thread, and whoever waits for its samples would wait on."""
    is_main = threading.current_thread() is threading.main_thread()
    return is_main and not isinstance(error, Exception)


def _takes_several(data: Any) -> bool:
    """True for a data set with `__getitems__` of its own; that of torch's Subset only loops."""
    if (type(data).__module__.split(".")[0], type(data).__name__) == ("torch", "Subset"):
        return _takes_several(data.dataset)
    return callable(getattr(data, "__getitems__", None))


def _layout(count: int, size: int) -> Layout:
    return shuffled_layout(np.broadcast_to(np.int64(size), count))


def _mean(sizes: list[int]) -> int:
    """Estimate the mean size of all samples, rather too high than too low."""
    error = 2 * float(np.std(sizes)) / float(np.sqrt(len(sizes)))
    return max(1, round(float(np.mean(sizes)) + error))


def _class_names(data: Any) -> list[str]:
    names = getattr(data, "classes", None)
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        return []
    return list(names)
