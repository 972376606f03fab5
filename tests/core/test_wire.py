"""Messages between ranks arrive whole, or say which samples did not."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dlio.wire import message_bytes, pack_message, unpack_message

payloads = st.lists(st.one_of(st.none(), st.binary(max_size=50)), max_size=12)


@given(payloads)
def test_what_was_packed_is_unpacked(sent: list[bytes | None]) -> None:
    sizes = np.array([7 if payload is None else len(payload) for payload in sent], np.int64)
    message = pack_message(sent)
    assert len(message) <= message_bytes(sizes)
    # Receivers post room for the most a message can be.
    room = bytearray(message_bytes(sizes))
    room[: len(message)] = message
    received = unpack_message(room, sizes)
    assert [None if view is None else bytes(view) for view in received] == sent


@given(st.lists(st.binary(min_size=1, max_size=20), min_size=1, max_size=5), st.data())
def test_a_flipped_bit_loses_its_sample_and_no_other_byte_is_believed(
    sent: list[bytes], data: st.DataObject
) -> None:
    sizes = np.array([len(payload) for payload in sent], np.int64)
    message = pack_message(sent)
    bit = data.draw(st.integers(0, 8 * len(message) - 1))
    message[bit // 8] ^= 1 << (bit % 8)
    received = unpack_message(message, sizes)
    for view, payload in zip(received, sent, strict=True):
        assert view is None or bytes(view) == payload
    assert None in received
