"""The reader of WebDataset tars: random access through an index, without extracting members.

A sample is a run of members whose base names agree up to the first dot; the rest of the base name,
in lower case, is the field. As by WebDataset, members called `__x__`, or below a folder called so,
are ignored; those whose names begin with a dot, as macOS adds them, are, too. `dlio pack` writes
`__dlio__/schema.json`, which gives exact kinds and classes. Links are the files of the same tar
that they name.

Tars may be compressed as LZ4 frames (`.tar.lz4`). With independent blocks (`lz4 -BI`, the default
of the tool), only the blocks of a sample are decompressed. Frames with linked blocks do not support
random access and are refused.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, lru_cache, partial
from operator import add
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from dlio.data.index import Arrays, cached_index, let_go
from dlio.data.index_memory import GrowingColumn, GrowingNames, new_column, repeated
from dlio.data.labels import (
    LABEL_NAMES,
    MAX_CLASSES,
    TAR_LABEL_NAMES,
    check_label,
    encode_labels,
    field_named,
    label_name,
    label_names,
    not_scalar,
    with_label,
)
from dlio.data.npy import NpyHead, read_npy_head
from dlio.data.open_files import PersistentFile, open_file
from dlio.data.reader_contract import (
    PART,
    Abilities,
    FileLocations,
    PathRules,
    locate_in_memory,
)
from dlio.data.schema import IMAGES, LABEL, Schema, array_kind
from dlio.data.source import File, files_below
from dlio.errors import CorruptBlock, SourceError, UsageError
from dlio.util.limits import parsing
from dlio.util.memory import new_memory
from dlio.util.parallel import each_of
from dlio.util.printable import log_warning, tell_once
from dlio.util.structured_text import parse_json
from dlio.util.units import counted
from dlio_readers.compressed_files import SUFFIXES as COMPRESSED
from dlio_readers.compressed_files import codec_of, in_memory
from dlio_readers.lz4_frames import Lz4Frames, frames_index
from dlio_readers.path_reader import PathReader, lie_at
from dlio_readers.tar_members import LinkTargets, TarMember, TarMembers
from dlio_readers.tarlabels import (
    BLOCK,
    TarIndex,
    TextMembers,
    label_in_json,
    merged_keys,
    number_classes,
)

_WHOLE: Final = (*(f".tar{packed}" for packed in COMPRESSED), ".tgz", ".tbz2", ".txz")
SUFFIXES: Final = (".tar", ".tar.lz4", *_WHOLE)
_KEPT_BLOCKS: Final = 64
"""Decompressed LZ4 blocks, of up to 4 MiB, that are kept of all files of a data set."""
_VERSION: Final = 5
_SCAN_THREADS: Final = 8
_LOOKED_AT: Final = 64
"""Samples of which it is seen whether they lie in folders."""
_INTEGER: Final = re.compile(r"-?[0-9]+")
_MAX_NUMBER: Final = 64
"""Most bytes of a member that holds an integer as text."""
_MAX_LABEL: Final = 1 << 12
"""Most bytes of a member that holds a label."""
_MAX_META: Final = 1 << 20
_FEW: Final = 16
"""Samples that are found one by one."""
_Members = tuple[list[int], list[int], int, int]
"""Offsets and bytes of a sample's fields; its place among those asked for, and in the file."""
_GAP: Final = 1 << 16
"""Largest gap between two members that are still read together, in bytes."""
_META: Final = "__dlio__/schema.json"
_METAS: Final = (_META, "__dlio__.json")
"""Earlier versions of `dlio pack` wrote the second one, which WebDataset takes for a sample."""
_IGNORED: Final = re.compile(r"(\./)?__[^/]*__($|/)")
_STRETCH: Final = 1 << 18
"""Samples whose numbers are made at a time."""
_KINDS: Final = {
    "jpg": "jpeg",
    "jpeg": "jpeg",
    "png": "png",
    "webp": "webp",
    "bmp": "image",
    "gif": "image",
    "tif": "image",
    "tiff": "image",
    "ppm": "image",
    "pgm": "image",
    "json": "json",
    "txt": "text",
    "text": "text",
    "caption": "text",
    "transcript": "text",
}
_NUMBERS: Final = ("cls", "cls2", "class", "count", "index", "inx", "id", "label")
_CLASSES: Final = ("label", "cls", "class")
"""Members that are classes where they are texts; other texts stay texts."""
_PICTURES: Final = frozenset(name for name, kind in _KINDS.items() if kind in IMAGES)


