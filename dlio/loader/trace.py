"""A trace of the pipeline, for chrome://tracing and ui.perfetto.dev."""

import os
import threading
import time
from typing import Any

from dlio.util.files import write_json

_MOST: int = 500_000
"""Spans that are kept; a pass of a million samples is not what one looks at."""


class Spans:
    """What threads did from when to when. Thread-safe; in memory until `write`."""

    def __init__(self) -> None:
        self._rows: list[tuple[str, float, float, int, str, dict[str, Any]]] = []
        self._lock = threading.Lock()
        self._origin = time.perf_counter()

    def add(self, name: str, began: float, **details: Any) -> None:
        """A span of this thread, from `began` (time.perf_counter) to now."""
        thread = threading.current_thread()
        row = (name, began, time.perf_counter(), threading.get_native_id(), thread.name, details)
        with self._lock:
            if len(self._rows) < _MOST:
                self._rows.append(row)

    def write(self, path: str, rank: int) -> None:
        """Write what there is, as JSON. Raises UsageError when that cannot be written."""
        with self._lock:
            rows = list(self._rows)
        names = {thread: name for _, _, _, thread, name, _ in rows}
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "thread_name", "pid": rank, "tid": tid, "args": {"name": name}}
            for tid, name in names.items()
        ]
        events.append(
            {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
        )
        events += [
            {
                "ph": "X",
                "name": name,
                "cat": "dlio",
                "pid": rank,
                "tid": tid,
                "ts": round(1e6 * (began - self._origin), 1),
                "dur": round(1e6 * (ended - began), 1),
                "args": details,
            }
            for name, began, ended, tid, _, details in rows
        ]
        write_json(path, {"traceEvents": events, "displayTimeUnit": "ms"})


def path_of(path: str, rank: int, size: int) -> str:
    """The file of a rank: `trace.json`, or `trace.3.json` among several."""
    if size == 1:
        return path
    stem, extension = os.path.splitext(path)
    return f"{stem}.{rank}{extension}"
