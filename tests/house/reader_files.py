"""Check that readers open what lies in a data set's folder by `dlio.data.source` alone.

`Source` and `FilePlace` open below the folder that the user has named, and judge all links on the
way. `python -m tests.house.reader_files` prints calls that go around them.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.house.rooms import print_complaints

ROOMS: Final = ("readers/dlio_readers", "dlio/data", "dlio/loader/third_party")
OWNERS: Final = (
    "dlio/data/links.py",
    "dlio/data/source.py",
    "dlio/data/requests.py",
    "dlio/data/open_files.py",
)
"""The room."""
ALLOWED: Final = {
    ("readers/dlio_readers/rehearsal.py", "open"): "the kernel's tables of a process",
    ("readers/dlio_readers/rehearsal.py", "os.open"): "/dev/null",
    ("readers/dlio_readers/rehearsal.py", "io.FileIO"): "a pipe",
    ("readers/dlio_readers/hdf5file.py", "h5py.File"): "what `File.for_library` yields",
    ("readers/dlio_readers/parquet.py", "pq.ParquetFile"): "the same",
    ("readers/dlio_readers/label_tables.py", "pq.ParquetFile"): "bytes that were read",
    ("readers/dlio_readers/arrow.py", "pa.ipc.open_file"): "the stream of a `File`",
    ("readers/dlio_readers/arrow.py", "pa.ipc.open_stream"): "the same",
    ("readers/dlio_readers/npyfile.py", "zipfile.ZipFile"): "the same",
    ("readers/dlio_readers/mds.py", "gzip.GzipFile"): "bytes that were read",
    ("readers/dlio_readers/mds.py", "bz2.BZ2File"): "bytes that were read",
    ("readers/dlio_readers/zarr.py", "zarr.open"): "the store of `zarrstore`",
    ("dlio/data/index.py", "os.listdir"): "the user's own cache",
    ("dlio/data/identity.py", "os.scandir"): "a folder that the caller's function has opened",
    ("dlio/loader/third_party/huggingface.py", "File"): "below one of its places, or named by user",
    ("dlio/loader/third_party/huggingface.py", "DataRoot"): "its places",
    ("dlio/loader/third_party/adapters.py", "Image.open"): "bytes that were read",
}
_CALLS: Final = {
    *("open", "io.open", "io.FileIO", "os.open", "os.scandir", "os.listdir", "os.walk", "os.fwalk"),
    *("File", "PersistentFile", "DataRoot", "open_regular", "open_unchecked", "open_unlinked"),
    *("h5py.File", "pq.ParquetFile", "pq.read_table", "pq.read_metadata", "pa.OSFile"),
    *("pa.memory_map", "pa.ipc.open_file", "pa.ipc.open_stream", "feather.read_table"),
    *("np.load", "np.fromfile", "np.memmap", "np.loadtxt", "np.genfromtxt", "zarr.open"),
    *("zipfile.ZipFile", "tarfile.open", "gzip.open", "gzip.GzipFile", "bz2.open", "bz2.BZ2File"),
    *("lzma.open", "Image.open", "cv2.imread", "glob.glob", "glob.iglob"),
}
_METHODS: Final = {"read_text", "read_bytes", "iterdir", "rglob"}
_LONG: Final = {"numpy": "np", "pyarrow": "pa", "pyarrow.parquet": "pq"}
_MAY_OPEN: Final = re.compile(
    "|".join(sorted({re.escape(each.rpartition(".")[2]) for each in _CALLS | _METHODS}))
)


def complaints(text: str, path: str) -> list[str]:
    """Return a line for each call that opens a file by its name."""
    if not _MAY_OPEN.search(text):
        return []
    return [
        f"{path}:{line}: {call}: use dlio.data.source (Source.file, Source.read, files_below)"
        for line, call in sorted(set(_calls(ast.parse(text))))
        if (path, call) not in ALLOWED
    ]


def _calls(tree: ast.Module) -> Iterator[tuple[int, str]]:
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {a.asname: _LONG.get(a.name, a.name) for a in node.names if a.asname}
            names |= {a.name: _LONG.get(a.name, a.name) for a in node.names if not a.asname}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            inside = "" if node.module.startswith(("dlio", "PIL")) else f"{node.module}."
            short = _LONG.get(node.module)
            inside = f"{short}." if short else inside
            names |= {a.asname or a.name: f"{inside}{a.name}" for a in node.names}
    for node in ast.walk(tree):
        # A function that is passed on, as to a pool of threads, opens as well.
        if isinstance(node, ast.Call) and not ast.unparse(node.func).endswith(".opened_as"):
            for each in (node.func, *node.args):
                if isinstance(each, ast.Name | ast.Attribute):
                    yield from _named(each, names, called=each is node.func)


def _named(node: ast.expr, names: dict[str, str], *, called: bool) -> Iterator[tuple[int, str]]:
    first, dot, rest = ast.unparse(node).partition(".")
    name = names.get(first, first) + dot + rest
    if name in _CALLS or (called and dot and name.rpartition(".")[2] in _METHODS):
        yield node.lineno, name


def main(root: Path) -> int:
    """Print the complaints about all rooms; returns the exit code."""
    return print_complaints(root, ROOMS, OWNERS, complaints)


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parents[2]))
