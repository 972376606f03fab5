"""NumPy files and text tables."""

import io
import struct
import zipfile
import zlib
from pathlib import Path

import numpy as np

from tests.hostile.corpus.case import ANY, ERROR, RIGHT, Ask, Case, Cases, Make
from tests.hostile.corpus.mutate import damaged, special_files


def npy(folder: Path) -> Ask:
    """Ten rows of three numbers."""
    np.save(folder / "a.npy", np.arange(30, dtype=np.float32).reshape(10, 3))
    return Ask("reader", str(folder / "a.npy"))


def npz(folder: Path) -> Ask:
    """Two arrays, one of them compressed."""
    np.savez_compressed(folder / "a.npz", x=np.arange(30.0).reshape(10, 3), label=np.arange(10))
    return Ask("reader", str(folder / "a.npz"))


def table(folder: Path) -> Ask:
    """A table of ten rows."""
    rows = "".join(f"{k}.5,name {k},{k % 3}\n" for k in range(10))
    (folder / "a.csv").write_text("x,words,label\n" + rows)
    return Ask("reader", str(folder / "a.csv"))


def _head(text: str, data: bytes = bytes(120)) -> Make:
    def make(folder: Path) -> Ask:
        head = text.encode("latin-1")
        raw = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head + data
        (folder / "a.npy").write_bytes(raw)
        return Ask("reader", str(folder / "a.npy"))

    return make


