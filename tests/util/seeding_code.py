"""Code of another module that seeds the global generator, as users have it in `utils.py`."""

import contextlib
import functools
import random
from collections.abc import Callable, Iterator
from typing import Any


def seed_all(number: int) -> None:
    random.seed(number)


def harmless(number: int) -> int:
    return number


@contextlib.contextmanager
def seeded(number: int) -> Iterator[None]:
    state = random.getstate()
    random.seed(number)
    yield
    random.setstate(state)


def alike(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def seeded_first(*given: Any) -> Any:
        random.seed(given[-1])
        return function(*given)

    return seeded_first


@alike
def jitter(value: int) -> float:
    return value + random.random()


@functools.lru_cache
def remembered(number: int) -> float:
    random.seed(number)
    return random.random()


class InContext:
    """A context in which numbers are those of a seed."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __enter__(self) -> None:
        random.seed(self.number)

    def __exit__(self, *_: object) -> None:
        random.seed()


class Decorating(contextlib.ContextDecorator, InContext):
    """The same as a decorator."""


class MadeFromSeed:
    """Seeds when it is made."""

    def __init__(self, number: int) -> None:
        random.seed(number)

    def draw(self) -> float:
        return random.random()


class _Joint:
    def __call__(self, value: object) -> object:
        random.seed(3)
        return self.apply(value)

    def apply(self, value: object) -> object:
        raise NotImplementedError


class Flip(_Joint):
    """Seeds in the class that it is based on."""

    def apply(self, value: object) -> object:
        return value


class Helpers:
    """Methods of a class as a name for functions."""

    @staticmethod
    def seed_here(number: int) -> None:
        random.seed(number)

    @classmethod
    def seed_class(cls, number: int) -> None:
        random.seed(number)


flip = Flip()
seed_three = functools.partial(seed_all, 3)
BY_NAME = {"flip": flip}
