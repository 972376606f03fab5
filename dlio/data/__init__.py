"""Sources, readers and their indexes: where samples come from."""

__all__: list[str] = []
