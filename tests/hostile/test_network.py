"""Strangers and traitors at the sockets of ranks, by real connections."""

import contextlib
import itertools
import logging
import os
import resource
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from dlio.comm.net import address, door, hub
from dlio.comm.net.address import INTERFACE, LOOPBACK, candidates, listen
from dlio.comm.net.door import Door
from dlio.comm.net.keys import Answerer, Caller, Keys, RefusedConnection
from dlio.comm.net.peer_link import FrameHead, Seal
from dlio.comm.torch_mail import Mail
from dlio.errors import CommError
from tests.conftest import in_time
from tests.hostile.mailboxes import Place, Traitor, Wire, failure, is_closed, mailboxes, received
from tests.hostile.sockets import listening

SECRET = "6f70656e20736573616d65"
HUGE = 1 << 39
WHOLE, ANNOUNCED, BODY, GO, REFUSED = range(5)
HELLO_BYTES, CONFIRM_BYTES = 48, 16


class Ranks:
    """Two ranks with a wire to rank 1, on which others can listen and change bytes."""

    def __init__(self) -> None:
        self.change: Callable[[int, int, bytes], bytes | None] = lambda _, __, piece: piece
        self.places: dict[int, Place] = {}
        self.wires: list[Wire] = []
        self.mails: list[Mail] = mailboxes(2, self._through)

    def _through(self, rank: int, place: Place) -> Place:
        self.places[rank] = place
        if rank == 0:
            return place
        self.wires.append(Wire(place, lambda *what: self.change(*what)))
        return self.wires[0].place

    @property
    def wire(self) -> Wire:
        return self.wires[0]

    def get_through(self, size: int = 100) -> bool:
        return received(self.mails[0], self.mails[1], size)

    def close(self) -> None:
        self.wire.close()
        for mail in self.mails:
            mail.close()


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    monkeypatch.setenv("DLIO_SECRET", SECRET)
    monkeypatch.setattr(hub, "_CALL_TIMEOUT_S", 0.5)
    monkeypatch.setattr(hub, "CLOSE_TIMEOUT_S", 0.5)
    made = Ranks()
    yield made
    made.close()


@pytest.fixture
def traitor() -> Iterator[Traitor]:
    made = Traitor()
    yield made
    made.close()


@pytest.fixture
def many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# Where ranks listen


# SECURITY.md: S20
def test_ranks_of_one_node_listen_at_loopback_whatever_the_master_is_called() -> None:
    for master in (None, "127.0.1.1", "192.0.2.7", "no such host"):
        assert candidates(["here", "here"], master)[0] == LOOPBACK


