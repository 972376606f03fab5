"""Raw token files: without a header, with that of llm.c, and with an index of Megatron."""

import struct
from collections.abc import Sequence
from pathlib import Path

from tests.hostile.corpus.case import ANY, RIGHT, Ask, Case, Cases, Make
from tests.hostile.corpus.mutate import damaged, special_files

TOKENS = "a.bin"
INDEX = "a.idx"
_MOST = 2**63 - 1


def _numbers(count: int) -> bytes:
    return struct.pack(f"<{count}H", *(k * 37 % 500 for k in range(count)))


def sound(folder: Path) -> Ask:
    """Forty tokens without a header."""
    (folder / TOKENS).write_bytes(_numbers(40))
    return Ask("reader", str(folder / TOKENS), {"dtype": "uint16"})


def _head(count: int, magic: int = 20240520) -> bytes:
    return struct.pack("<iii", magic, 1, count) + bytes(1012)


def headed(folder: Path) -> Ask:
    """Forty tokens behind llm.c's header."""
    (folder / TOKENS).write_bytes(_head(40) + _numbers(40))
    return Ask("reader", str(folder / TOKENS))


def _index(
    lengths: Sequence[int],
    places: Sequence[int],
    counts: tuple[int, int] | None = None,
    kind: tuple[int, int] = (1, 8),
) -> bytes:
    """Return an index; `counts` are of sequences and documents, `kind` is version and type."""
    sequences, documents = counts or (len(lengths), len(lengths) + 1)
    return (
        b"MMIDIDX\0\0"
        + struct.pack("<QBQQ", *kind, sequences, documents)
        + struct.pack(f"<{len(lengths)}i{len(places)}q", *lengths, *places)
        + struct.pack(f"<{len(lengths) + 1}q", *range(len(lengths) + 1))
    )


def _indexed(index: bytes) -> Make:
    def make(folder: Path) -> Ask:
        (folder / TOKENS).write_bytes(_numbers(40))
        (folder / INDEX).write_bytes(index)
        return Ask("reader", str(folder / TOKENS))

    return make


megatron = _indexed(_index([15, 25], [0, 30]))
"""Two documents of forty tokens."""


def _alone(data: bytes, dtype: str | None = None) -> Make:
    def make(folder: Path) -> Ask:
        (folder / TOKENS).write_bytes(data)
        return Ask("reader", str(folder / TOKENS), {"dtype": dtype} if dtype else {})

    return make


def cases() -> Cases:
    """Return the cases of this format."""
    for name, make in (("plain", sound), ("headed", headed), ("indexed", megatron)):
        yield Case(f"tokens/{name}-sound", make, RIGHT, "40 samples")
        yield from damaged(f"tokens-{name}", make, TOKENS, 12)
        # A sparse file of another size is one without a header, too.
        yield from special_files(f"tokens-{name}", make, TOKENS, ANY)
    yield from damaged("tokens-index", megatron, INDEX, 24)
    yield from special_files("tokens-index", megatron, INDEX, ANY)
    indexes = {
        "other": b"PK\3\4" + bytes(100),
        "short": b"MMIDIDX\0\0",
        "version": _index([40], [0], kind=(2, 8)),
        "floats": _index([40], [0], kind=(1, 6)),
        "type": _index([40], [0], kind=(1, 255)),
        "many": _index([40], [0], counts=(2**63, 2**63)),
        "large": _index([40], [0], counts=(2**28, 1)),
        "documents": _index([40], [0], counts=(1, 2**64 - 1)),
        "none": _index([], []),
        "negative": _index([-1, 41], [0, -2]),
        "overlap": _index([20, 20], [0, 20]),
        "backwards": _index([20, 20], [40, 0]),
        "beyond": _index([20, 20], [0, _MOST]),
        "sum": _index([2**31 - 1] * 4, [0] * 4),
        "longer": _index([41], [0]),
        "wider": _index([40], [0], kind=(1, 5)),
    }
    for name, index in indexes.items():
        yield Case(f"tokens/index-{name}", _indexed(index))
    yield Case("tokens/empty", _alone(b"", "uint16"))
    yield Case("tokens/odd", _alone(bytes(41), "uint16"))
    yield Case("tokens/no-type", _alone(_numbers(40)))
    yield Case("tokens/counts-more", _alone(_head(2**31 - 1) + _numbers(40)))
    yield Case("tokens/counts-below-0", _alone(_head(-1) + _numbers(40)))
    yield Case("tokens/head-alone", _alone(_head(0)))
    yield Case("tokens/other-first-number", _alone(_head(40, 7) + _numbers(40)), RIGHT, "40 samp")
