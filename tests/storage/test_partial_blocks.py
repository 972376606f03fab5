"""A block is written where it is going to stay, sample by sample, by all processes of a node."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlio.data.schema import IMAGE_LABEL, Buffer
from dlio.errors import SourceError
from dlio.plan.layout import Layout
from dlio.plan.order import Order
from dlio.storage.block import ENTRY, HEADER, encode_block, table_offset
from dlio.storage.partial_blocks import PartialBlocks
from dlio.storage.tier import Tier
from dlio.storage.tier_spec import TierSpec

BLOCK, EACH = 1, 6
FINGERPRINT = "ab" * 16
PAYLOADS = [bytes([k]) * (13 * k) for k in range(EACH)]
"""The first one is empty."""


class Sized:
    """The parts of a reader that pieces need: two blocks of six samples, in a shuffled order."""

    schema = IMAGE_LABEL
    fingerprint = FINGERPRINT
    layout = Layout(np.array([0, EACH, 2 * EACH], np.int64), Order(2 * EACH, 3, shuffled=True))

    def __init__(self, estimates: bool = False) -> None:
        self.sizes_are_estimates = estimates
        self.sizes = np.zeros(2 * EACH, np.int64)
        self.sizes[self.layout.samples_of(BLOCK)] = [len(each) for each in PAYLOADS]


Make = Callable[..., PartialBlocks]


@pytest.fixture(params=["disk", "ram"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tier]:
    root = str(tmp_path) if request.param == "disk" else ""
    with Tier(TierSpec(request.param, root, 1 << 20), "d", f"pieces{os.getpid()}") as made:
        yield made


@pytest.fixture
def make(tier: Tier) -> Iterator[Make]:
    made: list[PartialBlocks] = []

    def pieces(estimates: bool = False) -> PartialBlocks:
        made.append(_pieces(tier, estimates))
        return made[-1]

    yield pieces
    for each in made:
        each.close()


def _pieces(tier: Tier, estimates: bool = False) -> PartialBlocks:
    reader: Any = Sized(estimates)
    return PartialBlocks(tier, reader)


def _no_put(payloads: Sequence[Buffer]) -> None:
    raise AssertionError("the block was written anew")


def _file(tier: Tier, suffix: str) -> str:
    return os.path.join(tier.path, f"{BLOCK:08d}.{suffix}")


def _whole() -> bytes:
    made = encode_block(PAYLOADS, block=BLOCK, fingerprint=FINGERPRINT, schema=IMAGE_LABEL)
    return b"".join(bytes(each) for each in made)


def _add(pieces: PartialBlocks, places: Sequence[int]) -> bool:
    return pieces.add(BLOCK, {place: PAYLOADS[place] for place in places})


@settings(max_examples=25, deadline=None)
@given(
    order=st.permutations(range(EACH)),
    cuts=st.lists(st.integers(1, EACH - 1), max_size=3),
)
def test_a_block_has_the_same_bytes_in_whatever_order_its_samples_come(
    tmp_path_factory: pytest.TempPathFactory, order: list[int], cuts: list[int]
) -> None:
    root = tmp_path_factory.mktemp("order")
    with Tier(TierSpec("disk", str(root), 1 << 20), "d", "n") as tier:
        all_of_them = [_pieces(tier), _pieces(tier)]
        edges = sorted({0, EACH, *cuts})
        for number, (first, last) in enumerate(pairwise(edges)):
            assert _add(all_of_them[number % 2], order[first:last]) is (last == EACH)
        status = os.stat(_file(tier, "part"))
        assert all_of_them[0].publish(BLOCK, _no_put)
        # It was not copied: the file has got another name.
        assert os.stat(_file(tier, "blk")).st_ino == status.st_ino
        assert Path(_file(tier, "blk")).read_bytes() == _whole()
        assert not os.path.exists(_file(tier, "part"))
        for pieces in all_of_them:
            assert not pieces.publish(BLOCK, _no_put)
            pieces.close()


def test_payloads_are_written_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    real = os.pwritev

    def counted(descriptor: int, buffers: Sequence[Buffer], offset: int) -> int:
        written.append(real(descriptor, buffers, offset))
        return written[-1]

    monkeypatch.setattr(os, "pwritev", counted)
    pieces = make()
    assert not _add(pieces, [1, 2, 4])
    assert not _add(pieces, [2, 4])  # They are here.
    assert _add(pieces, [0, 3, 5])
    assert pieces.publish(BLOCK, _no_put)
    assert len(written) == 4, "neighbours are written together"
    assert sum(written) == sum(-(-len(each) // 8) * 8 for each in PAYLOADS)


def test_blocks_of_unknown_sizes_are_written_anew(make: Make, tier: Tier) -> None:
    pieces = make(estimates=True)
    assert not _add(pieces, [5, 3, 1])
    assert make(estimates=True).places(BLOCK) == {1, 3, 5}
    assert _add(pieces, [0, 2, 4])
    put: list[list[bytes]] = []
    assert pieces.publish(BLOCK, lambda payloads: put.append([bytes(each) for each in payloads]))
    assert put == [PAYLOADS]
    assert not os.path.exists(_file(tier, "part"))


@pytest.mark.parametrize("estimates", [False, True])
def test_samples_are_here_for_all_processes(make: Make, estimates: bool) -> None:
    one, two = make(estimates), make(estimates)
    assert one.places(BLOCK) == two.places(BLOCK, [0, 5]) == set()
    _add(one, [4, 1])
    assert two.places(BLOCK) == {1, 4}
    assert two.places(BLOCK, [0, 1, 2]) == {1}
    payload = two.read(BLOCK, 4)
    assert payload is not None
    assert bytes(payload) == PAYLOADS[4]
    assert two.read(BLOCK, 3) is None
    one.remove(BLOCK)
    assert two.places(BLOCK) == set()


def test_a_sample_of_another_size_than_the_source_said_is_refused(make: Make) -> None:
    pieces = make()
    with pytest.raises(SourceError, match="has 3 bytes, not the 26"):
        pieces.add(BLOCK, {2: b"abc"})
    assert pieces.places(BLOCK) == set()


@pytest.mark.parametrize("estimates", [False, True])
def test_a_damaged_sample_is_not_handed_out_and_can_be_added_again(
    make: Make, tier: Tier, estimates: bool
) -> None:
    pieces = make(estimates)
    _add(pieces, range(EACH))
    content = bytearray(Path(_file(tier, "part")).read_bytes())
    content[content.index(PAYLOADS[4])] ^= 1
    Path(_file(tier, "part")).write_bytes(content)
    assert pieces.read(BLOCK, 4) is None
    assert pieces.places(BLOCK) == {0, 1, 2, 3, 5}
    assert not pieces.publish(BLOCK, _no_put)
    assert _add(pieces, [4])
    put: list[list[bytes]] = []
    assert pieces.publish(BLOCK, lambda payloads: put.append([bytes(each) for each in payloads]))
    assert put == ([PAYLOADS] if estimates else [])


def test_bytes_that_a_loss_of_power_took_are_noticed(make: Make, tier: Tier) -> None:
    pieces = make()
    _add(pieces, range(EACH))
    content = bytearray(Path(_file(tier, "part")).read_bytes())
    at = content.index(PAYLOADS[5])
    content[at : at + 8] = bytes(8)
    Path(_file(tier, "part")).write_bytes(content)
    # Shared memory does not outlive a loss of power: what was written to it is there.
    assert pieces.publish(BLOCK, _no_put) is (tier.kind == "ram")
    assert os.path.exists(_file(tier, "part")) is False


@pytest.mark.parametrize("estimates", [False, True])
@pytest.mark.parametrize("until", [1, 2])
def test_a_process_that_is_killed_while_it_adds_loses_its_samples_alone(
    make: Make, monkeypatch: pytest.MonkeyPatch, until: int, estimates: bool
) -> None:
    """It is killed before it writes the header, or before the entries."""
    pieces = make(estimates)
    _add(pieces, [0, 3])
    with monkeypatch.context() as patch:
        _end_at_write(patch, until)
        with pytest.raises(KeyboardInterrupt):
            _add(pieces, [1, 2])
    after = make(estimates)
    assert after.places(BLOCK) == {0, 3}
    added = _add(after, [4, 5])
    assert added is (until == 2), "the header counts samples that are not there"
    put: list[list[bytes]] = []

    def keep(payloads: Sequence[Buffer]) -> None:
        put.append([bytes(each) for each in payloads])

    assert not after.publish(BLOCK, keep)
    assert _add(after, [2, 1])
    assert after.publish(BLOCK, keep)
    if estimates:
        assert put == [PAYLOADS]
    else:
        after.tier.check(BLOCK)


@pytest.mark.parametrize("killed", [False, True])
def test_samples_are_here_while_their_block_is_published(
    make: Make, tier: Tier, monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    """A disk takes a while to write, and the process may end in it."""
    one, two = make(), make()
    _add(one, range(EACH))
    real = Tier.adopt

    def adopt(tier: Tier, block: int, name: str, descriptor: int) -> None:
        assert two.places(BLOCK) == set(range(EACH))
        payload = two.read(BLOCK, 3)
        assert payload is not None
        assert bytes(payload) == PAYLOADS[3]
        if killed:
            raise KeyboardInterrupt
        real(tier, block, name, descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(Tier, "adopt", adopt)
        if not killed:
            assert one.publish(BLOCK, _no_put)
        else:
            with pytest.raises(KeyboardInterrupt):
                one.publish(BLOCK, _no_put)
    if killed:
        assert _add(two, [2]), "all of them are here"
        assert two.publish(BLOCK, _no_put)
    assert Path(_file(tier, "blk")).read_bytes() == _whole()


def _end_at_write(patch: pytest.MonkeyPatch, until: int) -> None:
    count = 0
    real = os.pwrite

    def write(descriptor: int, data: bytes, at: int) -> int:
        nonlocal count
        count += 1
        if count == until:
            raise KeyboardInterrupt
        return real(descriptor, data, at)

    patch.setattr(os, "pwrite", write)


@pytest.mark.parametrize(
    "what", ["empty", "cut", "noise", "other", "length", "beyond", "version 1"]
)
def test_files_that_are_no_parts_of_the_block_are_begun_anew(
    make: Make, tier: Tier, what: str
) -> None:
    pieces = make()
    _add(pieces, range(EACH - 1))
    content = bytearray(Path(_file(tier, "part")).read_bytes())
    fields = list(HEADER.unpack(content[: HEADER.size]))
    harmed: Mapping[str, Callable[[], bytes]] = {
        "empty": lambda: b"",
        "cut": lambda: bytes(content[: HEADER.size - 1]),
        "noise": lambda: os.urandom(3000),
        "other": lambda: HEADER.pack(*fields[:6], b"x" * 16, *fields[7:]) + content[HEADER.size :],
        "length": lambda: HEADER.pack(*fields[:5], 7, *fields[6:]) + content[HEADER.size :],
        "beyond": lambda: _with_entry(content, (1 << 40, 13, 13, 0)),
        "version 1": lambda: b"DLIOPCE1" + content[8:],
    }
    Path(_file(tier, "part")).write_bytes(harmed[what]())
    for _ in range(2):  # A table that was not planned is noticed at the end.
        _add(pieces, range(EACH))
        if pieces.publish(BLOCK, _no_put):
            break
    assert Path(_file(tier, "blk")).read_bytes() == _whole()


def _with_entry(content: bytearray, entry: tuple[int, int, int, int]) -> bytes:
    at = table_offset(len(IMAGE_LABEL.to_json().encode())) + ENTRY.itemsize
    table: npt.NDArray[np.void] = np.array([entry], ENTRY)
    return bytes(content[:at] + table.tobytes() + content[at + ENTRY.itemsize :])
