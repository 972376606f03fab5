"""Web servers that answer otherwise than they were asked: right bytes, or one true line in time."""

import gc
import gzip
import hashlib
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import h5py
import numpy as np
import pytest

from dlio.data import web_requests
from dlio.data.reader import open_reader
from dlio.data.source import File, Source
from dlio.errors import DlioError, SourceError
from dlio_staging.pack_folder import pack

if find_spec("aiohttp") is None:
    pytest.skip("no aiohttp: pip install 'dlio[s3]'", allow_module_level=True)
import fsspec.implementations.http

Headers = dict[str, str]
ROWS: Final = 4000
TABLE: Final = b"a,label\n" + b"".join(b"%d,%d\n" % (k, k % 3) for k in range(ROWS))
OTHER: Final = TABLE[:8] + b"".join(b"%d,%d\n" % (k, (k + 1) % 3) for k in range(ROWS))
assert len(OTHER) == len(TABLE)


class Answer:
    """An answer as a right server sends it; tests change it."""

    def __init__(self, method: str, asked: str, data: bytes, number: int) -> None:
        self.method, self.asked, self.number = method, asked, number
        """The request's method, its range, and its number among those of this method."""
        self.pause_s = 0.0
        """Seconds before each byte."""
        self.is_endless = False
        """True to send the body again and again."""
        self.become(data)

    def become(self, data: bytes) -> None:
        """Answer from another file."""
        self.whole, self.status = data, 200
        self.headers: Headers = {"ETag": f'"{hashlib.md5(data).hexdigest()}"'}
        self.body = data
        self.range = (0, len(data))
        part = re.fullmatch(r"bytes=(\d*)-(\d*)", self.asked)
        if part:
            first, last = part.groups()
            begin = int(first) if first else max(0, len(data) - int(last))
            self.send(begin, min(len(data), int(last) + 1) if first and last else len(data))
        else:
            self.headers["Content-Length"] = str(len(data))

    def send(self, begin: int, end: int) -> None:
        """Send a part."""
        self.status, self.range, self.body = 206, (begin, end), self.whole[begin:end]
        self.headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(self.whole)}"
        self.headers["Content-Length"] = str(end - begin)


@contextmanager
def served(
    files: dict[str, bytes], change: Callable[[Answer], None], asked: list[Headers] | None = None
) -> Iterator[str]:
    """URL of a server of files, of whose answers each is changed before it is sent. `asked` gets
    the headers of all requests."""
    counts = {"GET": 0, "HEAD": 0}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if asked is not None:
                asked.append(dict(self.headers))
            data = files.get(self.path.partition("?")[0].lstrip("/"))
            if data is None:
                self.send_error(404)
                return
            counts[self.command] += 1
            made = Answer(self.command, self.headers["Range"] or "", data, counts[self.command])
            change(made)
            self.close_connection = True
            if not made.status:
                return  # Without an answer.
            self.send_response(made.status)
            for name, value in made.headers.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "HEAD":
                return
            try:
                part = made.body
                if "Transfer-Encoding" in made.headers and made.is_endless:
                    part = b"%x\r\n%b\r\n" % (len(part), part)
                while made.is_endless:
                    self.wfile.write(part)
                if not made.pause_s:
                    self.wfile.write(made.body)
                for k in range(len(made.body) if made.pause_s else 0):
                    self.wfile.write(made.body[k : k + 1])
                    time.sleep(made.pause_s)
            except OSError:
                return  # The client has gone.

        do_HEAD = do_GET  # noqa: N815 # as the server calls it

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads, block_on_close = True, False

        def handle_error(self, *_: object) -> None:
            pass

    with Server(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def _as_asked(answer: Answer) -> None:
    pass


def _compressed(answer: Answer) -> None:
    answer.body = gzip.compress(answer.body)
    answer.headers |= {"Content-Encoding": "gzip", "Content-Length": str(len(answer.body))}


def _in_a_code_of_its_own(answer: Answer) -> None:
    answer.headers["Content-Encoding"] = "x-own"


def _whole(answer: Answer) -> None:
    if answer.status == 206:
        answer.status, answer.body = 200, answer.whole
        del answer.headers["Content-Range"]
        answer.headers["Content-Length"] = str(len(answer.whole))


def _shifted(answer: Answer) -> None:
    begin, end = answer.range
    if answer.status == 206 and begin:
        answer.send(begin - 1, end - 1)


def _cut(answer: Answer) -> None:
    answer.body = answer.body[: len(answer.body) // 2]


def _cut_without_a_length(answer: Answer) -> None:
    if answer.method == "GET":
        _cut(answer)
        del answer.headers["Content-Length"]
        answer.headers["Connection"] = "close"


def _cut_in_chunks(answer: Answer) -> None:
    if answer.method == "GET":
        _cut(answer)
        del answer.headers["Content-Length"]
        answer.headers["Transfer-Encoding"] = "chunked"
        answer.body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(answer.body), answer.body)


def _another_soon(answer: Answer) -> None:
    if answer.method == "GET" and answer.number > 1:
        answer.become(answer.whole[:99] + answer.whole[99:][::-1])


def _longer_soon(answer: Answer) -> None:
    if answer.method == "GET" and answer.number > 1:
        answer.become(answer.whole + b"1")
    del answer.headers["ETag"]


def _of_no_length(answer: Answer) -> None:
    if answer.method == "HEAD" or not answer.asked:
        del answer.headers["Content-Length"]
        answer.headers["Transfer-Encoding"] = "chunked"
        answer.body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(answer.body), answer.body)


