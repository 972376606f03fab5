"""Sizes are read and written as people do."""

import pytest

from dlio.errors import UsageError
from dlio.storage.tier_spec import TierSpec, parse_tiers
from dlio.util.units import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [("0B", 0), ("512B", 512), ("2GiB", 2 << 30), (" 1.5 TiB ", 3 << 39), ("3KiB", 3072)],
)
def test_sizes_with_binary_units_are_read(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "2", "2XB", "-1GiB", "GiB", "1e3MiB", "2 gibs", "2GBps"])
def test_anything_else_is_refused_with_the_text_quoted(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size"):
        parse_bytes(text)


def test_sizes_are_written_with_three_digits() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1536, 5 << 20, 300 << 30)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "5 MiB",
        "300 GiB",
    ]


def test_tiers_are_read_fastest_first() -> None:
    ram, disk = parse_tiers("ram:2GiB, /local/scratch:20GiB")
    assert ram == TierSpec("ram", "/dev/shm", 2 << 30)
    assert disk == TierSpec("disk", "/local/scratch", 20 << 30)
    assert str(ram) == "ram:2GiB"
    assert parse_tiers("none") == []
    deep = parse_tiers("ram:64GiB,pmem:/mnt/pmem:512GiB,/nvme:2TiB,/bb:10TiB")
    assert [tier.root for tier in deep] == ["/dev/shm", "/mnt/pmem", "/nvme", "/bb"]


@pytest.mark.parametrize("text", ["ram", "ram:", ":2GiB", "ram:2GiB,ram:1GiB", "ram:many"])
def test_tiers_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_tiers(text)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("1GiB", 2**30),
        ("1G", 2**30),
        ("1g", 2**30),
        ("1gib", 2**30),
        ("1GB", 10**9),
        ("1.5 GB", 1_500_000_000),
        ("64K", 2**16),
        ("64kB", 64_000),
        ("2TB", 2 * 10**12),
        ("7b", 7),
    ],
)
def test_units_are_those_of_coreutils(text: str, count: int) -> None:
    assert parse_bytes(text) == count
    assert parse_tiers(f"ram:{text}")[0].capacity == count


def test_a_size_has_a_limit() -> None:
    assert parse_bytes(f"{2**62}B") == 2**62
    with pytest.raises(UsageError, match="at most"):
        parse_bytes("99999999TiB")
