"""Paths stand for files; files are read alike, wherever they are; secrets stay secret."""

import logging
import os
import threading
import zipfile
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st

from dlio.data.index import cached_index, fingerprint_of
from dlio.data.index_memory import Names
from dlio.data.reader import open_reader
from dlio.data.source import File, Source, expand, inside, last_name, own_name, split_fields
from dlio.errors import SourceError, UsageError, redact


def test_braces_globs_and_lists_stand_for_files(tmp_path: Path) -> None:
    for name in ("b.tar", "a.tar", "c.txt"):
        (tmp_path / name).write_bytes(b"x")
    assert expand("s3://b/{000..002}.tar") == [f"s3://b/00{k}.tar" for k in range(3)]
    assert expand("x/{9..11}{a,b}") == [f"x/{k}{c}" for k in (9, 10, 11) for c in "ab"]
    assert expand(f"{tmp_path}/*.tar") == [f"{tmp_path}/a.tar", f"{tmp_path}/b.tar"]
    assert expand([f"{tmp_path}/c.txt", f"{tmp_path}/[a].tar"])[-1] == f"{tmp_path}/a.tar"
    with pytest.raises(SourceError, match="matches no file"):
        expand(f"{tmp_path}/*.zip")
    with pytest.raises(UsageError, match="over"):
        expand("{0..9999999}")


def test_globs_of_remote_files_are_urls_again() -> None:
    files = fsspec.filesystem("memory")
    files.pipe({"/globbed/a.tar": b"1", "/globbed/b.tar": b"22"})
    files = [File(url) for url in expand("memory://globbed/*.tar")]
    assert [(file.size, file.read()) for file in files] == [(1, b"1"), (2, b"22")]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("f.h5::images,labels", ("f.h5", ("images", "labels"))),
        ("s3://b/f.h5::x", ("s3://b/f.h5", ("x",))),
        ("zip://f.h5::b.zip", ("zip://f.h5::b.zip", ())),
        ("zip://f.h5::s3://b/b.zip::x", ("zip://f.h5::s3://b/b.zip", ("x",))),
        ("simplecache::s3://b/f.h5", ("simplecache::s3://b/f.h5", ())),
        ("f.h5", ("f.h5", ())),
    ],
)
def test_names_of_fields_are_separated_from_chained_urls(
    path: str, fields: tuple[str, tuple[str, ...]]
) -> None:
    assert split_fields(path) == fields


def test_files_are_read_alike_local_remote_and_chained(tmp_path: Path) -> None:
    data = os.urandom(1000)
    (tmp_path / "f").write_bytes(data)
    fsspec.filesystem("memory").pipe("/f", data)
    with zipfile.ZipFile(tmp_path / "z.zip", "w") as archive:
        archive.writestr("f", data)
    for url in (
        f"{tmp_path}/f",
        "memory://f",
        f"zip://f::{tmp_path}/z.zip",
        f"file://{tmp_path}/f",
    ):
        file = File(url)
        assert file.size == 1000
        assert file.read(10, 20) == data[10:30]
        assert file.read(990, 20) == data[990:]
        into = memoryview(bytearray(50))
        file.read_into(900, into)
        assert into == data[900:950]
        with pytest.raises(SourceError, match="ends 40 bytes early"):
            file.read_into(990, into)
        with file.open() as stream:
            stream.seek(5)
            assert stream.read(5) == data[5:10]
        with pytest.raises(SourceError, match="cannot be read"):
            File(f"{url}x")


def test_errors_name_the_whole_url(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: MemoryFileSystem, path: str, *_: Any, **__: Any) -> Any:
        raise PermissionError(f"no access to {path}")

    for question in ("exists", "isdir", "ls", "info", "cat_file"):
        if hasattr(MemoryFileSystem, question):
            monkeypatch.setattr(MemoryFileSystem, question, refuse)
    source = Source("memory://bucket/data")
    calls: list[Callable[[str], object]] = [source.exists, source.is_folder, source.read]
    calls.append(source.listing)
    for call in calls:
        for name in ("", "a.png"):
            url = f"memory://bucket/data/{name}".rstrip("/")
            with pytest.raises(SourceError, match=f"^{url} cannot be read: no access"):
                call(name)


