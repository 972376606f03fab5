"""Blocks: a payload comes back unchanged or raises an error; no field of a file is trusted."""

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dlio.data.schema import IMAGE_LABEL, Schema
from dlio.errors import CorruptBlock
from dlio.storage.block import (
    PayloadScratch,
    aligned,
    block_sizes,
    encode_block,
    read_info,
    write_all,
)
from tests.conftest import examples

FINGERPRINT = "0123456789abcdef" * 2


def _encode(payloads: list[bytes], compress: bool = False) -> bytes:
    pieces = encode_block(
        payloads, block=7, fingerprint=FINGERPRINT, schema=IMAGE_LABEL, compress=compress
    )
    return b"".join(bytes(piece) for piece in pieces)


def _read(path: Path, data: bytes) -> list[bytes]:
    path.write_bytes(data)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        info = read_info(descriptor, str(path))
        assert (info.block, info.fingerprint, info.schema) == (7, FINGERPRINT, IMAGE_LABEL)
        scratch = PayloadScratch()
        return [bytes(info.read(descriptor, place, scratch)) for place in range(len(info))]
    finally:
        os.close(descriptor)


payload_lists = st.lists(
    st.one_of(st.binary(max_size=40), st.integers(0, 5000).map(bytes)), max_size=8
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(payload_lists, st.booleans())
def test_written_payloads_are_read(tmp_path: Path, payloads: list[bytes], compress: bool) -> None:
    data = _encode(payloads, compress)
    sizes = np.array([len(payload) for payload in payloads], np.int64)
    (bound,) = block_sizes(np.array([len(sizes)]), aligned(sizes).sum(keepdims=True), IMAGE_LABEL)
    assert len(data) <= bound if compress else len(data) == bound
    assert _read(tmp_path / "b", data) == payloads


def test_lz4_is_used_only_where_it_pays() -> None:
    noise = np.random.default_rng(0).bytes(4000)
    assert len(_encode([bytes(4000)], compress=True)) < 300
    assert len(_encode([noise], compress=True)) == len(_encode([noise]))


def test_every_flipped_bit_is_detected(tmp_path: Path) -> None:
    payloads = [b"first", b"", bytes(60)]
    data = bytearray(_encode(payloads))
    padding = _padding(tmp_path / "p", bytes(data))
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << (bit % 8)
        if bit // 8 in padding:  # Padding carries no data.
            assert _read(tmp_path / "b", bytes(data)) == payloads
        else:
            with pytest.raises(CorruptBlock):
                _read(tmp_path / "b", bytes(data))
        data[bit // 8] ^= 1 << (bit % 8)


def test_no_flipped_bit_in_lz4_gives_a_wrong_byte(tmp_path: Path) -> None:
    payloads = [b"first" * 20, bytes(60)]
    data = bytearray(_encode(payloads, compress=True))
    detected = 0
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << (bit % 8)
        try:
            # Some flips decode to the same bytes, such as a match one period further back.
            assert _read(tmp_path / "b", bytes(data)) == payloads
        except CorruptBlock:
            detected += 1
        data[bit // 8] ^= 1 << (bit % 8)
    assert detected > 0.9 * 8 * len(data)


def test_a_block_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    data = _encode([b"first", b"second"])
    for length in range(len(data)):
        with pytest.raises(CorruptBlock):
            _read(tmp_path / "b", data[:length])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(300))
@given(st.data())
def test_arbitrary_bytes_are_a_block_or_a_clear_error(tmp_path: Path, data: st.DataObject) -> None:
    good = bytearray(_encode([b"first", bytes(500)], compress=True))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, 8 + len(good) // 2))
        good[at : at + 4] = data.draw(st.binary(min_size=4, max_size=4))
    try:
        _read(tmp_path / "b", bytes(good))
    except CorruptBlock as error:
        assert str(tmp_path / "b") in str(error)  # noqa: PT017 - it may also be no error


def test_an_error_names_file_block_sample_and_remedy(tmp_path: Path) -> None:
    data = bytearray(_encode([b"first", b"second"]))
    data[-8] ^= 1
    with pytest.raises(CorruptBlock, match=r"b, block 7, sample 1 of it.*restore"):
        _read(tmp_path / "b", bytes(data))


def test_scratch_keeps_earlier_payloads_from_being_resized() -> None:
    scratch = PayloadScratch()
    small = scratch.view(10)
    small[:] = b"0123456789"
    large = scratch.view(1 << 20)
    assert len(large) == 1 << 20
    assert bytes(small) == b"0123456789"


@given(st.integers(-(2**63), 2**63 - 1), st.binary(max_size=50))
def test_fields_are_joined_into_a_payload_and_split_again(label: int, image: bytes) -> None:
    payload = IMAGE_LABEL.join({"image": image, "label": label})
    assert len(payload) == len(image) + IMAGE_LABEL.overhead
    values = IMAGE_LABEL.split(payload)
    assert values == {"image": image, "label": label}


@given(st.lists(st.binary(max_size=20), min_size=3, max_size=3))
def test_several_variable_fields_keep_their_bounds(bodies: list[bytes]) -> None:
    schema = Schema((("a", "bytes"), ("n", "int64"), ("b", "text"), ("c", "bytes")))
    values = dict(zip("abc", bodies, strict=True)) | {"n": 5}
    payload = schema.join(values)
    assert schema.split(payload) == values
    assert Schema.from_json(schema.to_json()) == schema
    with pytest.raises(CorruptBlock):
        schema.split(payload[: schema.overhead - 1])


@pytest.mark.parametrize("text", ["", "5", "[]", '[["a","jpeg"],["a","jpeg"]]', '[["a","pickle"]]'])
def test_invalid_schemas_are_refused(text: str) -> None:
    with pytest.raises(CorruptBlock):
        Schema.from_json(text)


def _padding(path: Path, data: bytes) -> set[int]:
    """Return the positions of bytes behind a block's table that no payload covers."""
    path.write_bytes(data)
    descriptor = os.open(path, os.O_RDONLY)
    info = read_info(descriptor, str(path))
    os.close(descriptor)
    covered = {
        at
        for entry in info.table
        for at in range(int(entry["offset"]), int(entry["offset"] + entry["stored"]))
    }
    first = int(info.table["offset"].min())
    return set(range(first, len(data))) - covered


def test_a_schema_that_blocks_have_in_common_is_parsed_once(tmp_path: Path) -> None:
    schemas = []
    for name in "ab":
        path = tmp_path / name
        path.write_bytes(_encode([name.encode()]))
        with open(path, "rb") as file:
            schemas.append(read_info(file.fileno(), str(path)).schema)
    assert schemas[0] is schemas[1]


@pytest.mark.parametrize("offset", [None, 5])
def test_large_blocks_are_written_a_mebibyte_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offset: int | None
) -> None:
    real, calls = os.pwritev, []

    def short(descriptor: int, pieces: list[memoryview], at: int) -> int:
        calls.append(sum(map(len, pieces)))
        first = pieces[0]  # As a kernel may: less than it was given.
        return real(
            descriptor, [first[: -(-len(first) // 2)]] if len(calls) % 3 == 0 else pieces, at
        )

    def short_at_end(descriptor: int, pieces: list[memoryview]) -> int:
        return short(descriptor, pieces, os.fstat(descriptor).st_size)

    monkeypatch.setattr(os, "pwritev", short)
    monkeypatch.setattr(os, "writev", short_at_end)
    generator = np.random.default_rng(0)
    sizes = [3, 0, *[700] * 1500, 1 << 20, (5 << 20) + 1, *[300_000] * 9]
    pieces = [generator.bytes(size) for size in sizes]
    with open(tmp_path / "block", "wb") as file:
        write_all(file.fileno(), pieces, offset)
    written = (tmp_path / "block").read_bytes()
    assert written[offset or 0 :] == b"".join(pieces)
    assert max(calls) <= 1 << 20
    assert len(calls) < 40