def _without_head(answer: Answer) -> None:
    if answer.method == "HEAD":
        answer.status, answer.headers = 405, {"Content-Length": "0"}


def _busy_for_long(answer: Answer) -> None:
    answer.status, answer.body = 503, b""
    answer.headers = {"Retry-After": "3600", "Content-Length": "0"}


def _dripping(answer: Answer) -> None:
    answer.pause_s = 0.3


def _endless(answer: Answer) -> None:
    if answer.method == "GET":
        answer.body, answer.is_endless = answer.body + bytes(1 << 20), True
        del answer.headers["Content-Length"]
        answer.headers["Transfer-Encoding"] = "chunked"


def _endless_of_a_length(answer: Answer) -> None:
    if answer.method == "GET":
        answer.body, answer.is_endless = answer.body + bytes(1 << 20), True
        answer.headers["Content-Length"] = str(1 << 40)


def _endless_error(answer: Answer) -> None:
    if answer.method == "GET":
        _endless(answer)
        answer.status = 410


def _to_a_file(answer: Answer) -> None:
    answer.status, answer.body = 302, b""
    answer.headers = {"Location": "file:///etc/passwd", "Content-Length": "0"}


KINDS: Final[dict[Callable[[Answer], None], str]] = {
    _as_asked: "",
    _compressed: "sends it compressed",
    _in_a_code_of_its_own: "sends it compressed",
    _whole: "does not serve parts of files",
    _shifted: "was asked for",
    _cut: "not completed",
    _cut_without_a_length: "does not tell the length of its answer",
    _cut_in_chunks: "the server sent|not completed",
    _another_soon: "has changed since it was opened",
    _longer_soon: "has changed since it was opened",
    _of_no_length: "does not tell the file's size",
    _without_head: "",
    _busy_for_long: "503",
    _dripping: "no whole answer for 1 s: the source hangs",
    _to_a_file: "file:///etc/passwd",
    _endless: "the server sent over",
    _endless_of_a_length: "the server sent",
    _endless_error: "410|is not there|does not exist",
}
FORMATS: Final = ("t.csv", "x.h5", "x.npz", "shard.dlio")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("served")
    images = np.arange(40 * 4096, dtype=np.uint32).astype(np.uint8).reshape(40, 64, 64)
    with h5py.File(folder / "x.h5", "w") as file:
        file["image"], file["label"] = images, np.arange(40)
    np.savez(folder / "x.npz", image=images, label=np.arange(40))
    (folder / "t.csv").write_bytes(TABLE)
    pack(str(folder / "x.npz"), str(folder / "packed"))
    shard = next((folder / "packed").glob("*.dlio"))
    shard.rename(folder / "shard.dlio")
    return {name: (folder / name).read_bytes() for name in FORMATS}