@pytest.mark.parametrize("kind", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_ranges_in_a_zip_that_are_read_from_the_beginning_are_told(
    kind: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = os.urandom(2 << 20)
    with zipfile.ZipFile(tmp_path / "z.zip", "w", kind) as archive:
        archive.writestr("f", data)
    with caplog.at_level(logging.WARNING, "dlio"):
        file = File(f"zip://f::{tmp_path}/z.zip")
        assert file.read(100, 50) == data[100:150]
        assert not caplog.records
        assert file.read(1 << 20, 50) == data[1 << 20 : (1 << 20) + 50]
    assert ("extract it, or make the zip" in caplog.text) is (kind == zipfile.ZIP_DEFLATED)


def test_a_stamp_changes_with_the_file(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"1")
    before = File(f"{tmp_path}/f").stamp
    assert File(f"{tmp_path}/f").stamp == before
    (tmp_path / "f").write_bytes(b"22")
    assert File(f"{tmp_path}/f").stamp != before


def test_secrets_in_urls_are_not_shown() -> None:
    assert redact("s3://key:secret@bucket/x") == "s3://***@bucket/x"
    assert "sig" not in redact("https://h/x?X-Amz-Signature=sig cannot be read")
    with pytest.raises(SourceError) as caught:
        File("ftp://user:hunter2@localhost:1/x")
    assert "hunter2" not in str(caught.value)


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=9), max_size=20))
def test_names_are_kept_in_two_arrays(names: list[str]) -> None:
    kept = Names.of(names)
    assert [kept[k] for k in range(len(kept))] == names


def test_an_index_is_built_once_and_again_when_a_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DLIO_CACHE", str(tmp_path / "cache"))
    data = tmp_path / "f"
    data.write_bytes(b"1")
    built = []

    def build() -> dict[str, np.ndarray]:
        built.append(1)
        return {"a": np.arange(5), "none": np.zeros((0, 3), np.uint8)}

    def index() -> dict[str, np.ndarray]:
        return cached_index("test", 1, [File(str(data))], build)

    for _ in range(3):
        assert index()["a"].tolist() == [0, 1, 2, 3, 4]
        assert index()["none"].shape == (0, 3)
    assert len(built) == 1
    data.write_bytes(b"22")
    index()
    assert len(built) == 2
    kept = [path for path in (tmp_path / "cache").glob("*/*") if path.is_dir()]
    assert len(kept) == 1, "of the old state"
    for victim in ("a.npy", "head.json"):
        (kept[0] / victim).write_bytes(b"damaged")
        assert index()["a"].tolist() == [0, 1, 2, 3, 4]
        kept = [path for path in (tmp_path / "cache").glob("*/*") if path.is_dir()]
    assert len(built) == 4
    monkeypatch.setenv("DLIO_CACHE", "/proc/none")
    assert index()["a"].tolist() == [0, 1, 2, 3, 4]


def test_a_fingerprint_changes_with_any_part() -> None:
    parts: list[Any] = ["a", b"b", np.arange(3)]
    assert len(fingerprint_of("x", 1, *parts)) == 32
    others: list[list[Any]] = [
        ["ab", b"", np.arange(3)],
        ["a", b"b", np.arange(3, dtype=np.int32)],
        parts[:2],
    ]
    assert len({fingerprint_of("x", 1, *each) for each in (parts, *others)}) == 4


