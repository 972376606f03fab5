"""Units, files, private folders, shared memory, threads: what every room may use."""

__all__: list[str] = []