def _shape(shape: str, descr: str = "'<f4'") -> Make:
    return _head(f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n")


def _csv(text: str | bytes, name: str = "a.csv") -> Make:
    def make(folder: Path) -> Ask:
        (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)
        return Ask("reader", str(folder / name))

    return make


def _npy_bytes(count: int) -> bytes:
    memory = io.BytesIO()
    np.save(memory, np.zeros(count, np.uint8))
    return memory.getvalue()


def _deflated_bomb(folder: Path) -> Ask:
    """A member of 2 GiB of zeros, which are 2 MB in the file."""
    head = bytearray(_npy_bytes(0)[:128])
    text = head[10:].decode().replace("(0,)", f"({2 << 30},)")[:118]
    head[10:] = text.encode()
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    with zipfile.ZipFile(folder / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        info = zipfile.ZipInfo("x.npy")
        archive.writestr(info, b"")
    packed = packer.compress(bytes(head)) + packer.flush(zlib.Z_FULL_FLUSH)
    zeros = packer.compress(bytes(16 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)
    packed += zeros * 128 + packer.flush()
    size = len(head) + (2 << 30)
    name = b"x.npy"
    local = struct.pack("<4s5H3I2H", b"PK\3\4", 20, 0, 8, 0, 0, 0, len(packed), size, 5, 0) + name
    central = struct.pack(
        "<4s6H3I5H2I",
        *(b"PK\1\2", 20, 20, 0, 8, 0, 0, 0, len(packed), size, 5, 0, 0, 0, 0, 0, 0),
    )
    start = len(local) + len(packed)
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 1, 1, len(central) + 5, start, 0)
    (folder / "a.npz").write_bytes(local + packed + central + name + end)
    return Ask("reader", str(folder / "a.npz"))


def _understated(folder: Path) -> Ask:
    """A member that says 1,000 bytes, and decompresses to 64 MiB."""
    with zipfile.ZipFile(folder / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", _npy_bytes(64 << 20))
    data = (folder / "a.npz").read_bytes()
    size = struct.pack("<I", len(_npy_bytes(64 << 20)))
    (folder / "a.npz").write_bytes(data.replace(size, struct.pack("<I", 1000)))
    return Ask("reader", str(folder / "a.npz"))


def _many_members(folder: Path) -> Ask:
    with zipfile.ZipFile(folder / "a.npz", "w") as archive:
        for k in range(3000):
            archive.writestr(f"{k}.npy", _npy_bytes(3))
    return Ask("reader", str(folder / "a.npz"))


def _objects(folder: Path) -> Ask:
    np.save(folder / "a.npy", np.array([{}, []], object), allow_pickle=True)
    return Ask("reader", str(folder / "a.npy"))


def _member_names(folder: Path) -> Ask:
    with zipfile.ZipFile(folder / "a.npz", "w") as archive:
        for name in ("../../x.npy", "/y.npy", "\x1b[31mz.npy"):
            archive.writestr(name, _npy_bytes(3))
    return Ask("reader", str(folder / "a.npz"))


def cases() -> Cases:
    """Return the cases of these formats."""
    for name, sound, file in (
        ("npy", npy, "a.npy"),
        ("npz", npz, "a.npz"),
        ("csv", table, "a.csv"),
    ):
        yield Case(f"{name}/sound", sound, RIGHT, "10 samples")
        yield from special_files(name, sound, file, but=("outside",))
        yield from damaged(name, sound, file, 12)
    shapes = {
        "huge": "(1000000000,)",
        "huge-empty": "(1000000000, 0)",
        "huge-empty-2": "(281474976710655, 0, 3)",
        "overflow": "(4294967296, 4294967296, 4294967296)",
        "negative": "(-1,)",
        "none": "()",
        "zero": "(0, 3)",
        "many": "(" + "1," * 60 + ")",
        "empty-rows": "(10, 0)",
        "floats": "(1.5,)",
        "digits": "(" + "9" * 5000 + ",)",
        "text": "'abc'",
        "code": "(__import__('os').system('touch /tmp/hostile'),)",
    }
    for name, shape in shapes.items():
        yield Case(f"npy/shape-{name}", _shape(shape), ANY if name == "empty-rows" else ERROR)
    for name, descr in {
        "object": "'|O'",
        "wide": "'<U1000000000'",
        "void": "'|V999999999'",
        "zero": "'|S0'",
        "records": "[('a', '<f4')]",
        "time": "'<M8[ns]'",
        "unknown": "'<q9'",
        "deep": "[" * 20_000,
    }.items():
        yield Case(f"npy/type-{name}", _shape("(10,)", descr))
    yield Case("npy/head-long", _head("{" + " " * 65_000))
    yield Case("npy/head-none", _head(""))
    yield Case("npy/objects", _objects)
    yield Case("npz/bomb", _deflated_bomb)
    yield Case("npz/understated", _understated)
    yield Case("npz/many", _many_members, ANY)
    yield Case("npz/names", _member_names, ANY)
    odd = ("empty-name", "nul", "huge-field", "long-line")
    texts: dict[str, str | bytes] = {
        "one-line": "a,b\n",
        "no-newline": "a,b",
        "ragged": "a,b\n1,2\n3\n",
        "too-many": "a,b\n1,2,3\n",
        "same-names": "a,a\n1,2\n",
        "not-utf8": b"a,b\n\xff\xfe,2\n",
        "nul": b"a,b\n\0,2\n",
        "quote-open": 'a,b\n"1,2\n3,4\n',
        "huge-field": "a,b\n" + "x" * 200_000 + ",2\n",
        "long-line": "a,b\n" + "1" * (17 << 20) + ",2\n",
        "many-columns": ",".join(map(str, range(5000))) + "\n" + ",".join("1" * 5000) + "\n",
        "empty-name": ",b\n1,2\n",
        "escape-name": "\x1b[31ma,b\n1,2\n3\n",
        "newlines": "\n" * 100_000,
        "header-wide": ",".join(f"c{k}" for k in range(300_000)) + "\n1,2\n",
        "header-commas": "," * (4 << 20) + "\n1\n",
        "row-wide": "a,b\n" + "ab," * (2 << 20) + "\n",
        "quote-open-long": 'a,b\n1,"' + "3,4\n" * (1 << 20),
        "commas": "," * 100_000 + "\n",
    }
    for name, text in texts.items():
        yield Case(f"csv/{name}", _csv(text), ANY if name in odd else ERROR)
    yield Case("csv/number-digits", _csv("a,b\n" + "9" * 5000 + ",2\n"), ANY)
    yield Case("csv/cr-rows", _csv("a,b\r" + "1,2\r" * (1 << 20)), RIGHT, "1048576 samples")
    yield Case("csv/many-rows", _csv("a\n" + "1\n" * 200_000), RIGHT, "200000 samples")