def test_a_server_without_ranges_or_sizes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    served, listed = MemoryFileSystem.cat_file, MemoryFileSystem.ls

    def whole(self: MemoryFileSystem, path: str, start: Any = None, end: Any = None) -> bytes:
        return bytes(served(self, path))

    def names(self: MemoryFileSystem, path: str, detail: bool = True) -> list[dict[str, Any]]:
        return [{**row, "size": None} for row in listed(self, path, detail=True)]

    files = fsspec.filesystem("memory")
    files.pipe("/served/a.png", b"0123456789")
    try:
        monkeypatch.setattr(MemoryFileSystem, "cat_file", whole)
        file = File("memory://served/a.png")
        assert file.read() == b"0123456789"
        with pytest.raises(SourceError, match="sent 10 bytes for a request of 4: it does not"):
            file.read_into(2, memoryview(bytearray(4)))
        monkeypatch.setattr(MemoryFileSystem, "ls", names)
        (entry,) = Source("memory://served").listing()
        with pytest.raises(SourceError, match=r"a\.png: the server lists files without their size"):
            entry.known_size()
    finally:
        monkeypatch.undo()
        files.rm("/served", recursive=True)


@pytest.mark.parametrize(
    ("url", "own", "last"),
    [
        ("simplecache::http://h/A.csv?x=y", "http://h/a.csv", "A.csv?x=y"),
        ("simplecache::zip://a.csv::http://h/z.zip", "zip://a.csv", "a.csv"),
        ("zip://a.csv::simplecache::http://h/z.zip", "zip://a.csv", "a.csv"),
        ("a.h5::x", "a.h5", "a.h5"),
    ],
)
def test_a_cache_in_front_of_a_url_names_no_file(url: str, own: str, last: str) -> None:
    assert own_name(url) == own
    assert last_name(url) == last


def test_an_entry_at_the_top_of_an_archive_has_a_url_of_its_own() -> None:
    assert inside("zip://::b.zip", "val") == "zip://val::b.zip"
    assert inside("zip://a/::b.zip", "val") == "zip://a/val::b.zip"
    assert inside("/data/", "val") == "/data/val"


@pytest.mark.parametrize(
    ("status", "place", "told"),
    [
        (404, "", "no such file"),
        (403, "", "403"),
        (500, "", "500"),
        (302, "/again.csv", "redirect"),
        (302, "file:///etc/passwd", "file:///etc/passwd"),
        (302, "javascript:alert(1)", "javascript"),
    ],
)
def test_files_that_a_web_server_refuses_are_not_called_missing(
    status: int, place: str, told: str
) -> None:
    class Refusing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            if place:
                self.send_header("Location", place)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_GET  # noqa: N815 # as the server calls it

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(SourceError) as refused:
            open_reader(f"http://127.0.0.1:{server.server_port}/x.csv")
        if status == 404:
            with pytest.raises(SourceError, match=r"name files of a web server by \{000\.\.099\}"):
                open_reader(f"http://127.0.0.1:{server.server_port}/x-*.csv")
        server.shutdown()
    assert told in str(refused.value).lower()
    assert "\n" not in str(refused.value)


def test_a_path_that_cannot_be_looked_up_is_not_said_to_be_missing(tmp_path: Path) -> None:
    # Root may search every folder, so a link to itself stands for one that others may not.
    (tmp_path / "round").symlink_to("round")
    with pytest.raises(SourceError, match="round/train cannot be read: Too many levels"):
        open_reader(str(tmp_path / "round" / "train"))
    with pytest.raises(SourceError, match="no such file"):
        open_reader(str(tmp_path / "missing" / "train"))


@pytest.mark.parametrize(
    ("path", "advice"),
    [
        ("train_text_document", "; did you mean train_text_document.bin?"),
        ("trian.h5", "; did you mean train.h5?"),
        ("train.h5/a", "/train.h5 is a file"),
        ("no/where/at/all", "/no"),
        ("link", "; it is a link to /gone, which is not there"),
        ("quite different", ": check the path"),
    ],
)
def test_a_path_that_is_not_there_comes_with_what_may_be_meant(
    path: str, advice: str, tmp_path: Path
) -> None:
    for name in ("train_text_document.bin", "train_text_document.idx", "train.h5"):
        (tmp_path / name).write_bytes(b"0")
    (tmp_path / "link").symlink_to("/gone")
    with pytest.raises(SourceError, match="no such file or folder: check the path") as caught:
        open_reader(f"{tmp_path}/{path}")
    assert str(caught.value).endswith(advice)