class TarReader(PathReader):
    """Read one or several WebDataset tars. Samples are numbered in the order of the files.

    Args:
        path: a tar, a folder of tars, a pattern with braces or globs, or a list.
        fields: fields to read; by default all fields of the first sample.
        label: the field that is the label, whatever its name; it is called `label` then.

    Raises SourceError if a tar is damaged, or if a sample lacks a field.
    """

    format = "tar"
    path_rules = PathRules(owns=lambda name: name.endswith(SUFFIXES))

    def __init__(
        self,
        path: str | Sequence[str],
        fields: Sequence[str] | None = None,
        label: str | None = None,
    ) -> None:
        opened = [each.opened_as(PersistentFile) for each in files_below(path, SUFFIXES)]
        if not opened:
            raise SourceError(f"{self.path} holds no tar")
        self._opened = opened
        self._files = [in_memory(e) if e.own_name.endswith(_WHOLE) else e for e in opened]
        chosen = tuple(field_named(each, label) for each in with_label(fields or (), label))
        about = repr((chosen, label)).encode("utf-8", "surrogateescape")
        kind = f"tar-{xxhash.xxh3_64_hexdigest(about)}" if chosen or label is not None else "tar"

        def index(file: File) -> Arrays:
            return cached_index(kind, _VERSION, [file], lambda: _build(file, chosen, label))

        parts = each_of(index, self._files, _SCAN_THREADS, self.path, may_be_long=True)
        heads = [json.loads(part["head"].tobytes()) for part in parts]
        for file, head in zip(self._files, heads, strict=True):
            for note in head["notes"]:
                log_warning("%s %s", file.name, note)
        first = heads[0]
        names = [name for name, _ in first["fields"]]
        if LABEL_NAMES[0] not in names:
            check_label(self.path, names, label)
        indexes = [
            TarIndex(part, _order_of(file.name, head, names, self._files[0].name))
            for file, part, head in zip(self._files, parts, heads, strict=True)
        ]
        kinds = [_joined(name, heads) for name in range(len(names))]
        self.schema = Schema(tuple(zip(names, kinds, strict=True)), first["structure"])
        numbers = [
            name for name in TAR_LABEL_NAMES if dict(self.schema.fields).get(name) == "int64"
        ]
        label = numbers[0] if numbers else None
        self.classes: Sequence[str] = first["classes"]
        self.classes = self.classes or number_classes(indexes, heads, names, label)
        texts = [n for n in names if n != label and any(n in head["texts"] for head in heads)]
        if texts:  # Only one field can have the classes' names.
            kinds = ["text" if n in texts else k for n, k in self.schema.fields]
            self.schema = Schema(tuple(zip(names, kinds, strict=True)), first["structure"])
        counts = np.array([len(part) for part in indexes], np.int64)
        self._firsts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self._parts, self._names = indexes, names
        if label is None:
            reasons = [head["unlabelled"] for head in heads] + [
                f"its {name} {not_scalar(self.schema.kinds[name].text)}"
                for name in label_names(names)
            ]
            self.unlabelled = next(filter(None, reasons), "") or self._without_label(indexes)
        self._label = None if label is None else names.index(label)
        merged = merged_keys(names, int(counts.sum()))
        if merged:
            tell_once(f"{self.path}: {merged}")
        kind = f"tarsizes-{xxhash.xxh3_64_hexdigest(self.schema.to_json().encode())}"
        made = cached_index(kind, _VERSION, self._files, self._sizes_of_payloads)
        self.sizes: npt.NDArray[np.int64] = made["sizes"]
        self._lay_out(_VERSION, self._files, self.sizes)
        last_blocks = lru_cache(_KEPT_BLOCKS)(Lz4Frames.block)
        self._frames = [
            Lz4Frames(file, part, last_blocks) if "frame_at" in part else None
            for file, part in zip(self._files, parts, strict=True)
        ]
        kinds = [kind for _, kind in self.schema.fields]
        self._is_apart = [head.get("apart", False) for head in heads]
        self._pictures = [k for k, kind in enumerate(kinds) if kind in IMAGES]
        self._numbers = [k for k, kind in enumerate(kinds) if kind == "int64"]
        # A member that is the picture, and a number that the index has.
        is_plain = len(self._pictures) == 1 and len(self._numbers) < 2
        is_plain &= len(kinds) == 1 + len(self._numbers)
        is_plain &= not any(part.is_array[k] for part in indexes for k in self._numbers)
        self._is_plain = is_plain
        self._is_located = is_plain and not any(self._frames)

    @property
    def abilities(self) -> Abilities:
        # Not an attribute: it would refer to the reader, which is to go with its last user.
        locate = self._locate if self._is_located else None
        return Abilities(random_access=True, locate=locate)

    def _without_label(self, indexes: Sequence[TarIndex]) -> str:
        """Return why samples have no label that may have one; "" if nothing looks like it."""
        names, count = self._names, int(self._firsts[-1])
        texts = [name for name in names if "." in name and self.schema.kinds[name].text == "text"]
        tail = next((n for n in names if n.rpartition(".")[2] in TAR_LABEL_NAMES), None)
        if tail is not None and "." in tail:
            return f"its {tail} is bytes: call it {tail.rpartition('.')[2]}"
        longer = next((name for name in texts if label_name([name.partition(".")[0]])), None)
        if longer is not None:
            return f"its {longer} is a text: call it {longer.partition('.')[0]}"
        if list(names) == ["tar"]:
            return "its members are tars themselves: extract it, and open these"
        if len(names) > 1:
            return ""
        some = np.linspace(0, count - 1, min(count, _LOOKED_AT)).astype(int)
        parts = np.searchsorted(self._firsts, some, side="right") - 1
        folders = sorted(
            {
                indexes[part].names[int(k - self._firsts[part])].rpartition("/")[0]
                for k, part in zip(some.tolist(), parts.tolist(), strict=True)
            }
        )
        if len(folders) < 2:
            return ""
        return (
            f"its samples lie in folders, such as {folders[0]} and {folders[1]}, and have nothing "
            "else: if these are classes, extract it"
        )

    @staticmethod
    def recognises(path: str) -> str | None:
        is_tar = lie_at(path, SUFFIXES, has_fields=False)
        return None if is_tar else "is neither a .tar nor a folder of them"

    @cached_property
    def labels(self) -> npt.NDArray[np.int64]:
        """Class number of each sample, shape (samples,); 0 without labels."""
        if self._label is None:
            return np.broadcast_to(np.int64(0), len(self))
        return np.concatenate([part.numbers(self._label) for part in self._parts])

    def _sizes_of_payloads(self) -> Arrays:
        sizes = new_column(int(self._firsts[-1]), np.int64)
        for part, first in zip(self._parts, self._firsts.tolist(), strict=False):
            for low in range(0, len(part), _STRETCH):
                rows = np.arange(low, min(low + _STRETCH, len(part)), dtype=np.int64)
                bodies = {name: part.bodies(k, rows) for k, name in enumerate(self._names)}
                payloads = self.schema.payload_sizes(len(rows), bodies)
                sizes[first + low : first + low + len(rows)] = payloads
                let_go(sizes)
        return {"sizes": sizes}

    def name(self, sample: int) -> str:
        file = int(np.searchsorted(self._firsts, sample, side="right")) - 1
        return self._parts[file].names[sample - int(self._firsts[file])]

    def read(self, samples: npt.NDArray[np.int64]) -> list[bytes | memoryview]:
        payloads: list[bytes | memoryview] = [b""] * len(samples)
        for number, members in self._members_of(samples).items():
            self._read_file(number, members, payloads)
        return payloads

    def close(self) -> None:
        for file in self._opened:
            file.close()

    def _locate(self, samples: npt.NDArray[np.int64], _: object, __: object) -> FileLocations:
        """Return where samples lie in local tars; see `Abilities.locate`."""
        count, has_number = len(samples), len(self._numbers)
        parts, known = np.zeros((count, 1 + has_number), PART), np.zeros(count, np.bool_)
        numbers = np.zeros(count, np.int64)
        holders: list[object] = [numbers]
        picture = parts[:, -1]
        files = np.searchsorted(self._firsts, samples, side="right") - 1
        for file in np.unique(files).tolist():
            holder = open_file(self._files[file])
            if holder is None:
                continue
            holders.append(holder)
            here = np.flatnonzero(files == file)
            rows, part = samples[here] - self._firsts[file], self._parts[file]
            begins, sizes = part.places(rows)
            known[here], picture["descriptor"][here] = True, holder.number
            (k,) = self._pictures
            picture["offset"][here], picture["bytes"][here] = begins[:, k], sizes[:, k]
            for k in self._numbers:
                numbers[here] = part.numbers_at(k, rows)
        if has_number:
            locate_in_memory(parts[:, 0], numbers)
        return FileLocations.of_parts(known, parts, holders)

    def _members_of(self, samples: npt.NDArray[np.int64]) -> dict[int, list[_Members]]:
        """Return where the fields of samples lie, by the numbers of their files."""
        members: dict[int, list[_Members]] = {}
        files = np.searchsorted(self._firsts, samples, side="right") - 1
        rows = samples - self._firsts[files]
        if len(samples) < _FEW:  # Arrays would take longer.
            places = zip(files.tolist(), rows.tolist(), strict=True)
            for slot, (number, row) in enumerate(places):
                begins, sizes = self._parts[number].place(row)
                members.setdefault(number, []).append((begins, sizes, slot, row))
            return members
        for number in np.unique(files).tolist():
            slots = np.flatnonzero(files == number)
            columns = (*self._parts[number].places(rows[slots]), slots, rows[slots])
            members[number] = list(zip(*(each.tolist() for each in columns), strict=True))
        return members

    def _read_file(
        self, number: int, members: list[_Members], payloads: list[bytes | memoryview]
    ) -> None:
        """Read samples of one file; near ones together."""
        if self._is_apart[number]:
            self._read_apart(number, members, payloads)
            return
        spans = [
            (min(begins), max(map(add, begins, sizes)), k)
            for k, (begins, sizes, _, _) in enumerate(members)
        ]
        for low, high, near in _together(spans):
            memory = self._bytes_of(number, low, high)
            for k in near:
                begins, sizes, slot, row = members[k]
                bodies = [memory[a - low : a - low + n] for a, n in zip(begins, sizes, strict=True)]
                payloads[slot] = self._payload(number, row, bodies)

    def _read_apart(
        self, number: int, members: list[_Members], payloads: list[bytes | memoryview]
    ) -> None:
        """Read samples of a file in which the members of a sample lie apart."""
        is_array, count = self._parts[number].is_array, len(self._names)
        # Numbers are in the index.
        stored = [f for f in range(count) if is_array[f] or f not in self._numbers]
        places = [(k, f) for k in range(len(members)) for f in stored]
        spans = []
        for place, (k, f) in enumerate(places):
            begin, size = members[k][0][f], members[k][1][f]
            spans.append((begin, begin + size, place))
        bodies = [[memoryview(b"")] * count for _ in members]
        for low, high, near in _together(spans):
            memory = self._bytes_of(number, low, high)
            for place in near:
                (k, f), (begin, end, _) = places[place], spans[place]
                bodies[k][f] = memory[begin - low : end - low]
        for (_, _, slot, row), own in zip(members, bodies, strict=True):
            payloads[slot] = self._payload(number, row, own)

    def _bytes_of(self, number: int, low: int, high: int) -> memoryview:
        """Return bytes of a file, as they are in the tar. Raises SourceError."""
        memory = new_memory(high - low)
        frame = self._frames[number]
        if frame is None:
            self._files[number].read_into(low, memory)
        else:
            frame.read_into(low, memory)
        return memory

    def _payload(self, number: int, row: int, bodies: Sequence[memoryview]) -> bytes | memoryview:
        """Return the payload of a sample out of the members that its fields are."""
        part = self._parts[number]
        if self._is_plain:
            labels = [LABEL.pack(part.number(k, row)) for k in self._numbers]
            return b"".join((*labels, bodies[self._pictures[0]]))
        values: dict[str, Any] = {}
        for k, (name, _) in enumerate(self.schema.fields):
            kind = self.schema.kinds[name]
            if kind.text == "int64" and not part.is_array[k]:
                values[name] = part.number(k, row)
            elif kind.dtype is not None:
                try:
                    values[name] = read_npy_head(bodies[k]).array(bodies[k])
                except (CorruptBlock, ValueError) as error:
                    raise SourceError(
                        f"{self._files[number].name}, sample {part.names[row]!r}, {name}: {error}"
                    ) from error
            else:
                values[name] = bodies[k]
        with parsing(lambda: f"{self._files[number].name}, sample {part.names[row]!r},"):
            return self.schema.join(values)


