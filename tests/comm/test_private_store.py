"""The launcher's store, for this user's processes alone."""

import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlio.comm.private_store import STORE_NAME, PrivateStore, StoreServer
from dlio.errors import CommError, DlioError
from dlio.launch.torch_launch import is_called_by_own_user
from dlio.util.private_sockets import connect, listen
from tests.conftest import in_time
from tests.hostile.sockets import listening


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[str]:
    os.chmod(tmp_path, 0o700)
    with StoreServer(str(tmp_path)):
        yield str(tmp_path)


def test_keys_are_written_once_counted_and_awaited(folder: str) -> None:
    one = PrivateStore(folder)
    other = one.clone()
    assert one.put("a", ["first"]) == ["first"]
    assert other.put("a", ["second"]) == ["first"]
    assert [one.count("n"), other.count("n"), one.count("n")] == [1, 2, 3]
    assert one.has(["a"])
    assert not one.has(["a", "b"])
    raw = bytes(range(256))
    seen: list[object] = []

    def wait() -> None:
        seen.append(other.wait("c"))

    waiting = threading.Thread(target=wait)
    waiting.start()
    one.set("b", raw)
    assert not seen
    one.put("c", 4)
    waiting.join(60)
    assert seen == [4]
    assert one.values(["a", "c"]) == [["first"], 4]
    assert one.get("b") == raw
    for each in (one, other):
        each.close()


def test_a_large_value_goes_through(folder: str) -> None:
    store = PrivateStore(folder)
    store.set("large", "x" * (1 << 22))
    assert len(store.get("large")) == 1 << 22
    store.close()


def test_nothing_listens_at_a_port(folder: str) -> None:
    before = listening(os.getpid())
    store = PrivateStore(folder)
    assert listening(os.getpid()) == before
    store.close()


@pytest.mark.parametrize(
    "words",
    [
        struct.pack("<I", 1 << 31),
        struct.pack("<I", 3) + b"abc",
        struct.pack("<I", 2) + b"[]",
        struct.pack("<I", 8) + b'["exec"]',
        struct.pack("<I", 15) + b'["get", ["no"]]',
        struct.pack("<I", 9) + b'["count"]',
    ],
)
def test_nonsense_ends_one_connection_only(folder: str, words: bytes) -> None:
    store = PrivateStore(folder)
    with connect(folder, STORE_NAME, 20) as wrong:
        wrong.sendall(words)
        assert wrong.recv(100) == b""
    store.set("a", "b")
    assert store.get("a") == b"b"
    store.close()


def test_a_store_that_is_gone_is_an_error_of_one_line(tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o700)
    server = StoreServer(str(tmp_path))
    store = PrivateStore(str(tmp_path))
    server.close()
    with pytest.raises(CommError, match="store is gone"):
        store.get("a")
    store.close()
    with pytest.raises(CommError, match="cannot be reached"):
        PrivateStore(str(tmp_path))


def test_a_launcher_that_does_not_answer_is_not_waited_for_beyond_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is stopped keeps its sockets: the kernel takes connections and requests."""
    monkeypatch.setenv("DLIO_TIMEOUT", "0.2")
    os.chmod(tmp_path, 0o700)
    folder = os.open(tmp_path, os.O_RDONLY)
    with listen(folder, STORE_NAME) as listener:
        store = PrivateStore(str(tmp_path))
        with pytest.raises(CommError, match=r"has not answered for 0\.2 s: is it stopped"):
            store.put("a", 1)
        with listener.accept()[0] as late:
            late.sendall(struct.pack("<I", 1) + b"1")
            with pytest.raises(CommError, match="has not answered"):
                store.put("a", 2)
        store.close()
    os.close(folder)


def test_a_call_that_waits_is_interrupted_without_the_launcher(folder: str) -> None:
    store, ends = PrivateStore(folder), []

    def wait() -> None:
        try:
            store.wait("never")
        except CommError as error:
            ends.append(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    store.interrupt()
    waiting.join(60)
    assert len(ends) == 1
    store.close()


def test_a_folder_that_others_can_enter_is_refused(folder: str) -> None:
    os.chmod(folder, 0o755)
    with pytest.raises(DlioError, match="not yours alone"):
        PrivateStore(folder)


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_call_of_this_users_is_seen_before_it_is_accepted(family: socket.AddressFamily) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(family) as caller:
        port = int(listener.getsockname()[1])
        assert not is_called_by_own_user(port)
        mapped = "::ffff:127.0.0.1" if family == socket.AF_INET6 else "127.0.0.1"
        caller.connect((mapped, port))
        assert in_time(lambda: is_called_by_own_user(port))


FULL = """
import os, resource, signal, sys
from dlio.comm.private_store import PrivateStore, StoreServer
from dlio.errors import CommError

with StoreServer(sys.argv[1]):
    limit = max(map(int, os.listdir("/proc/self/fd"))) + 10
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit + 100))
    fill = []
    ready, go = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(300)
        os.read(ready, 1)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit + 100, limit + 100))
        try:
            PrivateStore(sys.argv[1]).count("key")
        except CommError as error:
            print(error, flush=True)
        os._exit(0)
    try:
        while True:
            fill.append(os.dup(0))
    except OSError:
        os.write(go, b"x")
    os.waitpid(child, 0)
    for descriptor in fill:
        os.close(descriptor)
    print(PrivateStore(sys.argv[1]).count("key"))
"""


@pytest.mark.cold
def test_a_server_that_may_open_no_more_files_says_so_and_goes_on(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said, count = done.stdout.splitlines()
    assert "may open no more files" in said
    assert count == "1"
