"""Names of a suite's tests, and a way to run them without pytest: on this rank, for example."""

import sys
import traceback

import pytest


def promises_of(suite: type) -> list[str]:
    """Names of the test methods of a suite, its bases included, in alphabetical order."""
    return [name for name in dir(suite) if name.startswith("test_")]


def run_promises(suite: object, *fixtures: object, quiet: bool = False) -> list[str]:
    """Run a suite's tests one after another, up to the first that fails.

    On ranks, every rank runs them in the same order; after a failure the others wait in vain.

    Args:
        suite: an instance of a suite.
        fixtures: arguments of each test method.
        quiet: do not print the promises that are kept.

    Returns the promises that are not kept: none, or one.
    """
    for promise in promises_of(type(suite)):
        name = promise.removeprefix("test_").replace("_", " ")
        try:
            getattr(suite, promise)(*fixtures)
        except pytest.skip.Exception as skipped:
            said = f"skipped: {name} ({skipped})"
        except Exception:
            print(f"broken: {name}\n{traceback.format_exc()}", file=sys.stderr, flush=True)
            return [promise]
        else:
            said = f"kept: {name}"
        if not quiet:
            print(said, flush=True)
    return []
