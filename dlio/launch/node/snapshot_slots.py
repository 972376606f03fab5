"""The state of one writer in shared memory, whole or not at all.

    <folder>/<writer>.0, <writer>.1     two slots, written in turns

    head    magic, turn, bytes of text, bytes of data, xxh3 of text and data; written last
    text    whatever describes the data
    data

A writer that is killed meanwhile leaves the other slot, which is whole. Turns are numbers that
grow; a reader takes the newest whole slot, or that of a certain turn.
"""

import mmap
import os
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

import xxhash

from dlio.util.closable import Closable
from dlio.util.limits import open_regular
from dlio.util.whole_files import open_own, remove_file

_HEAD: Final = struct.Struct("<8sqqqQ")
_MAGIC: Final = b"dliosnap"
_PAGE: Final = 4096


@dataclass(frozen=True, slots=True)
class StoredSnapshot:
    """A slot that is whole."""

    turn: int
    text: bytes
    data: memoryview
    """Stays readable when the slot is written again, by the same writer with other contents. What
    a reader writes to it is its own."""


class SnapshotSlots(Closable):
    """The two slots of a writer in a node's folder of snapshots. The writer owns and closes them.

    It goes on from the turn `after`. Later ones are of a course that nobody goes on with: they are
    overwritten first.
    """

    def __init__(self, folder: str, writer: str, after: int = sys.maxsize) -> None:
        self._paths = [os.path.join(folder, f"{writer}.{slot}") for slot in (0, 1)]
        self._maps: list[mmap.mmap | None] = [None, None]
        self._next = 0
        slots = [_read(path, check=False) for path in self._paths]
        turns = [each.turn if each is not None and each.turn <= after else -1 for each in slots]
        if turns[0] > turns[1]:
            self._next = 1

    @contextmanager
    def writing(self, turn: int, text: bytes, size: int) -> Iterator[memoryview]:
        """Give memory of `size` bytes to write to; the slot is whole when the block ends.

        It stays invalid if the block raises.
        """
        where = _data_at(len(text))
        memory = self._sized(where + size)
        slot, self._next = self._next, 1 - self._next
        view = memoryview(memory)
        try:
            view[: _HEAD.size] = bytes(_HEAD.size)
            view[_HEAD.size : _HEAD.size + len(text)] = text
            data = view[where : where + size]
            try:
                yield data
                digest = _digest(text, data)
                _HEAD.pack_into(memory, 0, _MAGIC, turn, len(text), size, digest)
            except BaseException:
                self._next = slot
                raise
            finally:
                data.release()
        finally:
            view.release()

    def close(self) -> None:
        """Unmap the slots; their files stay."""
        for memory in self._maps:
            if memory is not None:
                with suppress(BufferError):
                    memory.close()
        self._maps = [None, None]

    def _sized(self, size: int) -> mmap.mmap:
        """Return the memory of the next slot, with at least `size` bytes."""
        memory = self._maps[self._next]
        if memory is not None and len(memory) >= size:
            return memory
        size = -(-size * 5 // 4 // _PAGE) * _PAGE  # The text grows from epoch to epoch.
        path = self._paths[self._next]
        remove_file(path)
        descriptor = open_own(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            os.posix_fallocate(descriptor, 0, size)  # Touching full memory kills the process.
            memory = self._maps[self._next] = mmap.mmap(descriptor, size)
        except BaseException:
            remove_file(path)
            raise
        finally:
            os.close(descriptor)
        return memory


def stored(folder: str, writer: str, check: bool = True) -> list[StoredSnapshot]:
    """Return a writer's whole slots, the newest first; unchecked where another process has."""
    slots = [_read(os.path.join(folder, f"{writer}.{slot}"), check) for slot in (0, 1)]
    return sorted((each for each in slots if each is not None), key=lambda each: -each.turn)


def writers(folder: str) -> list[str]:
    """Return the names of the writers in a folder."""
    names = {name.rpartition(".")[0] for name in os.listdir(folder) if name[-2:] in (".0", ".1")}
    return sorted(names)


def newest_turn(folder: str) -> int:
    """Return the newest turn of any writer, without checking the data; -1 if there is none."""
    names = [name for name in os.listdir(folder) if name[-2:] in (".0", ".1")]
    slots = [_read(os.path.join(folder, name), check=False) for name in names]
    return max((slot.turn for slot in slots if slot is not None), default=-1)


def _read(path: str, check: bool) -> StoredSnapshot | None:
    """Return a slot; None if it is not whole."""
    try:
        descriptor = open_regular(path, os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        memory = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError):
        return None
    finally:
        os.close(descriptor)
    if len(memory) < _HEAD.size:
        return None
    magic, turn, length, size, digest = _HEAD.unpack_from(memory)
    where = _data_at(length)
    if magic != _MAGIC or length < 0 or size < 0 or where + size > len(memory):
        return None
    view = memoryview(memory)
    text, data = bytes(view[_HEAD.size : _HEAD.size + length]), view[where : where + size]
    if check and _digest(text, data) != digest:
        return None
    return StoredSnapshot(turn, text, data)


def _data_at(text: int) -> int:
    """Position of the data behind a text of some bytes: a multiple of 64."""
    return -(-(_HEAD.size + text) // 64) * 64


def _digest(text: bytes, data: memoryview) -> int:
    digest = xxhash.xxh3_64(text)
    digest.update(data)
    return digest.intdigest()
