"""The store that Zarr arrays are read through: regular files, and bounded decompression.

Zarr and its codecs trust what they read. So before a codec sees a chunk, its stored bytes and those
that it would become are compared with the size that the array's metadata declare.
"""

import asyncio
import os
from collections.abc import Iterable
from typing import Any, Final, Self, cast

from zarr.abc.store import (
    ByteRequest,
    OffsetByteRequest,
    RangeByteRequest,
    SuffixByteRequest,
)
from zarr.core.buffer import Buffer, BufferPrototype, default_buffer_prototype
from zarr.storage import FsspecStore, LocalStore

from dlio.data.requests import request
from dlio.data.source import ReadErrors, Source
from dlio.data.web_requests import web_options
from dlio.errors import SourceError
from dlio.util.decompression_limits import exceeds, is_cut_off

METADATA: Final = ("zarr.json", ".zgroup", ".zarray", ".zattrs", ".zmetadata")
"""Names of the files that describe arrays and groups."""
_MAX_METADATA: Final = 64 << 20
_SLACK: Final = 1 << 16
_EXPANSION: Final = 8
"""Filters may shrink or widen what a codec has decompressed."""


class _ArrayLimits:
    """Known sizes of arrays, by their paths in the store."""

    def __init__(self) -> None:
        self._arrays: list[tuple[str, int, int, str]] = []
        self._whole: list[str] = []

    def add(self, name: str, stored: int, chunk: int, codec: str) -> None:
        """Limit the chunks of the array at a path: `stored` bytes of a shard, or of a chunk if it
        has no shards, which go through a codec first, and bytes of a `chunk`.
        """
        prefix = f"{name}/" if name else ""
        self._arrays.append((prefix, 2 * stored + _SLACK, _EXPANSION * chunk + _SLACK, codec))
        self._arrays.sort(key=lambda each: -len(each[0]))

    def refuse_gaps(self, name: str) -> None:
        """Have chunks that are missing of the array at a path be an error, also once it is open."""
        self._whole.append(f"{name}/" if name else "")

    def check_absent(self, key: str, shown: str) -> None:
        """Raise SourceError if a key that is not stored is a chunk that has to be."""
        if not key.endswith(METADATA) and any(map(key.startswith, self._whole)):
            raise SourceError(
                f"{shown} is missing: restore it, or use the fill value for missing chunks with "
                'missing="fill"'
            )

    def array_of(self, key: str) -> str | None:
        """Return the path of the array that a key is a chunk of; None for other keys."""
        if key.endswith(METADATA):
            return None
        return next((row[0] for row in self._arrays if key.startswith(row[0])), None)

    def witnesses(self, array: str) -> list[str]:
        """Return the keys of which an array that is there has one at least."""
        return [f"{folder}{name}" for folder in dict.fromkeys((array, "")) for name in METADATA]

    def most(self, key: str) -> int:
        """Return the most bytes that may be stored under a key."""
        return next((row[1] for row in self._arrays if key.startswith(row[0])), _MAX_METADATA)

    def check(self, key: str, data: bytes) -> None:
        """Check stored bytes before a codec decompresses them. Raises SourceError."""
        if not data and not key.endswith(METADATA):
            # In a shard, zarr takes no bytes for a chunk that was never written.
            raise SourceError(f"{key} is cut off: a chunk of it has no bytes: restore it")
        for prefix, _, most, codec in self._arrays:
            if key.startswith(prefix):
                if is_cut_off(codec, data):
                    raise SourceError(f"{key} is cut off after {len(data)} bytes: restore it")
                if exceeds(codec, data, most):
                    raise SourceError(
                        f"{key} becomes more than the bytes of a chunk when it is decompressed, "
                        "which is a way to take all memory: refused"
                    )
                return