def _together(
    spans: Sequence[tuple[int, int, int]],
) -> Iterator[tuple[int, int, list[int]]]:
    """Yield (begin, end, numbers) of spans near each other, out of (begin, end, number)."""
    near: list[int] = []
    low = high = 0
    for begin, end, k in sorted(spans):
        if near and begin > high + _GAP:
            yield low, high, near
            near = []
        if not near:
            low, high = begin, end
        near.append(k)
        high = max(high, end)
    if near:
        yield low, high, near


def _order_of(file: str, head: dict[str, Any], names: Sequence[str], first: str) -> list[int]:
    """Return the places of the first tar's fields, `names`, among those of a tar; its head gets
    them in that order.

    Raises SourceError if it has other fields; pictures of other formats are the same field.
    """
    own = dict(map(tuple, head["fields"]))
    places = list(own)
    order = []
    for name in names:
        match = name if name in own else _stand_in(name, own, names)
        if match is not None:
            order.append(places.index(match))
    if len(order) != len(names) or len(places) != len(names):
        raise SourceError(
            f"{file}: its samples have {', '.join(own)}, those of {first} {', '.join(names)}: "
            "choose common fields with fields="
        )
    head["fields"] = [[name, own[places[k]]] for name, k in zip(names, order, strict=True)]
    return order


