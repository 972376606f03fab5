"""`dlio bench storage`: a storage system measured as training reads it."""

__all__: list[str] = []
