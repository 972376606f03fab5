"""The random numbers of torch that decide a pass where no seed is given.

torch's loader draws a seed for its workers when a pass begins, and RandomSampler then draws the
seed of a permutation; one with a generator draws the permutation itself, and at the end of a pass
a second one, of which it uses nothing. A pass draws here as both do: its order, and the numbers
that come behind, are those of torch's loader.
"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from dlio.errors import UsageError
from dlio.util.arguments import MOST_SEED

MOST_PERMUTED: Final = 1 << 26
"""Most samples of a permutation of torch, which takes 8 bytes of memory a sample on each rank."""


@dataclass(frozen=True, slots=True)
class TorchShuffle:
    """The permutation of one pass, as torch draws it."""

    seed: int | None
    """Its seed; None if a generator of the loader drew it."""
    rng: str
    """State of that generator before the permutation; without one, of torch's after the seed."""

    def permutation(self, samples: int) -> npt.NDArray[np.int64]:
        """Return the numbers 0 to `samples` - 1 in the pass's order."""
        permuted: npt.NDArray[np.int64] = torch.randperm(
            samples, generator=self._generator()
        ).numpy()
        return permuted

    def following(self, samples: int) -> str:
        """Return the generator's state after the pass."""
        if self.seed is not None:
            return self.rng
        generator = self._generator()
        for _ in range(2):
            torch.randperm(samples, generator=generator)
        return encoded(generator.get_state())

    def end(self, own: torch.Generator | None, samples: int) -> None:
        """Draw from a loader's generator as RandomSampler does at the end of a pass."""
        if self.seed is None and own is not None:
            torch.randperm(samples, generator=own)

    def _generator(self) -> torch.Generator:
        if self.seed is None:
            return generator_of(self.rng)
        return torch.Generator().manual_seed(self.seed)

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> "TorchShuffle":
        """Return that of a loader's state. Raises UsageError for values that are none."""
        rng, seed = state.get("rng"), state["shuffle"]
        generator_of(rng)
        # -1 in place of None: states are whole numbers and text.
        if type(seed) is not int or not -1 <= seed <= MOST_SEED:
            raise UsageError(f"loader state with shuffle {seed!r}: was it written by state_dict()?")
        return cls(None if seed < 0 else seed, str(rng))


@dataclass(frozen=True, slots=True)
class PassDraws:
    """All that a pass has of torch's random numbers; the same on all ranks."""

    seed: int
    """torch's seed: that of crops, and of orders that torch lacks."""
    shuffle: TorchShuffle | None
    """None for a pass that is not shuffled, or not by torch's permutation."""

    def to_json(self) -> list[int | str | None]:
        """Return the draws as JSON types."""
        shuffle = self.shuffle
        return [self.seed, *([] if shuffle is None else [shuffle.seed, shuffle.rng])]

    @classmethod
    def from_json(cls, told: Sequence[Any]) -> "PassDraws":
        """Read the result of `to_json`."""
        return cls(told[0], TorchShuffle(*told[1:]) if len(told) > 1 else None)


class TorchSource:
    """Draws the passes of one loader: from torch's generator, or from the loader's own.

    A loader that has loaded a state goes on with the random numbers of the state, as if the passes
    before had been its own, until torch is seeded anew.
    """

    def __init__(self) -> None:
        self._resumed: torch.Generator | None = None
        """In place of torch's, with the state's seed and torch's seed at that time."""
        self._seeds: tuple[int, int] | None = None

    def resume(self, state: Mapping[str, Any], own: torch.Generator | None) -> None:
        """Go on from a state that was loaded. Raises UsageError for damaged random numbers."""
        rng = state.get("rng")
        if own is not None:
            if rng is not None:
                own.set_state(decoded(rng))
                if "shuffle" in state:
                    torch.randperm(int(state["samples"]), generator=own)
            return
        # A pass that is not shuffled has no more than the seed of its crops.
        self._resumed = None if rng is None else generator_of(rng)
        self._seeds = (int(state["seed"]), torch.initial_seed())

    def seed(self, own: torch.Generator | None) -> int:
        """Return the seed that passes follow now."""
        if own is None and self._seeds is not None and self._goes_on:
            return self._seeds[0]
        return (torch.initial_seed() if own is None else own.initial_seed()) & MOST_SEED

    def generator(self, own: torch.Generator | None) -> torch.Generator | None:
        """Return the generator to draw from; None for torch's."""
        return own if own is not None or not self._goes_on else self._resumed

    def shuffle(self, own: torch.Generator | None, samples: int) -> TorchShuffle:
        """Draw the permutation of a pass."""
        return drawn_shuffle(own, self.generator(own), samples)

    def peeked(
        self, own: torch.Generator | None, samples: int | None, draws_base: bool
    ) -> PassDraws:
        """Return the draws of the next pass without drawing; `samples` is None for a pass
        that is not shuffled by torch's permutation."""
        source = self.generator(own)
        copy = torch.Generator()
        copy.set_state(torch.get_rng_state() if source is None else source.get_state())
        if own is not None and samples is not None:
            torch.randperm(samples, generator=copy)  # The end of the pass draws it.
        if draws_base:
            torch.empty((), dtype=torch.int64).random_(generator=copy)
        own = None if own is None else copy
        drawn = None if samples is None else drawn_shuffle(own, copy, samples)
        return PassDraws(self.seed(own), drawn)

    @property
    def _goes_on(self) -> bool:
        return self._seeds is not None and torch.initial_seed() == self._seeds[1]


def drawn_shuffle(
    own: torch.Generator | None, source: torch.Generator | None, samples: int
) -> TorchShuffle:
    """Draw a permutation as RandomSampler does with the generator `own`; without, its seed is drawn
    from `source`, or torch's generator for None."""
    if own is not None:
        before = encoded(own.get_state())
        torch.randperm(samples, generator=own)
        return TorchShuffle(None, before)
    seed = int(torch.empty((), dtype=torch.int64).random_(generator=source).item())
    state = torch.get_rng_state() if source is None else source.get_state()
    return TorchShuffle(seed, encoded(state))


def generator_of(state: object) -> torch.Generator:
    """Return a generator in a state that `encoded` has written. Raises UsageError."""
    generator = torch.Generator()
    try:
        generator.set_state(decoded(state))
    except RuntimeError as error:
        raise UsageError("loader state with damaged random numbers") from error
    return generator


def encoded(state: torch.Tensor) -> str:
    """Return a generator's state as text."""
    return base64.b64encode(state.numpy().tobytes()).decode()


def decoded(text: object) -> torch.Tensor:
    """Return the generator's state of a text. Raises UsageError."""
    try:
        raw = base64.b64decode(str(text), validate=True)
    except ValueError as error:
        raise UsageError("loader state with damaged random numbers") from error
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)