def _stand_in(field: str, here: Iterable[str], fields: Sequence[str]) -> str | None:
    """Return the picture of another format that a sample, which has the fields `here`, has in place
    of `field`; None without one, or with several."""
    prefix, dot, last = field.rpartition(".")
    if last not in _PICTURES:
        return None
    others = [
        each
        for each in here
        if each not in fields
        and each.rpartition(".")[:2] == (prefix, dot)
        and each.rpartition(".")[2] in _PICTURES
    ]
    return others[0] if len(others) == 1 else None


def _joined(k: int, heads: Sequence[dict[str, Any]]) -> str:
    """Kind of field number k over all files; dimensions that differ become `?`."""
    kinds = {head["fields"][k][1] for head in heads}
    if len(kinds) == 1:
        return str(kinds.pop())
    if kinds <= set(IMAGES):
        return "image"
    if kinds == {"int64", "text"}:
        return "text"
    names = {kind.partition("[")[0] for kind in kinds}
    shapes = [kind.partition("[")[2].rstrip("]").split(",") for kind in kinds]
    if len(names) > 1 or len({len(shape) for shape in shapes}) > 1:
        raise SourceError(
            f"the tars disagree on a field: it is {' and '.join(sorted(kinds))}; choose others "
            "with fields="
        )
    sizes = [s[0] if len(set(s)) == 1 else "?" for s in zip(*shapes, strict=True)]
    return f"{names.pop()}[{','.join(sizes)}]"


