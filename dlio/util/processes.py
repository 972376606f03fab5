"""The states of processes, as the kernel tells them."""

__all__ = ["is_stopped", "process_state"]


def process_state(process: int) -> str:
    """Return the state of a process, as in /proc; X if there is none."""
    try:
        with open(f"/proc/{process}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "X"


def is_stopped(process: int) -> bool:
    """True if a process is stopped by a signal."""
    return process_state(process) == "T"
