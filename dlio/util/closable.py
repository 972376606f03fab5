"""Base of classes that own something, and let go of it at the end of a `with` block."""

from abc import ABC, abstractmethod
from typing import Self


class Closable(ABC):
    """A context manager that gives itself, and closes itself at the block's end."""

    __slots__ = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Let go of all that this object owns."""