def _build(file: File, fields: tuple[str, ...], label: str | None) -> Arrays:
    """Index one tar: offset and size of each field of each sample."""
    extra: Arrays = {}
    size, read = file.size, file.read
    if file.own_name.endswith(".lz4"):
        extra = frames_index(file)
        frames = Lz4Frames(file, extra, lru_cache(_KEPT_BLOCKS)(Lz4Frames.block))
        size = frames.size

        def read(offset: int = 0, count: int | None = None) -> bytes:
            memory = bytearray(count or 0)
            frames.read_into(offset, memoryview(memory))
            return bytes(memory)

    elif codec := codec_of(read(0, 6)):
        name = f"{file.name} is compressed by {codec}"
        raise SourceError(f"{name}: give it a name that says so, such as x.tar.gz")
    walk = partial(TarMembers, size, read, file.name)
    own = file.name, fields, label
    try:
        return {**_filled(_Builder(*own), walk), **extra}
    except _WrongSample:
        pass
    try:
        return {**_filled(_ApartBuilder(*own), walk), **extra}
    except _WrongSample as error:
        builder = _ApartBuilder(*own, has_folders=False)
        try:
            return {**_filled(builder, walk), **extra}
        except _WrongSample as joined:
            raise SourceError(str(joined if builder.has_parts else error)) from None


def _filled(builder: "_Builder", walk: Callable[[], TarMembers]) -> Arrays:
    """Return the index of a tar out of its members. Raises SourceError."""
    targets: LinkTargets | None = None
    members = walk()
    for each in members:
        member: TarMember | None = each
        if each.target is not None and is_part(each.name):
            # The tar is walked again only if it has links.
            targets = targets or LinkTargets(walk(), builder.file)
            member = targets.resolve(each)
        if member is not None:
            builder.add(each.name, member.at, member.size, members)
    return builder.arrays(members.note)


