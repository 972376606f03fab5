"""Tensors written by `write_tensors` are read by torch, whatever their shape, type and strides."""

import errno
import io
import os
from pathlib import Path

import pytest
import torch

from dlio.train.checkpoint.rank_parts import write_tensors


def _tensors() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    whole = torch.randn(1000, 7, generator=random)
    return {
        "plain": whole,
        "transposed": torch.randn(30, 50, generator=random).t(),
        "channels last": torch.randn(2, 3, 5, 7).to(memory_format=torch.channels_last),
        "part of another": whole[3:5],
        "every second": whole[:, ::2],
        "expanded": torch.ones(1).expand(5),
        "scalar": torch.tensor(7),
        "empty": torch.zeros(0, 3),
        "bfloat16": torch.randn(33, generator=random).bfloat16(),
        "complex": torch.randn(9, dtype=torch.complex64),
        "boolean": torch.tensor([True, False, True]),
        "bytes": torch.arange(255, dtype=torch.uint8),
        "larger than a block": torch.randn(3 << 20, generator=random),
        "parameter": torch.nn.Parameter(torch.randn(4, generator=random)),
    }


def test_torch_reads_each_tensor_at_its_place(tmp_path: Path) -> None:
    path, tensors = tmp_path / "__0_0.distcp", _tensors()
    places = write_tensors(str(path), tensors)
    data = path.read_bytes()
    assert sum(length for _, length in places.values()) == len(data)
    for name, (offset, length) in places.items():
        read = torch.load(io.BytesIO(data[offset : offset + length]), weights_only=True)
        assert torch.equal(read, tensors[name]), name
        assert read.dtype is tensors[name].dtype


def test_a_part_of_a_tensor_is_written_without_the_rest(tmp_path: Path) -> None:
    whole = torch.zeros(1 << 20)
    places = write_tensors(str(tmp_path / "x"), {"part": whole[:10]})
    assert places["part"][1] < 4096


def test_an_older_longer_file_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "x"
    write_tensors(str(path), {"a": torch.ones(1 << 16)})
    places = write_tensors(str(path), {"a": torch.ones(3)})
    assert path.stat().st_size == places["a"][1]


def test_writes_that_take_a_part_go_on_with_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:70_000]))
    test_torch_reads_each_tensor_at_its_place(tmp_path)


def test_the_error_of_a_full_disk_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match=r"No space left.*__0_0\.distcp") as raised:
        write_tensors(str(tmp_path / "__0_0.distcp"), _tensors())
    assert raised.value.errno == errno.ENOSPC


def test_no_page_that_is_still_written_to_is_handed_to_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranges: list[tuple[int, int]] = []

    def advise(descriptor: int, offset: int, length: int, advice: int) -> None:
        ranges.append((offset, length))

    monkeypatch.setattr(os, "posix_fadvise", advise)
    path = tmp_path / "x"
    write_tensors(str(path), {name: torch.ones(5_000_001) for name in "abc"})
    assert len(ranges) >= 3
    ends = [offset + length for offset, length in ranges]
    assert [offset for offset, _ in ranges] == [0, *ends[:-1]]  # Each byte once, in order.
    assert all(end % os.sysconf("SC_PAGE_SIZE") == 0 for end in ends)
    assert ends[-1] > path.stat().st_size - (16 << 20)
