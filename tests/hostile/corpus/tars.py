"""WebDataset tars, compressed or not."""

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import lz4.frame
import numpy as np

from tests.hostile.corpus.case import ANY, RIGHT, Ask, Case, Cases, Make
from tests.hostile.corpus.mutate import VALUES, damaged, special_files

_META = {
    "schema": [["jpg", "jpeg"], ["label", "int64"], ["x", "float32[3]"]],
    "classes": ["a", "b"],
    "members": {"jpg": "jpg", "cls": "label", "x.npy": "x"},
    "npy": ["x"],
}


def members(meta: object = None) -> bytes:
    memory = io.BytesIO()
    array = io.BytesIO()
    np.save(array, np.arange(3, dtype=np.float32))
    with tarfile.open(fileobj=memory, mode="w", format=tarfile.PAX_FORMAT) as archive:
        rows = [("__dlio__/schema.json", json.dumps(meta).encode())] if meta is not None else []
        for k in range(10):
            name = f"{'deep/' * 30 if k == 3 else ''}{k:03d}"
            rows += [(f"{name}.jpg", b"\xff\xd8\xff" + bytes(k))]
            rows += [(f"{name}.cls", str(k).encode()), (f"{name}.x.npy", array.getvalue())]
        for name, data in rows:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return memory.getvalue()


def _written(data: bytes, name: str = "a.tar") -> Make:
    def make(folder: Path) -> Ask:
        (folder / name).write_bytes(data)
        return Ask("reader", str(folder / name))

    return make


sound = _written(members())
packed = _written(members(_META))
compressed = _written(lz4.frame.compress(members(), block_size=4, block_linked=False), "a.tar.lz4")


def _in_folder(folder: Path) -> Ask:
    (folder / "data").mkdir()
    (folder / "data" / "a.tar").write_bytes(members())
    return Ask("reader", str(folder / "data"))


def _header(change: Callable[[bytearray], object], member: int = 0) -> Make:
    """Change a member's header, and make its checksum right again."""
    data = bytearray(members())
    at = 0
    for _ in range(member):
        size = int(data[at + 124 : at + 135], 8)
        at += 512 + -(-size // 512) * 512
    head = data[at : at + 512]
    change(head)
    head[148:156] = b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)
    data[at : at + 512] = head
    return _written(bytes(data))


def _size(field: bytes, member: int = 0) -> Make:
    return _header(lambda head: head.__setitem__(slice(124, 136), field.ljust(12, b"\0")), member)


def _pax(records: bytes) -> Make:
    """A tar that begins with an extended header of any contents."""
    info = tarfile.TarInfo("x")
    info.type, info.size = b"x", len(records)
    head = info.tobuf(tarfile.USTAR_FORMAT)
    return _written(head + records + bytes(-len(records) % 512) + members())


def _record(key: bytes, value: bytes) -> bytes:
    size = len(key) + len(value) + 3
    size += len(str(size + len(str(size))))
    return b"%d %s=%s\n" % (size, key, value)


def _one(name: str, data: bytes, more: bytes = b"") -> Make:
    memory = io.BytesIO()
    with tarfile.open(fileobj=memory, mode="w") as archive:
        for each, content in ((name, data), ("b.jpg", b"x")):
            info = tarfile.TarInfo(each)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return _written(memory.getvalue() + more)


def _bomb(folder: Path) -> Ask:
    bomb = lz4.frame.compress(bytes(600 << 20), block_size=7, block_linked=False)
    return _written(bomb, "a.tar.lz4")(folder)


def _meta(change: Callable[[dict[str, object]], object]) -> Make:
    meta = json.loads(json.dumps(_META))
    change(meta)
    return _written(members(meta))