def is_part(name: str) -> bool:
    """True for the name of a member that is a part of a sample."""
    last = name.rpartition("/")[2]
    return _IGNORED.match(name) is None and not last.startswith(".") and "." in last


class _WrongSample(SourceError):
    """Members that are next to each other do not make up a sample like the others."""


_Member = tuple[int, int, int | str | None, NpyHead | None]
"""Offset, bytes, the number or text of a label, and the head of an array."""


class _Builder:
    """Group members into samples, of which each is a run of members."""

    is_apart = False

    def __init__(self, file: str, fields: tuple[str, ...], label: str | None) -> None:
        self.file, self._label = file, label
        """The field that the user chose as the label."""
        self._fields = list(fields)
        self._chosen = bool(fields)
        self._packed: dict[str, Any] = {}
        self._key = ""
        self._sample: dict[str, _Member] = {}
        self._names = GrowingNames()
        self._last_name = ""
        self._rises = True
        """False once a name is not after the one before it: names may come again then."""
        self._firsts = GrowingColumn()
        self._columns: list[_FieldColumns] = []
        self._shapes: dict[str, tuple[str, list[int | None]]] = {}
        self._texts: dict[str, TextMembers] = {}
        self._mixed: set[str] = set()
        """Fields that are pictures of several formats."""
        self._left: Counter[str] = Counter()
        """Members that the first sample lacks, of samples."""
        self._in_json = ""
        """Which value of the first sample's JSON may be a label, in words."""

    def add(self, name: str, at: int, size: int, members: TarMembers) -> None:
        folder, slash, last = name.rpartition("/")
        if name.endswith(_METAS) and size <= _MAX_META:
            self._packed = _meta(members.bytes_at(at, size), members, at)
            if self._label is not None:
                raise UsageError(f"label=: {self.file} has the label with which it was packed")
            self._fields = self._fields or [field for field, _ in self._packed["fields"]]
            return
        if not is_part(name):
            return
        stem, _, extension = last.partition(".")
        key = folder + slash + stem
        field = extension.lower()
        field = self._packed.get("members", {}).get(extension, field)
        if field == LABEL_NAMES[0] and self._label not in (None, field):
            raise UsageError(
                f"label={self._label!r}: {self.file} has a {field!r} as well, and the chosen one "
                "takes that name: rename it in the tar"
            )
        field = field_named(field, self._label)
        if key != self._key:
            self._begin(key, field)
        if field in self._sample:
            raise _WrongSample(
                f"{self.file}: sample {key!r} has two members that are {field!r}: keep one of "
                "each name, and pack the tar again"
            )
        number: int | str | None = 0
        head = None
        if self._packed and self._is_number(field, size):
            text = members.bytes_at(at, size).decode("ascii", "replace").strip()
            if _INTEGER.fullmatch(text) is None or abs(int(text)) >= 2**63:
                raise members.damaged(at, f"{name} is {text[:20]!r}, not an integer")
            number = int(text)
        elif not self._packed and field in _NUMBERS:
            number = None
            if size <= _MAX_LABEL:
                number = members.bytes_at(at, size).decode("utf-8-sig", "replace").strip()
        elif extension.lower().endswith("npy"):
            try:
                head = read_npy_head(memoryview(members.bytes_at(at, min(size, 1 << 12))), size)
            except CorruptBlock as error:
                raise members.damaged(at, f"{name}: {error}") from error
        elif field == "json" and not (self._packed or self._firsts) and size <= _MAX_META:
            self._in_json = label_in_json(members.bytes_at(at, size))
        self._sample[field] = (at, size, number, head)

    def _is_number(self, field: str, size: int) -> bool:
        kind = dict(self._packed["fields"]).get(field)
        return kind == "int64" and 0 < size <= _MAX_NUMBER and field not in self._packed["npy"]

    def _begin(self, key: str, field: str) -> None:
        """Make a sample, whose first member is a field, the one that members are added to."""
        self._finish()
        self._key = key

    def _finish(self) -> None:
        if not self._sample:
            return
        if not self._fields:
            self._fields = sorted(self._sample)
        if not self._columns:
            self._columns = [_FieldColumns() for _ in self._fields]
        row = []
        taken = set(self._fields)
        for field in self._fields:
            own: str | None = field
            if field not in self._sample:
                own = _stand_in(field, self._sample, self._fields)
                self._mixed.add(field)
            if own is None:
                raise self._incomplete(field)
            taken.add(own)
            at, size, number, head = self._sample[own]
            body = 0
            if head is not None:
                body = head.nbytes
                kind, shape = self._shapes.setdefault(field, (head.dtype, list(head.shape)))
                if kind != head.dtype or len(shape) != len(head.shape):
                    raise SourceError(
                        f"{self.file}: sample {self._key!r}, {field}: is {head.dtype}"
                        f"{list(head.shape)}, in others {kind}{shape}"
                    )
                shape[:] = [a if a == b else None for a, b in zip(shape, head.shape, strict=True)]
            if not isinstance(number, int):
                if field not in self._texts:
                    self._texts[field] = TextMembers()
                self._texts[field].add(number)
                number = 0
            row.append((at, size, number, body))
        first = min(at for at, *_ in row)
        self._firsts.append(first // BLOCK)
        for columns, (at, size, number, body) in zip(self._columns, row, strict=True):
            columns.shift.append((at - first) // BLOCK)
            columns.size.append(size)
            columns.number.append(number)
            columns.body.append(body)
        self._left.update(self._sample.keys() - taken)
        self._rises &= self._last_name < self._key
        self._last_name = self._key
        self._names.add(self._key)
        self._sample = {}

    def _name(self, sample: int) -> str:
        return self._names.names()[sample]

    def _incomplete(self, field: str) -> SourceError:
        what = f"{self.file}: sample {self._key!r} has no {field}"
        if self._chosen:
            return _WrongSample(
                f"{what}, it has {', '.join(sorted(self._sample))}: complete or remove it, or "
                "choose other fields with fields="
            )
        return _WrongSample(
            f"{what}, which others have: complete or remove it, or choose common fields with "
            "fields="
        )

    def _notes(self, note: str) -> list[str]:
        """Return what a user should know. Raises SourceError if only the first sample lacks it."""
        notes = [note] if note else []
        for field, count in self._left.items() if not self._chosen and not self._packed else ():
            if 2 * count > len(self._firsts):
                raise _WrongSample(
                    f"{self.file}: sample {self._name(0)!r} has no {field}, which {count} others "
                    "have: complete or remove it, or choose common fields with fields="
                )
            notes.append(
                f"has {field} in {count} of its {counted(len(self._firsts), 'sample')}, and not in "
                "the first: it is left out"
            )
        return notes

    def _repeated(self) -> list[str]:
        """Return the words about names that several samples have, as of members that were added to
        a tar again; [] without any."""
        if self._rises:
            return []
        names = self._names.names()
        again, first = repeated(names)
        if not again:
            return []
        return [
            f"has several samples called {first!r}, and {again} of "
            f"{counted(len(names), 'name')} were there before: each is a sample of its own, "
            "though tar extracts the last alone"
        ]

    def _encoded(self, field: str) -> tuple[str, list[str]]:
        """Number the texts of a field; return (its kind, texts of its classes)."""
        own, columns = self._texts[field], self._columns[self._fields.index(field)]
        if own.numbers is not None:
            columns.number = own.numbers
            return "int64", []
        encoding = encode_labels(own.texts)
        classes = list(own.texts) if encoding.classes or not encoding.numbers else []
        gaps = set() if own.plain else {own.texts[text] for text in encoding.missing}
        codes = own.codes.spread()
        missing = int(next(iter(np.flatnonzero(np.isin(codes, list(gaps)))), -1)) if gaps else -1
        if missing >= 0 and (field in _CLASSES or not classes):
            raise SourceError(
                f"{self.file}: sample {self._name(missing)!r}: its {field} is empty: fill it, or "
                "remove the sample, or choose other fields with fields="
            )
        if own.plain or (classes and (field not in _CLASSES or len(classes) > MAX_CLASSES)):
            return "text", []
        numbers = np.arange(len(own.texts), dtype=np.int64)
        label = next((name for name in TAR_LABEL_NAMES if name in self._fields), None)
        if not classes and field == label and field in _CLASSES and len(own.texts) <= MAX_CLASSES:
            # Numbers written as 2.0 are the names of classes if another tar has other names.
            plain = all(text.strip() == str(number) for text, number in encoding.numbers.items())
            classes = [] if plain else list(own.texts)
        if not classes:
            numbers = np.array([encoding.numbers[text] for text in own.texts], np.int64)
        columns.number = GrowingColumn(signed=True)
        for at in range(0, len(codes), _STRETCH):
            columns.number.extend(numbers[codes[at : at + _STRETCH]])
        return "int64", classes

    def arrays(self, note: str) -> Arrays:
        self._finish()
        if not self._firsts:
            raise SourceError(f"{self.file} holds no samples: members are named key.extension")
        packed = dict(self._packed.get("fields", []))
        kinds = []
        texts = {}
        for field in self._fields:
            if field in packed:
                kinds.append((field, packed[field]))
            elif field in self._shapes:
                dtype, shape = self._shapes[field]
                kinds.append((field, array_kind(dtype, shape)))
            elif field in self._texts:
                kind, own = self._encoded(field)
                kinds.append((field, kind))
                if own:
                    texts[field] = own
            else:
                kind = _KINDS.get(field.rpartition(".")[2], "bytes")
                kinds.append((field, "image" if field in self._mixed else kind))
        head = {
            "fields": kinds,
            "texts": texts,
            "notes": [*self._notes(note), *self._repeated()],
            "unlabelled": self._in_json,
            "apart": self.is_apart,
            "classes": self._packed.get("classes", []),
            "structure": self._packed.get("structure") if len(kinds) == len(packed) else None,
        }
        names = self._names.names()
        arrays: Arrays = {
            "head": np.frombuffer(json.dumps(head).encode(), np.uint8),
            "first": self._firsts.spread(),
            "npy": np.array([field in self._shapes for field in self._fields]),
            "names": names.blob,
            "name_ends": names.ends,
        }
        for k, (field, columns) in enumerate(zip(self._fields, self._columns, strict=True)):
            arrays[f"shift{k}"], arrays[f"size{k}"] = columns.shift.values(), columns.size.values()
            arrays[f"number{k}"] = columns.number.values()
            if field in self._shapes:
                arrays[f"body{k}"] = columns.body.values()
        return arrays


class _ApartBuilder(_Builder):
    """Group the members of all of a tar, for tars in which those of a sample lie apart: pictures
    and then labels. Without folders, those of `images` and `labels` with the same name are one."""

    is_apart = True

    def __init__(
        self, file: str, fields: tuple[str, ...], label: str | None, has_folders: bool = True
    ) -> None:
        super().__init__(file, fields, label)
        self._samples: dict[str, dict[str, _Member]] = {}
        self._has_folders = has_folders
        self._folder_of: dict[str, str] = {}
        """By field, the folder in which it lies."""

    @property
    def has_parts(self) -> bool:
        """True if each field lies in one folder, and not all in the same one."""
        return len(set(self._folder_of.values())) > 1

    def _begin(self, key: str, field: str) -> None:
        self._key = key
        if not self._has_folders:
            folder, _, name = key.rpartition("/")
            above, _, last = folder.rpartition("/")
            if self._folder_of.setdefault(field, last) != last:
                self._folder_of.clear()
                raise _WrongSample(key)
            key = f"{above}/{name}" if above else name
        self._sample = self._samples.setdefault(key, {})

    def _notes(self, note: str) -> list[str]:
        parts = "in folders of their own" if self._folder_of else "apart"
        return [
            *super()._notes(note),
            f"has the members of its samples {parts}, and they are joined by name; the package "
            "webdataset makes a sample of each part: dlio pack writes them together",
        ]

    def arrays(self, note: str) -> Arrays:
        for key, sample in self._samples.items():
            self._key, self._sample = key, sample
            self._finish()
        return super().arrays(note)


class _FieldColumns:
    """One field of the samples of a tar that is being indexed."""

    def __init__(self) -> None:
        self.shift = GrowingColumn()
        """Blocks from the sample's first member."""
        self.size = GrowingColumn()
        self.number = GrowingColumn(signed=True)
        self.body = GrowingColumn()
        """Bytes of an array's data; of other fields 0."""


def _meta(data: bytes, members: TarMembers, at: int) -> dict[str, Any]:
    """Parse the metadata that `dlio pack` writes: schema, classes, members of each field."""
    try:
        packed = parse_json(data, _META)
        schema = Schema.from_rows(packed["schema"])
        return {
            "fields": [list(row) for row in schema.fields],
            "structure": schema.structure,
            "classes": [str(name) for name in packed["classes"]],
            "members": {str(key): str(value) for key, value in packed["members"].items()},
            "npy": [str(name) for name in packed["npy"]],
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, CorruptBlock):
        raise members.damaged(at, f"{_META} is invalid") from None
