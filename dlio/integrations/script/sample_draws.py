"""Random numbers that a script draws for each sample of a batch: noise, time steps, dropout.

All ranks have the same random state, so that they decide alike, and each would draw the same
numbers for its part of a batch. A draw that has a row for each of a rank's samples is made for the
whole batch instead, of which the rank keeps its rows: they are those of one process. Of large draws,
and of those whose layout torch does not tell, each rank makes its own, from a seed that all draw.

Threads that make samples draw from generators of their own.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, Final

import numpy as np
import torch
from torch.jit import _builtins

from dlio.integrations.script.share import ScriptContext
from dlio.util.forks import new_lock

_LARGEST: Final = 1 << 16
"""Numbers of the whole batch, up to which every rank draws all: about a millisecond."""
_SEEDS: Final = 1 << 31
_Shape = tuple[int, ...]
_Draw = Callable[..., Any]
_SIZED: Final = ("randn", "rand", "randint")
_VALUED: Final = ("bernoulli", "normal", "multinomial")
_LIKE: Final = ("randn_like", "rand_like", "randint_like")
_DROPS: Final = ("dropout", "dropout_", "feature_dropout", "feature_dropout_")
_FILLS: Final = ("normal_", "uniform_", "bernoulli_", "random_", "exponential_", "log_normal_")
_UNSEEN: Final = ("alpha_dropout", "alpha_dropout_", "lstm", "gru", "rnn_tanh", "rnn_relu")
"""Functions that draw inside of torch, from an input with a row for each sample."""


class _Rows:
    """A draw of a rank, as part of that of the whole batch."""

    def __init__(self, dim: int, first: int, count: int, shape: _Shape) -> None:
        self._dim, self._first, self._count = dim, first, count
        self.shape = shape
        """Of the draw for the whole batch."""
        self.is_small = int(np.prod(shape)) <= _LARGEST

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.narrow(self._dim, self._first, self._count)

    def like(self, part: torch.Tensor) -> torch.Tensor:
        """Return an empty tensor of the whole batch with the memory format of the rank's part."""
        last = part.ndim == 4 and not part.is_contiguous()
        last &= part.is_contiguous(memory_format=torch.channels_last)
        form = torch.channels_last if last else torch.contiguous_format
        return torch.empty(self.shape, dtype=part.dtype, device=part.device, memory_format=form)

    def filled(self, part: torch.Tensor, rest: float) -> torch.Tensor:
        """Return a tensor of the whole batch that has the rank's part in its rows."""
        whole = self.like(part.detach()).fill_(rest)
        self.of(whole).copy_(part.detach())
        return whole


