"""The temporary folder of a job, by which its launcher and its ranks know it.

    <tmp>/dlio-job-<name>/alive    lock of the launcher

It is removed at the job's end. If the launcher is killed, the next job of this user removes it.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from dlio.util.folders import lock_file, open_below, remove_if_unheld
from dlio.util.trusted_files import closing_descriptor, open_file
from dlio.util.user_folders import parent_of
from dlio.util.whole_files import unwritable

PREFIX: Final = "dlio-job-"
"""Beginning of the folder's name; the job's name follows."""
_ALIVE: Final = "alive"


def is_job_folder(path: str) -> bool:
    """True if a folder is private to this user and was made for a job."""
    try:
        with (
            parent_of(path) as (above, name),
            closing_descriptor(open_below(above, name)) as folder,
        ):
            os.close(open_file(folder, _ALIVE, os.O_RDONLY))
    except OSError:
        return False
    return True


def name_of_job(folder: str) -> str:
    """Return the name of the job with this folder, by which users call it."""
    return os.path.basename(folder).removeprefix(PREFIX)


def begin_job(folder: str, ranks: int, spares: int) -> str:
    """Note in a new job's folder how many ranks it has; returns the job's name."""
    # Not at the top: most jobs have no spares, and start without numpy and torch.
    from dlio.comm.survival.active_ranks import RankRequest
    from dlio.comm.survival.rank_requests import write_wanted

    write_wanted(folder, RankRequest(0, ranks), ranks + spares)
    return name_of_job(folder)


@contextmanager
def open_job_folder() -> Iterator[str]:
    """Make the folder of a new job, and remove those of jobs whose launcher was killed.

    Raises UsageError if it cannot be made.
    """
    try:
        folder, lock = _swept_and_made()
    except OSError as error:
        raise unwritable(
            f"TMPDIR: {tempfile.tempdir or os.environ.get('TMPDIR')}", error
        ) from error
    try:
        yield folder.name
    finally:
        folder.cleanup()
        os.close(lock)


def _swept_and_made() -> tuple[tempfile.TemporaryDirectory[str], int]:
    """Return a new folder and its lock; removes those of jobs that have died. Raises OSError."""
    above = os.open(tempfile.gettempdir(), os.O_RDONLY | os.O_DIRECTORY)
    try:
        for entry in os.scandir(above):
            if entry.name.startswith(PREFIX):
                with suppress(OSError):
                    if entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                        remove_if_unheld(above, entry.name, _ALIVE)
    finally:
        os.close(above)
    return _made()


def _made() -> tuple[tempfile.TemporaryDirectory[str], int]:
    """Return a new folder and its lock; another job may remove it before it is locked."""
    while True:
        folder = tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True)
        inner = os.open(folder.name, os.O_RDONLY | os.O_DIRECTORY)
        try:
            lock = lock_file(inner, _ALIVE, shared=True)
        except FileNotFoundError:
            folder.cleanup()
            continue
        except OSError:
            folder.cleanup()
            raise
        finally:
            os.close(inner)
        if os.path.exists(os.path.join(folder.name, _ALIVE)):
            return folder, lock
        os.close(lock)
        folder.cleanup()
