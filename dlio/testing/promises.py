"""Names of a suite's tests: one per promise of the protocol that it checks."""

__all__ = ["promises_of"]


def promises_of(suite: type) -> list[str]:
    """Names of the test methods of a suite, its bases included, in alphabetical order."""
    return [name for name in dir(suite) if name.startswith("test_")]