def _samples(path: str) -> list[bytes]:
    reader = open_reader(path)
    try:
        alone = [reader.read(np.array([k], np.int64))[0] for k in (len(reader) - 1, 7)]
        return [bytes(each) for each in (*alone, *reader.read(np.arange(len(reader))))]
    finally:
        reader.close()


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DLIO_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("change", KINDS, ids=lambda change: change.__name__.strip("_"))
# HDF5 files are tried by a child, which takes seconds.
@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[pytest.mark.nightly] * (each == "x.h5")) for each in FORMATS]
)
# SECURITY.md: S25
def test_an_answer_is_the_one_that_was_asked_for_or_an_error(
    name: str,
    change: Callable[[Answer], None],
    files: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if change is _dripping:
        monkeypatch.setenv("DLIO_TIMEOUT", "1")
    (tmp_path / name).write_bytes(files[name])
    expected = _samples(str(tmp_path / name))
    with served(files, change) as url:
        try:
            samples = _samples(f"{url}/{name}?signature=geheim")
        except SourceError as error:
            message = str(error)
            assert KINDS[change], message
            assert re.search(KINDS[change], message), message
            assert "\n" not in message
            assert "geheim" not in message
            assert url in message
        else:
            assert samples == expected


@pytest.mark.parametrize("change", [_endless, _endless_of_a_length, _endless_error])
# SECURITY.md: S25
def test_an_answer_without_an_end_takes_little_memory(change: Callable[[Answer], None]) -> None:
    with served({"t.csv": TABLE}, change) as url:
        code = (
            "import resource, sys\n"
            "from dlio.data.source import Source\n"
            "from dlio.errors import SourceError\n"
            "source = Source(sys.argv[1])\n"
            "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
            "for part in ((), (8, 99)):\n"
            "    try:\n"
            "        source.read('t.csv', *part)\n"
            "    except SourceError:\n"
            "        print('refused')\n"
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
        )
        words = [sys.executable, "-c", code, url]
        run = subprocess.run(words, capture_output=True, text=True, check=True)
    *refused, grown = run.stdout.split()
    assert refused == ["refused"] * 2
    assert int(grown) < 192 << 10


def test_a_busy_server_is_asked_again(
    files: dict[str, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    def busy(answer: Answer) -> None:
        if answer.number % 3:
            answer.status, answer.body = (429, 503)[answer.number % 2], b""
            answer.headers = {"Retry-After": "0", "Content-Length": "0"}

    with served(files, busy) as url:
        assert File(f"{url}/t.csv").read(2, 4) == TABLE[2:6]
    assert "the server is busy (503): asked again in 0.0 s" in caplog.text


@pytest.mark.parametrize("times", [3, 30])
def test_a_server_that_hangs_up_is_asked_again_a_few_times(
    times: int,
    files: dict[str, bytes],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(web_requests, "_FIRST_PAUSE_S", 0.01)
    asked: list[Headers] = []

    def hanging_up(answer: Answer) -> None:
        if answer.method == "GET" and answer.number <= times:
            answer.status = 0

    with served(files, hanging_up, asked) as url:
        file = File(f"{url}/t.csv")
        if times == 3:
            assert file.read(2, 4) == TABLE[2:6]
        else:
            with pytest.raises(SourceError, match=r"t.csv cannot be read: .*disconnected"):
                file.read(2, 4)
    assert "t.csv: the server hung up without an answer: asked again in 0.0 s" in caplog.text
    assert len(asked) < 20


def test_a_file_that_another_reader_has_opened_anew_is_not_the_one_of_before(
    files: dict[str, bytes],
) -> None:
    own = dict(files)
    with served(own, _as_asked) as url:
        before = File(f"{url}/t.csv")
        assert before.read(0, 20) == TABLE[:20]
        own["t.csv"] = OTHER
        with pytest.raises(SourceError, match="has changed since it was opened: run again"):
            before.read(0, 20)
        assert File(f"{url}/t.csv").read(0, 20) == OTHER[:20]
        with pytest.raises(SourceError, match="has changed since it was opened: run again"):
            before.read(0, 20)


def test_words_of_servers_take_bounded_memory_and_the_bound_is_told(
    files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(web_requests, "_MOST", 3)
    monkeypatch.setattr(web_requests, "_newest", {})
    own = {f"{k}.csv": TABLE for k in range(6)}
    with served(own, _as_asked) as url:
        opened = [File(f"{url}/{k}.csv") for k in range(6)]
        assert len(web_requests._newest) == 3
        own["5.csv"] = own["0.csv"] = OTHER
        with pytest.raises(SourceError, match="has changed since it was opened: run again"):
            opened[5].read(0, 20)
    assert caplog.text.count("more than 3 files of web servers are open") == 1


def test_a_file_of_another_time_is_another_file() -> None:
    """Its stamp, which cached indexes carry, differs, if the server tells only the time, too."""
    own, times = {"t.csv": TABLE}, ["Mon, 02 Nov 2026 10:00:00 GMT"]

    def dated(answer: Answer) -> None:
        answer.headers = {key: answer.headers[key] for key in answer.headers if key != "ETag"}
        answer.headers["Last-Modified"] = times[-1]

    with served(own, dated) as url:
        before = File(f"{url}/t.csv").stamp
        assert File(f"{url}/t.csv").stamp == before
        own["t.csv"] = OTHER
        times.append("Tue, 03 Nov 2026 10:00:00 GMT")
        assert File(f"{url}/t.csv").stamp != before


# SECURITY.md: S25
def test_another_server_gets_no_password(files: dict[str, bytes]) -> None:
    first: list[Headers] = []
    other: list[Headers] = []
    with served(files, _as_asked, other) as target:

        def moved(answer: Answer) -> None:
            answer.status, answer.body = 302, b""
            answer.headers = {"Location": f"{target}/t.csv", "Content-Length": "0"}

        with served(files, moved, first) as url:
            url = url.replace("://", "://mia:geheim@")
            assert File(f"{url}/t.csv").read(0, 9) == TABLE[:9]
    assert all("Authorization" in each for each in first)
    assert len(other) == len(first)
    assert not any("Authorization" in each for each in other)


def test_a_large_file_is_not_read_as_a_page_of_links(files: dict[str, bytes]) -> None:
    asked: list[Headers] = []

    def large(answer: Answer) -> None:
        if answer.method == "HEAD":
            answer.headers |= {"Content-Length": str(1 << 40), "Content-Type": "text/html"}
        else:
            asked.append({})

    with served(files, large) as url:
        assert not Source(f"{url}/t.csv").is_folder()
    assert not asked


def test_no_object_of_h5py_is_collected_while_h5py_waits_for_the_server(
    files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread of fsspec would wait for h5py's lock, and h5py for this thread."""
    seen: list[bool] = []
    read = fsspec.implementations.http.HTTPFile.readinto
    with monkeypatch.context() as patched, served(files, _as_asked) as url:

        def readinto(self: object, into: memoryview) -> int:
            seen.append(gc.isenabled())
            count: int = read(self, into)
            return count

        patched.setattr(fsspec.implementations.http.HTTPFile, "readinto", readinto)
        assert len(_samples(f"{url}/x.h5")) == 42
    assert len(seen) > 1
    assert not any(seen)
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("missing.csv", {}),
        ("missing.zarr::image", {}),
        ("t{0..9999999}.csv", {}),
        ("t.csv", {"split": "val"}),
        ("t.csv", {"mix": 3}),
        ("t.csv", {"format": "zarr"}),
        ("t.csv", {"columns": ["none"]}),
        ("x.npz::none", {}),
        ("x.npz", {"select": "time=0..9"}),
        ("store", {"format": "zarr"}),
    ],
)
def test_errors_hold_no_secrets_of_urls(
    name: str, options: dict[str, Any], files: dict[str, bytes]
) -> None:
    with served({**files, "store/zarr.json": b"{}"}, _as_asked) as url:
        url = f"{url.replace('://', '://mia:geheim@')}/{name}"
        at = url.find("::")
        url = f"{url}?sig=geheim" if at < 0 else f"{url[:at]}?sig=geheim{url[at:]}"
        with pytest.raises(DlioError) as refused:
            open_reader(url, **options)
    for text in (str(refused.value), repr(refused.value)):
        assert "geheim" not in text
        assert "\n" not in text