class LocalFiles(LocalStore):
    """A store of local files. Links out of it are refused unless the user wants them."""

    limits: _ArrayLimits
    source: Source

    @classmethod
    def at(cls, source: Source) -> Self:
        """Return the store at a source's root."""
        store = cls(source.root, read_only=True)
        store.limits, store.source = _ArrayLimits(), source
        return store

    def with_read_only(self, read_only: bool = False) -> Self:
        store = super().with_read_only(read_only)
        store.limits, store.source = self.limits, self.source
        return store

    async def get(
        self,
        key: str,
        prototype: BufferPrototype | None = None,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        return await asyncio.to_thread(
            self.get_sync, key, prototype=prototype, byte_range=byte_range
        )

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        return [await self.get(key, prototype, part) for key, part in key_ranges]

    def get_sync(
        self,
        key: str,
        *,
        prototype: BufferPrototype | None = None,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        """Read a key as `get` does, without an event loop."""
        with request():
            data = self._read(key, byte_range)
        made = prototype or default_buffer_prototype()
        return None if data is None else made.buffer.from_bytes(data)

    def _read(self, key: str, part: ByteRequest | None) -> bytes | None:
        path = self.source.path(key)
        with ReadErrors(path):
            try:
                descriptor = self.source.open_regular(path)
            except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
                self.limits.check_absent(key, path)
                self._check_there(key)
                return None
        try:
            size = os.fstat(descriptor).st_size
            begin, end = _span(part, size)
            if end - begin > self.limits.most(key):
                raise SourceError(f"{path} of {size} bytes is larger than a chunk: refused")
            data = os.pread(descriptor, end - begin, begin)
        finally:
            os.close(descriptor)
        self.limits.check(key, data)
        return data

    def _check_there(self, key: str) -> None:
        """Raise SourceError if the array of a chunk that is not stored is gone itself, as when a
        disk is unmounted: it would be read as fill values."""
        array = self.limits.array_of(key)
        if array is not None and not any(
            os.path.lexists(self.source.path(each)) for each in self.limits.witnesses(array)
        ):
            raise _gone(self.source, array)


class RemoteFiles(FsspecStore):
    """A store behind fsspec."""

    limits: _ArrayLimits
    archive: Source
    """The store's place."""
    archived: bool
    """True for a store in a zip archive."""
    seen: dict[str, str]
    """Of each array with missing chunks, the key that was there when one was looked for."""

    @classmethod
    def at(cls, source: Source) -> Self:
        """Return the store at a URL."""
        options = web_options(source.url)
        store: Any = cls.from_url(source.url, storage_options=options, read_only=True)
        store.limits, store.archive = _ArrayLimits(), source
        store.archived, store.seen = source.url.startswith("zip://"), {}
        return cast("Self", store)

    async def get(
        self,
        key: str,
        prototype: BufferPrototype,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        if self.archived:
            # A compressed member is decompressed as a whole when it is read.
            try:
                about = await self.fs._info(f"{self.path}/{key}".lstrip("/"))
            except FileNotFoundError:
                self.limits.check_absent(key, key)
                return None
            # Memory is taken for the bytes that the archive says it has of it, before they come.
            size = max(int(about["size"]), int(about.get("compress_size") or 0) - _SLACK)
            if size > self.limits.most(key):
                raise SourceError(f"{key} of {size} bytes is larger than a chunk: refused")
            # In place, where it is stored without compression: zarr compresses its chunks itself.
            begin, end = _span(byte_range, int(about["size"]))
            data: Buffer | None = prototype.buffer.from_bytes(
                await asyncio.to_thread(self.archive.read, key, begin, end - begin)
            )
        else:
            data = await super().get(key, prototype, byte_range)
        if data is None:
            self.limits.check_absent(key, key)
            await self._check_there(key)
            return None
        self.limits.check(key, data.to_bytes())
        return data

    async def _check_there(self, key: str) -> None:
        """Do as `LocalFiles._check_there`, mostly with one request."""
        array = self.limits.array_of(key)
        if array is None:
            return
        for each in filter(None, (self.seen.get(array), *self.limits.witnesses(array))):
            if await self.exists(each):
                self.seen[array] = each
                return
        raise _gone(self.archive, array)


def _gone(source: Source, array: str) -> SourceError:
    return SourceError(
        f"{source.path(array.rstrip('/'))} is not there any more: restore it, or mount its disk "
        "again"
    )


def _span(part: Any, size: int) -> tuple[int, int]:
    """Return the first byte of a request and the one behind its last."""
    if isinstance(part, RangeByteRequest):
        return min(part.start, size), max(min(part.end, size), min(part.start, size))
    if isinstance(part, OffsetByteRequest):
        return min(part.offset, size), size
    if isinstance(part, SuffixByteRequest):
        return max(0, size - part.suffix), size
    return 0, size
