"""Users' own functions of samples, with random numbers that belong to the sample.

A transform that dlio does not know draws from generators of its own choice. While a sample is made,
they give numbers that follow from (seed, epoch, sample):

- calls of torch without `generator=` get one of the sample's; other threads do not notice, since
  torch's modes belong to a thread. Operations without such an argument, as dropout, are left alone;
- the global generators of `random` and numpy, and generators that the function holds, are shared
  between threads. Functions that use them are found by their code, called one at a time, and the
  global generators are put back afterwards;
- transforms of dlio draw the sample's numbers themselves.

Functions that seed the global generators themselves, as for a picture and its mask, are called one
at a time too, with torch's own generator: in worker processes, which the loader chooses for them.
"""

import dis
import random
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Final

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from dlio.image.random_source import CROP_STREAMS, KeyedRandom, drawing
from dlio.util.forks import new_rlock
from dlio.util.object_graph import reachable
from dlio.util.shared_state import shared_state_of

_STREAM: Final = 62
"""Stream of the functions' random numbers; the next one is that of shared generators."""
_DRAWING: Final = frozenset(
    "rand randn randint randperm bernoulli multinomial normal poisson _sample_dirichlet "
    "_standard_gamma uniform_ normal_ random_ exponential_ cauchy_ geometric_ log_normal_ "
    "bernoulli_".split()
)
"""Functions and methods of torch that take `generator=`."""
_LIKE: Final = {"rand_like": "uniform_", "randn_like": "normal_", "randint_like": "random_"}
"""Functions that only newer versions of torch give a generator, and methods that do the same."""
_HELD: Final = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
_GLOBAL: Final = (
    getattr(random.random, "__self__", None),
    getattr(np.random.random, "__self__", None),
)
"""The generators behind the functions of `random` and of `numpy.random`."""
_MASK_32: Final = 2**32 - 1

_lock = new_rlock()
"""Held while shared generators are those of one sample."""


class SeededFunctions:
    """The generators of a user's functions. Thread-safe. The functions are any objects that are
    called for each sample, or hold such objects."""

    def __init__(self, functions: Iterable[object]) -> None:
        functions = tuple(functions)
        objects = [each for function in functions for each in reachable(function)]
        self._held = [each for each in objects if isinstance(each, _HELD)]
        codes = [each for each in objects if isinstance(each, types.FunctionType)]
        self._seeds = shared_state_of(functions, only_seeds=True) is not None
        self._shares = self._seeds or bool(self._held) or any(map(_draws_globally, codes))
        self.drew = False
        """True once a random number has been drawn, as far as can be seen."""

    @contextmanager
    def sample(self, seed: int, epoch: int, sample: int, crop: int = 0) -> Iterator[None]:
        """Have functions that this thread calls draw the random numbers of a sample's crop."""
        stream = _STREAM + crop * CROP_STREAMS

        def make() -> KeyedRandom:
            self.drew = True
            return KeyedRandom(seed, epoch, sample, stream)

        # Seeds that functions set are those of torch's own generator.
        of_torch = nullcontext() if self._seeds else _SampleGenerator(make)
        with drawing(make), of_torch:
            if not self._shares:
                yield
                return
            self.drew = True
            held = [*self._held, torch.default_generator] if self._seeds else self._held
            with _lock, _shared(KeyedRandom(seed, epoch, sample, stream + 1), held):
                yield


class _SampleGenerator(TorchFunctionMode):
    """Gives torch's random functions a generator, made at the first use."""

    def __init__(self, make: Callable[[], KeyedRandom]) -> None:
        super().__init__()
        self._make = make
        self._generator: torch.Generator | None = None

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _LIKE and _on_cpu(args, given):
            likeness = torch.empty_like(args[0], **given)
            return getattr(likeness, _LIKE[name])(*args[1:], generator=self._of_sample())
        if name in _DRAWING and given.get("generator") is None and _on_cpu(args, given):
            given = {**given, "generator": self._of_sample()}
        return func(*args, **given)

    def _of_sample(self) -> torch.Generator:
        if self._generator is None:
            self._generator = torch.Generator().manual_seed(self._make().word() >> 1)
        return self._generator


def _on_cpu(args: tuple[Any, ...], given: dict[str, Any]) -> bool:
    device = given.get("device")
    if device is None:
        device = next((a.device for a in args if isinstance(a, torch.Tensor)), "cpu")
    return torch.device(device).type == "cpu"


@contextmanager
def _shared(draws: KeyedRandom, held: Sequence[Any]) -> Iterator[None]:
    """Set shared generators to states of a sample; put the global ones back afterwards."""
    before = random.getstate(), np.random.get_state()  # noqa: NPY002 - the function's choice
    of_torch = torch.get_rng_state() if torch.default_generator in held else None
    random.seed(draws.word())
    np.random.seed(draws.word() & _MASK_32)  # noqa: NPY002
    for each in held:
        _reseed(each, draws.word())
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])  # noqa: NPY002
        if of_torch is not None:
            torch.set_rng_state(of_torch)


def _reseed(generator: Any, word: int) -> None:
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        bits.state = type(bits)(word).state
    elif isinstance(generator, torch.Generator):
        generator.manual_seed(word >> 1)
    else:
        generator.seed(word & _MASK_32)


def _draws_globally(function: types.FunctionType) -> bool:
    """True if code refers to the global generators of `random` or numpy."""
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
        for name in code.co_names:
            value = function.__globals__.get(name)
            if value is random or value is np.random or _is_global_method(value):
                return True
            if value is np and "random" in code.co_names:
                return True
        if any(name in ("random", "numpy") for name in code.co_names):
            imported = {i.argval for i in dis.get_instructions(code) if i.opname == "IMPORT_NAME"}
            if imported & {"random", "numpy.random"}:
                return True
            if "numpy" in imported and "random" in code.co_names:
                return True
    return False


def _is_global_method(value: object) -> bool:
    """True for functions such as random.choice, imported by name."""
    if isinstance(value, type | types.ModuleType):
        return False
    owner = getattr(value, "__self__", None)
    return owner is not None and any(owner is each for each in _GLOBAL)