class SampleDraws:
    """The random numbers that a script draws on this rank while it has a divided batch."""

    def __init__(self, context: ScriptContext) -> None:
        self._context = context
        self._main = threading.main_thread().ident
        self._threads = threading.local()
        self._lock, self._count = new_lock(), 0

    def replacements(self) -> Iterator[tuple[Any, str, _Draw]]:
        """Yield (owner, name, function) of what is to be replaced while the script runs."""
        vf, functional, tensor = torch._VF, torch.nn.functional, torch.Tensor
        kinds: list[tuple[Any, Sequence[str], Callable[[_Draw], _Draw]]] = [
            (torch, _SIZED, self._sized),
            (torch, _LIKE, self._like),
            (torch, _VALUED, self._by_values),
            (torch, ("randperm",), lambda original: original),
            (vf, _DROPS, self._dropped),
            (tensor, _FILLS, self._filled),
            (vf, _UNSEEN, self._unseen),
            (functional, ("scaled_dot_product_attention",), self._unseen),
        ]
        for owner, names, replaced in kinds:
            for name in names:
                original = getattr(owner, name)
                function = self._where_divided(original, replaced(original))
                if (known := _builtins._find_builtin(original)) is not None:
                    _builtins._register_builtin(function, known)  # For torch.jit.script.
                yield owner, name, function

    def _where_divided(self, original: _Draw, replaced: _Draw) -> _Draw:
        context, main = self._context, self._main
        takes_generator = original.__name__ in (*_SIZED, *_VALUED, "randperm", *_FILLS)

        @wraps(original)
        def draw(*args: Any, **options: Any) -> Any:
            compiles = torch.compiler.is_compiling()
            if takes_generator and not compiles and threading.get_ident() != main:
                return original(*args, **{"generator": self._of_thread(), **options})
            if compiles or context.aside or not (context.divides_now and context.is_in_pass):
                return original(*args, **options)
            return replaced(*args, **options)

        return draw

    def _sized(self, original: _Draw) -> _Draw:
        def draw(*args: Any, **options: Any) -> Any:
            if options.get("out") is not None:
                return original(*args, **options)
            places = list(args)
            at = next((k for k, each in enumerate(args) if isinstance(each, list | tuple)), None)
            if "size" in options:
                size = tuple(options["size"])
            elif at is not None:
                size = tuple(args[at])
            else:
                at, size = 0, tuple(args)
                places = [size]
            rows = self._rows(size)
            if rows is None:
                return original(*args, **options)
            if not rows.is_small:
                device = torch.device(options.get("device") or torch.get_default_device())
                with self._of_rank(device, options.get("generator")):
                    return original(*args, **options)
            if "size" in options:
                options["size"] = rows.shape
            else:
                assert at is not None
                places[at] = rows.shape
            return _detached(rows.of(original(*places, **options).detach()), options)

        return draw

    def _like(self, original: _Draw) -> _Draw:
        def draw(part: torch.Tensor, *args: Any, **options: Any) -> Any:
            rows = self._rows_of(part)
            if rows is None:
                return original(part, *args, **options)
            if not rows.is_small:
                with self._of_rank(part.device, options.get("generator")):
                    return original(part, *args, **options)
            whole = original(rows.like(part), *args, **options)
            return _detached(rows.of(whole.detach()), options)

        return draw

    def _by_values(self, original: _Draw) -> _Draw:
        """Wrap a draw whose first arguments are tensors, with a row for each sample."""

        def draw(*args: Any, **options: Any) -> Any:
            first = next((each for each in args if isinstance(each, torch.Tensor)), None)
            rows = None if first is None else self._rows_of(first, leads=True)
            if first is None or rows is None or options.get("out") is not None:
                return original(*args, **options)
            others = [each for each in args if isinstance(each, torch.Tensor)]
            if not rows.is_small or any(each.shape != first.shape for each in others):
                with self._of_rank(first.device, options.get("generator")):
                    return original(*args, **options)
            # Any valid values do for the samples of other ranks: a draw takes as many numbers.
            values = [
                rows.filled(each, 0.5) if isinstance(each, torch.Tensor) else each for each in args
            ]
            return rows.of(original(*values, **options)).clone()

        return draw

    def _dropped(self, original: _Draw) -> _Draw:
        def drop(part: torch.Tensor, p: float, train: bool) -> torch.Tensor:
            rows = self._rows_of(part, flat=True) if train and 0 < p < 1 else None
            if rows is None:
                return original(part, p, train)
            if not rows.is_small:
                with self._of_rank(part.device, None):
                    return original(part, p, train)
            kept = rows.of(original(rows.like(part.detach()).fill_(1.0), p, train))
            return part.mul_(kept) if original.__name__.endswith("_") else part * kept

        return drop

    def _filled(self, original: _Draw) -> _Draw:
        def fill(part: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
            rows = self._rows_of(part)
            if rows is None:
                return original(part, *args, **options)
            by_values = any(isinstance(each, torch.Tensor) for each in args)
            if by_values or not rows.is_small:
                with self._of_rank(part.device, options.get("generator")):
                    return original(part, *args, **options)
            return part.copy_(rows.of(original(rows.like(part), *args, **options)))

        return fill

    def _unseen(self, original: _Draw) -> _Draw:
        def compute(*args: Any, **options: Any) -> Any:
            draws = original.__name__ not in _UNSEEN[2:] or any(
                isinstance(each, float) and each > 0 for each in args
            )
            if original.__name__ == "scaled_dot_product_attention":
                draws = (args[4] if len(args) > 4 else options.get("dropout_p", 0.0)) > 0
            if not draws or self._rows_of(args[0]) is None:
                return original(*args, **options)
            with self._of_rank(args[0].device, None):
                return original(*args, **options)

        return compute

    # A draw's place in that of the whole batch.

    def _rows_of(
        self, part: torch.Tensor, leads: bool = False, flat: bool = False
    ) -> _Rows | None:
        if part.is_leaf and part.requires_grad:
            return None  # Weights, which are no sample's.
        return self._rows(tuple(part.shape), leads, flat)

    def _rows(self, shape: _Shape, leads: bool = False, flat: bool = False) -> _Rows | None:
        """Return the rows of a draw of that shape; None if it is not one of this rank's samples.

        Samples are in the first dimension, or unless `leads` in the second of three or more; with
        `flat` the first one may have several rows of each sample.
        """
        for batch in self._context.divided:
            places, of = batch.places(self._context.comm.rank), len(batch.samples)
            first, count = places.start, len(places)
            # One sample is not told from a number for all samples, such as a chance.
            if not shape or (count == 1 and len(shape) < 2):
                continue
            if shape[0] == count:
                return _Rows(0, first, count, (of, *shape[1:]))
            if not leads and len(shape) > 2 and shape[1] == count:
                return _Rows(1, first, count, (shape[0], of, *shape[2:]))
            if flat and len(shape) > 1 and count > 1 and shape[0] and shape[0] % count == 0:
                each = shape[0] // count
                return _Rows(0, first * each, shape[0], (of * each, *shape[1:]))
        return None

    # Numbers of this rank alone.

    def _of_thread(self) -> torch.Generator:
        """Return the generator of a thread, as a worker process has one: the script's own numbers
        do not depend on when threads draw."""
        threads = self._threads
        if not hasattr(threads, "generator"):
            with self._lock:
                self._count += self._context.comm.size
                number = self._count + self._context.comm.rank
            threads.generator = torch.Generator().manual_seed(torch.initial_seed() + number)
        made: torch.Generator = threads.generator
        return made

    @contextmanager
    def _of_rank(self, device: torch.device, generator: torch.Generator | None) -> Iterator[None]:
        """Draw numbers of this rank's own within a `with` statement, and none that others draw but
        a seed."""
        used = generator or _default_generator(device)
        seed = torch.empty((), dtype=torch.int64, device=used.device)
        drawn = int(seed.random_(_SEEDS, generator=used).item())
        state = used.get_state()
        used.manual_seed(drawn + _SEEDS * (1 + self._context.comm.rank))
        try:
            yield
        finally:
            used.set_state(state)


def _detached(rows: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """Return rows as a tensor of their own, as a draw is."""
    return rows.clone().requires_grad_(bool(options.get("requires_grad")))


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type != "cuda":
        return torch.default_generator
    number = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[number]