def test_ranks_of_several_nodes_listen_at_the_interface_that_faces_the_master(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(INTERFACE, raising=False)
    monkeypatch.setattr(address, "_facing", {"master": "10.0.0.5", "self": "127.0.1.1"}.get)
    monkeypatch.setattr(address, "_of_host", lambda _: ["127.0.1.1", "10.0.0.9"])
    monkeypatch.setattr(address, "_of_all_interfaces", lambda: ["127.0.0.1", "10.0.0.7"])
    assert candidates(["here", "there"], "master")[0] == "10.0.0.5"
    assert candidates(["here", "there"], "self")[0] == "10.0.0.9"
    monkeypatch.setattr(address, "_of_host", lambda _: ["127.0.1.1"])
    assert candidates(["here", "there"], None)[0] == "10.0.0.7"
    monkeypatch.setenv(INTERFACE, "nothing0,lo")
    assert candidates(["here", "there"], "master")[0] == LOOPBACK
    monkeypatch.setenv(INTERFACE, "nothing0")
    with pytest.raises(CommError, match=r"nothing0.*this node has .*lo"):
        candidates(["here", "there"], "master")
    monkeypatch.delenv(INTERFACE)
    monkeypatch.setattr(address, "_of_all_interfaces", lambda: ["127.0.0.1", None])
    with pytest.raises(CommError, match=INTERFACE):
        candidates(["here", "there"], None)


def test_a_mailbox_listens_at_one_address() -> None:
    before = listening(os.getpid())
    mails = mailboxes(3)
    new = listening(os.getpid()) - before
    assert len(new) == 3
    assert {host for host, _ in new} == {LOOPBACK}
    for mail in mails:
        mail.close()


# Strangers


def test_thousands_of_idle_connections_take_few_descriptors(ranks: Ranks, many_files: None) -> None:
    before = len(os.listdir("/proc/self/fd"))
    hub._CALL_TIMEOUT_S = 20  # type: ignore[misc] # the fixture puts it back
    with contextlib.ExitStack() as stack:
        for place in ranks.places.values():
            for _ in range(1300):
                stack.enter_context(socket.create_connection(place, 10))
        assert ranks.get_through(100)
        assert ranks.get_through(1 << 20)
        held = len(os.listdir("/proc/self/fd")) - before - 2 * 1300
        assert held < 2 * 64 + 20, held


@pytest.mark.nightly
# SECURITY.md: S21
def test_a_rank_gets_in_while_strangers_come_again_and_again(ranks: Ranks) -> None:
    over = threading.Event()

    def come() -> None:
        mine: list[socket.socket] = []
        while not over.is_set():
            with contextlib.suppress(OSError):
                mine.append(socket.create_connection(ranks.places[1], 10))
            if len(mine) > 200:
                mine.pop(0).close()
        for each in mine:
            each.close()

    strangers = [threading.Thread(target=come) for _ in range(2)]
    for each in strangers:
        each.start()
    hub._CALL_TIMEOUT_S = 20  # type: ignore[misc] # the fixture puts it back
    arrived = ranks.get_through()
    over.set()
    for each in strangers:
        each.join(60)
    assert arrived


# SECURITY.md: S21
def test_a_place_is_taken_from_those_that_had_time_and_were_looked_at() -> None:
    now = 0.0
    listener = listen(LOOPBACK)
    door = Door(listener, lambda each: each.close(), most=2, clock=lambda: now)
    visitors: list[socket.socket] = []

    def come() -> list[socket.socket]:
        visitors.append(socket.create_connection(listener.getsockname(), 10))
        assert select.select([listener], [], [], 60)[0]
        return door.accept()

    (first,), (second,) = come(), come()
    now = 1.0
    door.accept()
    (third,) = come()
    assert (first.fileno(), len(door)) == (-1, 2)
    door.proved(second)
    assert come() == []  # The third is new, and the second has begun.
    now = 1.5
    (fourth,) = come()
    assert third.fileno() == -1
    assert second.fileno() > 0
    now = 2.5  # The owner has not looked at the fourth: it has been busy.
    (fifth,) = come()
    assert second.fileno() == -1
    assert fourth.fileno() > 0
    for each in (*visitors, fourth, fifth):
        each.close()
    door.close()


def test_connections_are_turned_away_when_no_descriptor_is_left() -> None:
    listener = listen(LOOPBACK)
    visitors = [socket.create_connection(listener.getsockname(), 10) for _ in range(20)]
    guard = Door(listener, lambda each: each.close())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fillers = []
    try:
        most = max(map(int, os.listdir("/proc/self/fd"))) + 8
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        with contextlib.suppress(OSError):
            while True:
                fillers.append(os.open("/dev/null", os.O_RDONLY))
        os.close(fillers.pop())
        os.close(fillers.pop())
        for _ in range(40):
            guard.accept()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for filler in fillers:
            os.close(filler)
    assert guard.turned_away >= 18
    late = socket.create_connection(listener.getsockname(), 10)
    accepted = guard.accept()  # It works again.
    assert len(accepted) == 1
    for each in (*visitors, *accepted, late):
        each.close()
    guard.close()


def test_strangers_who_come_while_others_are_let_in_may_be_turned_away_at_once(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = itertools.count()
    for mail in ranks.mails:  # Each look at the clock takes a second.
        monkeypatch.setattr(mail._hub._door, "_clock", lambda: float(next(ticks)))
    monkeypatch.setattr(door, "_PATIENCE_S", 10_000.0)
    with contextlib.ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(socket.create_connection(ranks.places[1], 10))
        assert in_time(lambda: ranks.mails[1]._hub._door.turned_away >= 200)
        assert ranks.get_through()


@pytest.mark.parametrize("begun", [0, 1, HELLO_BYTES - 1, HELLO_BYTES])
def test_a_greeting_that_is_not_finished_ends_in_seconds(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, begun: int
) -> None:
    assert ranks.get_through()
    recorded = bytes(ranks.wire.heard[0][0])
    monkeypatch.setattr(door, "_PATIENCE_S", 0.4)
    with socket.create_connection(ranks.places[1], 10) as half:
        half.sendall(recorded[:begun])
        assert is_closed(half)
    assert ranks.get_through()


def test_bytes_one_by_one_do_not_lengthen_a_greeting(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ranks.get_through()
    recorded = bytes(ranks.wire.heard[0][0])
    monkeypatch.setattr(door, "_PATIENCE_S", 0.4)
    sent = 0
    with socket.create_connection(ranks.places[1], 10) as slow, contextlib.suppress(OSError):
        for byte in recorded[: HELLO_BYTES - 1]:
            slow.sendall(bytes([byte]))
            sent += 1
            time.sleep(0.05)
    assert sent < HELLO_BYTES - 1
    assert ranks.get_through()


@pytest.mark.parametrize(
    "words",
    [
        b"GET / HTTP/1.1\r\nHost: rank\r\n\r\n" * 4,
        bytes(200),
        b"\xff" * 200,
        b"dlio" + bytes(200),
        b"dlio\x02\x00\x00\x00" + b"\xff" * 200,
        b"dlio\x02\x00\x00\x00" + bytes(4) + b"\x01" + bytes(200),
    ],
)
def test_who_does_not_know_the_protocol_is_turned_away(
    ranks: Ranks, caplog: pytest.LogCaptureFixture, words: bytes
) -> None:
    with caplog.at_level(logging.WARNING, "dlio"):
        for _ in range(3):
            with socket.create_connection(ranks.places[1], 10) as connection:
                connection.sendall(words)
                assert is_closed(connection)
    lines = [each.getMessage() for each in caplog.records if "a stranger" in each.getMessage()]
    assert len(lines) == 1
    assert ranks.get_through()


# Secrets


# SECURITY.md: S22
def test_the_secret_never_travels(ranks: Ranks) -> None:
    assert ranks.get_through(1 << 17)
    everything = b"".join(bytes(side) for each in ranks.wire.heard for side in each)
    keys = [mail._hub._keys.key(1 - rank) for rank, mail in enumerate(ranks.mails)]
    assert keys[0] == keys[1]
    for secret in (SECRET.encode(), bytes.fromhex(SECRET), *keys):
        assert secret not in everything
        assert secret.hex().encode() not in everything


def test_ranks_with_different_secrets_do_not_talk(ranks: Ranks) -> None:
    ranks.mails[0]._hub._keys._secret = b"another"
    message = ranks.mails[0].send(memoryview(b"hello"), 1, 5)
    assert "rank 1" in failure(message)
    assert "DLIO_SECRET" in failure(message)


def test_values_of_a_stranger_in_the_middle_do_not_help_without_the_secret() -> None:
    keys = [Keys(0, b"secret"), Keys(1, b"secret")]
    middle = Keys(1, b"")
    own, theirs, false = keys[0].public(), keys[1].public(), middle.public()
    keys[0].meet([own, false])
    keys[1].meet([false, theirs])
    middle.meet([own, false])
    caller, answerer = Caller(keys[0], 1), Answerer(middle)
    with pytest.raises(RefusedConnection):
        answerer.feed(caller.begin())


@pytest.mark.parametrize("value", ["", "0", "1", "-5", "zz", "0x10", "f" * 513, "f" * 512])
def test_published_values_are_checked(value: str) -> None:
    keys = Keys(0)
    with pytest.raises(CommError, match="rank 1"):
        keys.meet([keys.public(), value])


def test_somebody_who_listens_in_place_of_a_rank_gets_nothing(ranks: Ranks) -> None:
    with socket.create_server((LOOPBACK, 0)) as impostor:
        ranks.mails[0]._hub._addresses[1] = impostor.getsockname()[:2]
        message = ranks.mails[0].send(memoryview(b"private" * 9), 1, 5)
        caller, _ = impostor.accept()
        with caller:
            hello = caller.recv(HELLO_BYTES, socket.MSG_WAITALL)
            caller.sendall(hello[-32:])  # An answer as long as a true one.
            assert "rank 1" in failure(message)
            caller.settimeout(10)
            assert caller.recv(100) == b""


# Recorded, changed, repeated


def test_a_recorded_connection_cannot_be_played_again(ranks: Ranks) -> None:
    assert ranks.get_through()
    inbox = bytearray(100)
    owed = ranks.mails[1].receive(memoryview(inbox), 0, 5)
    for recorded, _ in list(ranks.wire.heard):
        for last in (HELLO_BYTES, HELLO_BYTES + CONFIRM_BYTES, len(recorded)):
            with socket.create_connection(ranks.places[1], 10) as again:
                again.sendall(recorded[:last])
                if last > HELLO_BYTES:
                    assert is_closed(again)
    assert not owed.done()
    assert owed.cancel()
    assert ranks.get_through()


# SECURITY.md: S23
def test_every_bit_of_a_frame_counts() -> None:
    key = os.urandom(32)
    sealed = Seal(key).close(FrameHead(WHOLE, 1, 2, 3, 4, 5, 6))
    assert Seal(key).open(sealed) == FrameHead(WHOLE, 1, 2, 3, 4, 5, 6)
    for bit in range(8 * len(sealed)):
        changed = bytearray(sealed)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(RefusedConnection):
            Seal(key).open(bytes(changed))


@pytest.mark.parametrize(
    "order", [(1, 0), (0, 0), (0, 2), (0, 1, 1), (0, 1, 0), (0, 2, 1), (1,), (2,)]
)
def test_frames_have_their_places(order: tuple[int, ...]) -> None:
    key = os.urandom(32)
    seal, opener = Seal(key), Seal(key)
    frames = [seal.close(FrameHead(WHOLE, 0, 0, 0, k, 0)) for k in range(3)]

    def play() -> None:
        for k in order:
            opener.open(frames[k])

    with pytest.raises(RefusedConnection):
        play()


def test_frames_of_the_other_direction_and_of_other_connections_are_refused() -> None:
    keys = [Keys(0), Keys(1)]
    public = [each.public() for each in keys]
    for each in keys:
        each.meet(public)
    sessions = []
    for _ in range(2):
        caller, answerer = Caller(keys[0], 1), Answerer(keys[1])
        answerer.feed(caller.feed(answerer.feed(caller.begin())))
        assert caller.session() == answerer.session()
        sessions.append(caller.session())
    distinct = {key for session in sessions for key in session}
    assert len(distinct) == 4
    frame = Seal(sessions[0][0]).close(FrameHead(WHOLE, 0, 0, 0, 0, 0))
    for key in distinct - {sessions[0][0]}:
        with pytest.raises(RefusedConnection):
            Seal(key).open(frame)


@pytest.mark.parametrize("side", ["frame", "mac", "body", "repeated", "left out"])
def test_bytes_changed_on_the_way_never_arrive(
    ranks: Ranks, caplog: pytest.LogCaptureFixture, side: str
) -> None:
    first = HELLO_BYTES + CONFIRM_BYTES
    at = {"frame": 3, "mac": Seal.SIZE - 1, "body": Seal.SIZE + 50}.get(side, 0)
    message, held, done = Seal.SIZE + 100, bytearray(), threading.Event()

    def change(connection: int, start: int, piece: bytes) -> bytes:
        if connection or done.is_set():
            return piece
        # TCP may bring a message in pieces.
        greeting = piece[: max(0, first - start)]
        held.extend(piece[len(greeting) :])
        if len(held) < message:
            return greeting
        done.set()
        one, rest = bytearray(held[:message]), bytes(held[message:])
        if side == "repeated":
            return greeting + bytes(one * 2) + rest
        if side == "left out":
            return greeting + rest + b"?" * Seal.SIZE
        one[at] ^= 4
        return greeting + bytes(one) + rest

    ranks.change = change
    sent, inboxes = bytearray(b"x" * 100), [bytearray(100), bytearray(100)]
    owed = [ranks.mails[1].receive(memoryview(inbox), 0, 5) for inbox in inboxes]
    with caplog.at_level(logging.WARNING, "dlio"):
        ranks.mails[0].send(memoryview(sent), 1, 5)
        assert in_time(lambda: any("is closed" in each.getMessage() for each in caplog.records))
    assert not owed[1].over
    assert owed[0].over == (side == "repeated")
    lines = "\n".join(each.getMessage() for each in caplog.records)
    assert "rank 0" in lines or "stranger" in lines
    for each in owed:
        assert each.over or each.cancel()
    # What is sent before the sender knows is lost, as on any connection.
    assert in_time(lambda: not ranks.mails[0]._hub._called)
    assert ranks.get_through()


# Ranks that send more than they owe


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("size", [HUGE, 4097, (1 << 64) - 1])
# SECURITY.md: S24
def test_a_message_beyond_what_is_owed_is_refused_in_one_line(
    traitor: Traitor, size: int, early: bool
) -> None:
    inbox = memoryview(bytearray(4096))
    if early:
        traitor.send(ANNOUNCED, size, number=1)
        time.sleep(0.1)
    owed = traitor.mail.receive(inbox, 0, 5)
    if not early:
        traitor.send(ANNOUNCED, size, number=1)
    error = failure(owed)
    assert f"{size} bytes came where 4096" in error
    assert "rank 0" in error
    assert "\n" not in error
    assert traitor.answer()[0] == REFUSED
    other = traitor.mail.receive(inbox, 0, 5)
    traitor.send(WHOLE, 3, b"yes")
    assert in_time(other.done)
    assert bytes(inbox[:3]) == b"yes"


@pytest.mark.parametrize(
    ("kind", "size", "told"),
    [
        (WHOLE, HUGE, "unasked"),
        (WHOLE, (1 << 16) + 1, "unasked"),
        (BODY, HUGE, "nobody asked"),
        (BODY, 3, "nobody asked"),
        (GO, 0, "kind 3"),
        (17, HUGE, "kind 17"),
    ],
)
def test_bytes_that_nobody_asked_for_end_the_connection(
    traitor: Traitor, caplog: pytest.LogCaptureFixture, kind: int, size: int, told: str
) -> None:
    with caplog.at_level(logging.WARNING, "dlio"):
        traitor.send(kind, size)
        assert is_closed(traitor.connection)
    lines = [each.getMessage() for each in caplog.records]
    assert len(lines) == 1
    assert "rank 0" in lines[0]
    assert told in lines[0]


def test_a_body_has_the_length_that_was_announced(traitor: Traitor) -> None:
    inbox = memoryview(bytearray(1 << 17))
    owed = traitor.mail.receive(inbox, 0, 5)
    traitor.send(ANNOUNCED, 1 << 17, number=7)
    assert traitor.answer()[0] == GO
    traitor.send(BODY, HUGE, number=7)
    assert is_closed(traitor.connection)
    assert not owed.done()
    assert owed.cancel()


@pytest.mark.parametrize("kind", [WHOLE, ANNOUNCED])
def test_messages_that_nobody_expects_are_counted(traitor: Traitor, kind: int) -> None:
    with contextlib.suppress(OSError):
        for number in range(5000):
            traitor.send(kind, 0, number=number)
    assert is_closed(traitor.connection)


def test_a_longer_message_than_expected_is_refused_on_both_sides(ranks: Ranks) -> None:
    sender, receiver = ranks.mails
    owed = receiver.receive(memoryview(bytearray(100)), 0, 5)
    sent = sender.send(memoryview(bytearray(1 << 20)), 1, 5)
    assert "1048576 bytes came where 100" in failure(owed)
    assert "rank 1 refused a message of 1048576 bytes" in failure(sent)
    assert ranks.get_through()
