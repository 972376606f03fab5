"""A trace of the pipeline, for chrome://tracing and ui.perfetto.dev."""

import os
import threading
import time
from typing import Any

from dlio.util.arguments import PathText
from dlio.util.whole_files import write_json

_MOST: int = 500_000
"""Most spans of a trace; viewers cannot show more anyway."""


class Spans:
    """Beginning and end of the threads' pieces of work. Thread-safe; in memory until `write`."""

    def __init__(self) -> None:
        self._rows: list[tuple[str, float, float, int, str, dict[str, Any]]] = []
        self._lock = threading.Lock()
        self._origin = time.perf_counter()

    def add(self, name: str, began: float, **details: int | str) -> None:
        """Add a span of this thread, from `began` (time.perf_counter) to now."""
        thread = threading.current_thread()
        row = (name, began, time.perf_counter(), threading.get_native_id(), thread.name, details)
        with self._lock:
            if len(self._rows) < _MOST:
                self._rows.append(row)

    def write(self, path: str, rank: int) -> None:
        """Write the spans as JSON in the format of Chrome's trace viewer. Raises UsageError when
        the file cannot be written."""
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


def path_of(path: PathText, rank: int, size: int) -> str:
    """Return the path of a rank's trace: `trace.json`, or `trace.3.json` with several ranks."""
    path = os.fspath(path)
    if size == 1:
        return path
    stem, extension = os.path.splitext(path)
    return f"{stem}.{rank}{extension}"
