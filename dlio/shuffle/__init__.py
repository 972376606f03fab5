"""Samples on their way between ranks."""

__all__: list[str] = []
