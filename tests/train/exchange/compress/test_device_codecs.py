"""Compressors of a device, on the CPU: the values, residuals and states are the host's."""

import numpy as np
import pytest
import torch

from dlio.errors import DlioError
from dlio.exchange.compress import NAMES
from dlio.exchange.compress.message_layout import ChunkScratch, pieces_of
from dlio.exchange.nccl.compressors import make_codec
from dlio.exchange.nccl.numbers import packed, unpacked
from dlio.exchange.nccl.tensor_codec import DeviceCodec, TensorCodec
from tests.train.exchange.compress.compressing import KINDS, Layout, drawn, make

CPU, META = torch.device("cpu"), torch.device("meta")
LAYOUT: Layout = [
    *(("dense", (31, 100)), ("bias", (37,)), ("tiny", (3, 5))),
    *(("wide", (70, 1000)), ("odd", (90, 901)), ("norm", (1000,))),
]


def _codec(name: str, device: torch.device | None = CPU) -> TensorCodec:
    return make_codec(name, pieces_of(LAYOUT), ChunkScratch(), device)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_residuals_are_the_hosts(name: str, kind: str) -> None:
    host, device = make(name, LAYOUT), _codec(name)
    assert device.max_bytes == host.max_bytes
    owed, left = np.zeros(host.entries, np.float32), torch.zeros(host.entries)
    sent, message = (np.zeros(host.max_bytes, np.uint8) for _ in range(2))
    for seed in range(1 if kind == "large" else 3):
        values = drawn(kind, host.entries, seed)
        used = host.encode(values, owed, sent)
        assert device.encode(torch.from_numpy(values), left, torch.from_numpy(message)) == len(
            message
        )
        expected, got, read = (np.zeros(host.entries, np.float32) for _ in range(3))
        host.add(sent[:used], expected)
        device.add(torch.from_numpy(message), torch.from_numpy(got))
        host.add(message, read)
        assert np.array_equal(got, expected)
        assert np.array_equal(read, expected)  # The host can read a device's message.
        assert np.array_equal(left.numpy(), owed)
        if name not in ("threshold", "adaptive"):
            assert np.array_equal(message[:used], sent[:used])
            assert used == len(message)


@pytest.mark.parametrize("name", NAMES)
def test_a_state_goes_on_on_the_host_and_back(name: str) -> None:
    codecs = [_codec(name, place) for place in (None, CPU, None, CPU, CPU)]
    one = _codec(name)
    owed = [torch.zeros(one.entries) for _ in range(2)]
    message = torch.zeros(one.max_bytes, dtype=torch.uint8)
    for seed, codec in enumerate(codecs):
        values = torch.from_numpy(drawn("heavy", one.entries, seed))
        if seed:
            codec.load_state(codecs[seed - 1].state())
        decoded = [torch.zeros(one.entries) for _ in range(2)]
        for each, left, into in zip((one, codec), owed, decoded, strict=True):
            each.encode(values, left, message)
            each.add(message, into)
        assert torch.equal(*decoded)
        assert torch.equal(*owed)
        assert torch.equal(one.state(), codec.state())


@pytest.mark.parametrize("name", NAMES)
def test_nothing_waits_for_the_device(name: str) -> None:
    """Tensors of torch's device `meta` have no values that could be read or waited for."""
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.zeros(3, device=META)[torch.tensor(1, device=META)]
    codec = _codec(name, META)
    assert isinstance(codec, DeviceCodec)
    parts = codec.parts(torch.zeros(codec.entries, device=META))
    assert {each.dtype for each in parts} == {torch.uint8}
    assert sum(map(len, parts)) == codec.max_bytes
    message = torch.empty(codec.max_bytes, dtype=torch.uint8, device=META)
    codec.add(message, torch.zeros(codec.entries, device=META))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("entry", [torch.nan, -torch.inf])
def test_an_entry_that_is_not_finite_is_refused_by_its_tensors_name(
    name: str, entry: float
) -> None:
    codec = _codec(name)
    (wide,) = (piece for piece in pieces_of(LAYOUT) if piece.name == "wide")
    values = torch.zeros(codec.entries)
    values[wide.stop - 1] = entry
    message = torch.zeros(codec.max_bytes, dtype=torch.uint8)
    with pytest.raises(DlioError, match=f"the gradient of wide .* {entry} and"):
        codec.encode(values, torch.zeros(codec.entries), message)


@pytest.mark.parametrize("name", NAMES)
def test_a_region_without_entries_has_an_empty_message(name: str) -> None:
    codec = make_codec(name, [], ChunkScratch(), CPU)
    empty = torch.zeros(0, dtype=torch.uint8)
    assert codec.encode(torch.zeros(0), torch.zeros(0), empty) == 0
    codec.add(empty, torch.zeros(0))
    codec.load_state(codec.state())


def test_bits_are_packed_as_by_numpy() -> None:
    bits = torch.rand(1003, generator=torch.Generator().manual_seed(0)) < 0.4
    assert packed(bits).tolist() == np.packbits(bits.numpy()).tolist()
    assert torch.equal(unpacked(packed(bits), 1003), bits.to(torch.uint8))
