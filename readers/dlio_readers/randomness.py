"""Signs that a data set returns other values each time: see `MapStyleReader`."""

import dis
import random
import types
from typing import Any, Final

import numpy as np

from dlio.util.object_graph import reachable

_UNSEEDED: Final = ("default_rng", "RandomState", "Random", "SystemRandom", "uuid4", "seed")
"""Called without arguments, these take entropy of the system."""
_ENTROPY: Final = ("urandom", "token_bytes", "token_hex", "getrandbits", "SystemRandom")
_PASSED_OVER: Final = ("PRECALL", "PUSH_NULL", "CACHE", "EXTENDED_ARG", "NOP")


class RandomState:
    """The state of the generators of random numbers that a data set may use.

    Other threads of the process may use the global ones too: that they have advanced is a sign,
    and not a proof.

    Args:
        data: the data set.
    """

    def __init__(self, data: object) -> None:
        kinds = (random.Random, np.random.Generator, np.random.RandomState)
        self._held: list[Any] = [each for each in reachable(data) if isinstance(each, kinds)]
        self._held += [each for each in reachable(data) if type(each).__name__ == "Generator"]
        self._before = self._states()

    def advanced(self) -> bool:
        """True if one of them has been used since."""
        return self._states() != self._before

    def _states(self) -> list[object]:
        import torch

        states: list[object] = [
            random.getstate(),
            _key_of(np.random.get_state(legacy=False)),  # noqa: NPY002 - the data set's choice
            torch.get_rng_state().numpy().tobytes(),
        ]
        for each in self._held:
            if isinstance(each, random.Random):
                states.append(each.getstate())
            elif isinstance(each, np.random.RandomState):
                states.append(_key_of(each.get_state(legacy=False)))
            elif isinstance(each, np.random.Generator):
                states.append(repr(each.bit_generator.state))
            elif isinstance(each, torch.Generator):
                states.append(each.get_state().numpy().tobytes())
        return states


def _key_of(state: Any) -> tuple[bytes, int]:
    """Return the state of a Mersenne twister, for comparison."""
    return state["state"]["key"].tobytes(), int(state["state"]["pos"])


def may_be_random(data: object) -> bool:
    """True if code of the data set, or of what it holds, makes a generator without a seed."""
    held = [each for each in reachable(data) if isinstance(each, types.FunctionType)]
    codes = [each.__code__ for each in held]
    while codes:
        code = codes.pop()
        codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
        if any(name in _ENTROPY for name in code.co_names) or _calls_unseeded(code):
            return True
    return False


def _calls_unseeded(code: types.CodeType) -> bool:
    if not any(name in _UNSEEDED for name in code.co_names):
        return False
    named = False
    for instruction in dis.get_instructions(code):
        if instruction.opname in _PASSED_OVER:
            continue
        if named and instruction.opname.startswith("CALL") and instruction.arg == 0:
            return True
        named = instruction.argval in _UNSEEDED
    return False
