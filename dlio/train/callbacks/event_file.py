"""An event file of TensorBoard, written by the thread that adds to it: it learns of a full disk."""

import os
import socket
import time
from collections.abc import Sequence
from typing import IO, Any, Final, Self, cast

import torch

from dlio.util.trusted_files import closing_descriptor, open_new
from dlio.util.user_folders import make_folders

_FLUSH_S: Final = 30.0
_FIRST_BIN: Final = 1e-12
_LAST_BIN: Final = 1e20
_BIN_RATIO: Final = 1.1


class EventFile:
    """A new file of events in a folder, as SummaryWriter makes them; a context manager.

    All methods raise OSError if the file cannot be written.
    """

    def __init__(self, folder: str, purge: int | None = None) -> None:
        """Events of step `purge` and later steps in older files of the folder do not count.

        Raises ImportError if TensorBoard is not installed.
        """
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter
        from torch.utils.tensorboard import summary

        self._summary: Any = summary
        self._bins = _bins()
        self._file = _open(folder)
        self._records = RecordWriter(self._file)
        self._flushed = time.monotonic()
        try:
            self._add(file_version="brain.Event:2")
            if purge is not None:
                self._add(step=purge, file_version="brain.Event:2")
                self._add(step=purge, session_log=SessionLog(status=SessionLog.START))
            self.flush()
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add_scalar(self, name: str, value: float, step: int) -> None:
        """Add a value of a curve."""
        self._add(step=step, summary=self._summary.scalar(name, value))

    def add_text(self, name: str, text: str, step: int) -> None:
        """Add a text."""
        self._add(step=step, summary=self._summary.text(name, text))

    def add_histogram(self, name: str, values: torch.Tensor, step: int) -> None:
        """Add the histogram of an array, which is on the CPU."""
        self._add(step=step, summary=self._summary.histogram(name, values, self._bins))

    def flush(self) -> None:
        """Write what was added."""
        self._file.flush()
        self._flushed = time.monotonic()

    def _add(self, **fields: object) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        event = Event(wall_time=time.time(), **fields)
        self._records.write(event.SerializeToString())
        if time.monotonic() > self._flushed + _FLUSH_S:
            self.flush()


def _open(folder: str) -> IO[bytes]:
    host = socket.gethostname()
    name = f"events.out.tfevents.{int(time.time()):010d}.{host}.{os.getpid()}.{time.monotonic_ns()}"
    if "://" in folder:
        from tensorboard.compat import tf

        tf.io.gfile.makedirs(folder)
        return cast(IO[bytes], tf.io.gfile.GFile(os.path.join(folder, name), "wb"))
    with closing_descriptor(make_folders(folder)) as inside:
        return open_new(inside, name)


def _bins() -> Sequence[float]:
    """Return the limits of a histogram's bins, those of TensorBoard's own writer."""
    limits = [_FIRST_BIN]
    while limits[-1] < _LAST_BIN:
        limits.append(limits[-1] * _BIN_RATIO)
    del limits[-1]
    return [-limit for limit in reversed(limits)] + [0.0] + limits