def cases() -> Cases:
    """Return the cases of this format."""
    yield Case("tar/sound", sound, RIGHT, "10 samples")
    yield Case("tar/sound-packed", packed, RIGHT, "10 samples")
    yield Case("tar/sound-lz4", compressed, RIGHT, "10 samples")
    yield from special_files("tar", sound, "a.tar", but=("outside", "sparse"))
    yield from special_files("tar-folder", _in_folder, "data/a.tar", but=("sparse",))
    yield from special_files("tar-lz4", compressed, "a.tar.lz4", but=("outside",))
    yield from damaged("tar", sound, "a.tar", 18)
    yield from damaged("tar-packed", packed, "a.tar", 12)
    yield from damaged("tar-lz4", compressed, "a.tar.lz4", 18)
    sizes = {
        "negative": b"-0000001000",
        "minus-512": b"-1000",
        "minus-zero": b"-0",
        "plus": b"+0000000003",
        "underscore": b"0_3",
        "prefix": b"0o3",
        "spaces": b"  3",
        "letters": b"abc",
        "huge": b"77777777777",
        "base256-huge": b"\x80" + b"\x7f" * 11,
        "base256-negative": b"\xff" * 11 + b"\xf0",
        "base256-zero": b"\x80" + bytes(11),
        "arabic": "٣".encode(),
        "empty": b"",
    }
    for name, field in sizes.items():
        for member in (0, 4):
            yield Case(f"tar/size-{name}-{member}", _size(field, member), ANY)
    for name in ("negative", "minus-512", "minus-zero", "plus", "underscore", "prefix"):
        yield Case(f"tar/size-{name}-refused", _size(sizes[name], 4))
    kinds = {"link": b"1", "symlink": b"2", "device": b"3", "fifo": b"6", "sparse": b"S"}
    for name, kind in {**kinds, "long-name": b"L", "long-link": b"K", "global": b"g"}.items():

        def typed(head: bytearray, kind: bytes = kind) -> None:
            head[156:157] = kind

        yield Case(f"tar/kind-{name}", _header(typed), ANY)
    for name, records in {
        "size-digits": _record(b"size", b"9" * 6000),
        "size-negative": _record(b"size", b"-5"),
        "size-superscript": _record(b"size", "²".encode()),
        "size-huge": _record(b"size", str(2**70).encode()),
        "size-zero": _record(b"size", b"0"),
        "path-escapes": _record(b"path", b"\x1b[31m\n.jpg"),
        "path-outside": _record(b"path", b"../../../etc/passwd.jpg"),
        "path-nul": _record(b"path", b"a\0b.jpg"),
        "length-zero": b"0 a=b\n",
        "length-long": b"999999 a=b\n",
        "length-negative": b"-5 a=b\n",
        "no-space": b"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
        "no-equals": b"6 abc\n",
        "sparse": _record(b"GNU.sparse.major", b"1"),
        "large": b"x" * 70_000,
    }.items():
        yield Case(f"tar/pax-{name}", _pax(records), ANY)
    numbers = {
        "minus": b"--5",
        "superscript": "²".encode(),
        "underscore": b"1_0",
        "empty": b"",
        "nul": b"\0" * 5,
        "huge": b"9" * 60,
        "text": b"cat",
        "minus-only": b"-",
        "minus-within": b"5-5",
    }
    for name, text in numbers.items():
        yield Case(f"tar/number-{name}", _one("a.cls", text))
    for name, data in {
        "empty": b"",
        "objects": b"\x93NUMPY\x01\x00\x40\x00"
        + b"{'descr': '|O', 'fortran_order': False, 'shape': (3,)}".ljust(64),
        "huge": b"\x93NUMPY\x01\x00\x50\x00"
        + b"{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000, 0)}".ljust(80),
        "cut": b"\x93NUMPY\x01",
    }.items():
        yield Case(f"tar/npy-{name}", _one("a.npy", data))
    for k, value in enumerate(VALUES):
        for key in _META:
            replaced = _meta(lambda meta, key=key, v=value: meta.__setitem__(key, v))  # type: ignore[misc]
            yield Case(f"tar/meta-{key}-{k}", replaced, ANY)
    for name, schema in {
        "other-kinds": [["jpg", "int64"], ["label", "jpeg"], ["x", "float32[3]"]],
        "other-shape": [["jpg", "jpeg"], ["label", "int64"], ["x", "float32[4]"]],
        "other-type": [["jpg", "jpeg"], ["label", "int64"], ["x", "float64[3]"]],
        "array-of-bytes": [["jpg", "uint8[3]"], ["label", "int64"], ["x", "bytes"]],
        "huge-shape": [["jpg", "jpeg"], ["label", "int64"], ["x", "float32[99999999999]"]],
        "more-fields": [["jpg", "jpeg"], ["label", "int64"], ["z", "int64"]],
    }.items():
        replaced = _meta(lambda meta, s=schema: meta.__setitem__("schema", s))  # type: ignore[misc]
        yield Case(f"tar/schema-{name}", replaced)
    linked = lz4.frame.compress(members() * 5, block_size=4, block_linked=True)
    yield Case("tar-lz4/linked", _written(linked, "a.tar.lz4"))
    yield Case("tar-lz4/bomb", _bomb)
    blocks = bytearray(lz4.frame.compress(b"x", block_size=4, block_linked=False)[:7])
    tiny = bytes(blocks) + b"\x01\x00\x00\x80x" * 30_000 + bytes(4)
    yield Case("tar-lz4/tiny-blocks", _written(tiny, "a.tar.lz4"))
    empty = bytes(blocks) + b"\x01\x00\x00\x00\x00" * 30_000 + bytes(4)
    yield Case("tar-lz4/empty-blocks", _written(empty, "a.tar.lz4"))
    head = tarfile.TarInfo("d")
    head.type = tarfile.DIRTYPE
    folders = head.tobuf(tarfile.USTAR_FORMAT) * 50_000
    yield Case("tar/many-folders", _written(folders + members()), RIGHT, "10 samples")
