"""Messages between ranks: every sample arrives intact or is reported as missing."""

import lz4.block
import numpy as np
import numpy.typing as npt
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from dlio.loader.shuffle.sample_message import (
    message_bytes,
    message_memory,
    pack_message,
    pack_payloads,
    unpack_message,
)

payloads = st.lists(st.one_of(st.none(), st.binary(max_size=50)), max_size=12)


def _packed(
    sent: list[bytes | None], compress: bool = False
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    sizes = np.array([7 if payload is None else len(payload) for payload in sent], np.int64)
    message = message_memory().lend(message_bytes(sizes))
    message[:] = 0xEE

    def read(k: int, into: memoryview) -> tuple[int, int] | None:
        payload = sent[k]
        if payload is None:
            return None
        stored = lz4.block.compress(payload, store_size=False) if compress else payload
        if len(stored) >= len(payload):
            stored = payload
        into[: len(stored)] = stored
        return len(stored), xxhash.xxh3_64_intdigest(payload)

    return pack_message(message, sizes, read), sizes


def _received(message: npt.NDArray[np.uint8], sizes: npt.NDArray[np.int64]) -> list[bytes | None]:
    opened = [None if one is None else one.open() for one in unpack_message(message.data, sizes)]
    return [None if payload is None else bytes(payload) for payload in opened]


@given(payloads)
def test_packed_payloads_are_unpacked(sent: list[bytes | None]) -> None:
    message, sizes = _packed(sent)
    assert len(message) == 16 * len(sent) + sum(len(one) for one in sent if one is not None)
    assert _received(message, sizes) == sent


@given(st.lists(st.one_of(st.none(), st.binary(max_size=9).map(lambda b: b * 40)), max_size=12))
def test_payloads_that_are_stored_compressed_travel_compressed(sent: list[bytes | None]) -> None:
    message, sizes = _packed(sent, compress=True)
    assert _received(message, sizes) == sent
    if any(sent):
        assert len(message) < message_bytes(sizes)


@given(st.lists(st.binary(min_size=1, max_size=20), min_size=1, max_size=5), st.data())
def test_a_flipped_bit_loses_its_sample_and_yields_no_wrong_byte(
    sent: list[bytes], data: st.DataObject
) -> None:
    message, sizes = _packed(list(sent))
    bit = data.draw(st.integers(0, 8 * len(message) - 1))
    message[bit // 8] ^= 1 << (bit % 8)
    received = _received(message, sizes)
    for arrived, payload in zip(received, sent, strict=True):
        assert arrived is None or arrived == payload
    # A wrong length hides where the following payloads begin.
    in_lengths = bit // 8 < 16 * len(sent) and bit // 8 % 16 < 8
    assert received.count(None) == 1 or (in_lengths and None in received)


@given(st.binary(min_size=40, max_size=60).map(lambda b: b * 40), st.data())
def test_a_flipped_bit_of_compressed_data_is_detected(sent: bytes, data: st.DataObject) -> None:
    message, sizes = _packed([sent], compress=True)
    bit = data.draw(st.integers(0, 8 * len(message) - 1))
    message[bit // 8] ^= 1 << (bit % 8)
    # Some flips in LZ4 decode to the same bytes: a match may refer to another copy of them.
    assert _received(message, sizes) in ([None], [sent])


@given(st.lists(st.none() | st.binary(max_size=60), min_size=1, max_size=8), st.data())
def test_payloads_of_sizes_that_the_receiver_does_not_know_arrive_whole_or_not_at_all(
    sent: list[bytes | None], data: st.DataObject
) -> None:
    message = pack_payloads(sent)
    arrived = unpack_message(message.data, len(sent))
    assert [None if each is None else each.open() for each in arrived] == sent
    end = data.draw(st.integers(0, len(message)))
    harmed = message[:end].copy()
    if end:
        harmed[data.draw(st.integers(0, end - 1))] ^= 1 << data.draw(st.integers(0, 7))
    for each, whole in zip(unpack_message(harmed.data, len(sent)), sent, strict=True):
        opened = None if each is None else each.open()
        assert opened is None or bytes(opened) == whole


def test_memory_is_reused_when_nothing_refers_to_it() -> None:
    memory = message_memory()
    first = memory.lend(1000)
    address = first.ctypes.data
    view = first.data[10:20]
    del first
    second = memory.lend(1000)
    assert second.ctypes.data != address
    del view
    assert memory.lend(900).ctypes.data == address
    # A much smaller message gets memory of its own, not to occupy a large one.
    assert memory.lend(10).ctypes.data not in (address, second.ctypes.data)
    held = [memory.lend(100) for _ in range(200)]
    assert len({each.ctypes.data for each in held}) == 200
    del held
    memory.take(5000)
    assert memory.statistics().spare <= 64
