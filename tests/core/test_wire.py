"""Messages between ranks arrive whole, or say which samples did not."""

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from dlio.wire import MessageMemory, message_bytes, payload_slots, seal_message, unpack_message

payloads = st.lists(st.one_of(st.none(), st.binary(max_size=50)), max_size=12)


def _packed(sent: list[bytes | None]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    sizes = np.array([7 if payload is None else len(payload) for payload in sent], np.int64)
    message = MessageMemory().take(message_bytes(sizes))
    message[:] = 0xEE
    slots: list[memoryview | None] = list(payload_slots(message, sizes))
    for k, payload in enumerate(sent):
        slot = slots[k]
        if payload is None or slot is None:
            slots[k] = None
        else:
            slot[:] = payload
    seal_message(message, slots)
    return message, sizes


@given(payloads)
def test_what_was_packed_is_unpacked(sent: list[bytes | None]) -> None:
    message, sizes = _packed(sent)
    received = unpack_message(message.data, sizes)
    assert [None if view is None else bytes(view) for view in received] == sent


@given(st.lists(st.binary(min_size=1, max_size=20), min_size=1, max_size=5), st.data())
def test_a_flipped_bit_loses_its_sample_and_no_other_byte_is_believed(
    sent: list[bytes], data: st.DataObject
) -> None:
    message, sizes = _packed(list(sent))
    bit = data.draw(st.integers(0, 8 * len(message) - 1))
    message[bit // 8] ^= 1 << (bit % 8)
    received = unpack_message(message.data, sizes)
    for view, payload in zip(received, sent, strict=True):
        assert view is None or bytes(view) == payload
    assert received.count(None) == 1


def test_memory_is_used_again_when_nobody_refers_to_it() -> None:
    memory = MessageMemory()
    first = memory.take(1000)
    address = first.ctypes.data
    view = first.data[10:20]
    del first
    second = memory.take(1000)
    assert second.ctypes.data != address
    del view
    assert memory.take(900).ctypes.data == address
    # Not for something much smaller, which would hold it.
    assert memory.take(10).ctypes.data not in (address, second.ctypes.data)
    held = [memory.take(100) for _ in range(200)]
    assert len({each.ctypes.data for each in held}) == 200
    del held
    memory.take(5000)
    assert len(memory._arrays) <= 65
