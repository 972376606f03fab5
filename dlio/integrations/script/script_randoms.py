"""Random numbers that a script draws while it computes on its part of a batch.

All ranks draw from equal states, so that they decide alike. The samples of their parts are to have
numbers of their own all the same, as in one process:

- A tensor with a dimension of this rank's samples, such as noise or the time steps of a diffusion,
  is drawn for the whole batch, and the rank takes its part: one process draws the same. So are
  arrays, lists and orders of that length, from all generators of NumPy and Python.
- A size that the script writes as a number is not that of its samples, though a part may have it.
- Other draws by the number of samples, such as one for each sample in a loop, are told.
- Threads of a loader, which stand for torch's worker processes, draw from generators of their own,
  also by Python's `random` and by NumPy.
- So are numbers that `normal`, `bernoulli` and `multinomial` draw by the values of tensors.
- Generators without a seed have the same one on all ranks; seeds that differ by rank are told.
- Operations that draw inside (dropout, `poisson`) draw from a state of the rank,
  and leave all ranks with equal states. Their numbers are not one process's, which is told. So do
  calls of functions that TorchScript or `torch.compile` has made.
"""

import contextlib
import random
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial, wraps
from types import CodeType, FrameType
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from torch import nn

from dlio.comm.survival.recovery import uniform
from dlio.integrations.script.fetch_randoms import rank_seed
from dlio.integrations.script.script_lines import (
    calling_frame,
    is_foreign,
    line_of,
    script_frame,
    script_line,
    sizes_written,
    takes_size,
)
from dlio.integrations.script.share import ScriptContext

_BY_SIZE: Final = ("rand", "randn")
_LIKE: Final = ("rand_like", "randn_like", "randint_like")
_IN_PLACE: Final = (
    "normal_ uniform_ bernoulli_ random_ exponential_ log_normal_ geometric_ cauchy_"
).split()
_BY_REJECTION: Final = ("poisson", "binomial", "_standard_gamma", "_sample_dirichlet")
"""Functions of torch of which the values of a tensor decide how many numbers are drawn."""
_OF_TENSORS: Final = ("normal", "bernoulli", "multinomial", *_BY_REJECTION)
"""Functions of torch that draw numbers by the values of a tensor."""
_DROPS: Final = (
    (torch, "dropout"),
    *(
        (nn.functional, name)
        for name in (
            "dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout rrelu "
            "scaled_dot_product_attention"
        ).split()
    ),
    *((kind, "forward") for kind in (nn.RNN, nn.LSTM, nn.GRU)),
    *((kind, "__call__") for kind in (torch.jit.ScriptFunction, torch._C.ScriptMethod)),
)
"""Operations of networks that draw inside."""
_DIMS: Final = 2
"""Leading dimensions of which one may be that of the samples."""


_Place: TypeAlias = tuple[Any, str, Callable[..., Any]]
"""A function of an owner, by name."""


_GENERATED: Final = (
    "randperm",
    *_BY_SIZE,
    "randint",
    *_OF_TENSORS,
)
"""Functions of torch that take a generator."""
_OF_POPULATION: Final = ("choice", "dirichlet", "multinomial", "multivariate_normal")
"""Functions of NumPy whose first argument is not one for each number that is drawn."""
_STATES: Final = ("seed", "getstate", "setstate", "get_state", "set_state", "spawn")
"""Functions of generators that draw nothing."""
_LINES: Final = 6
_BOUND: Final = (random, np.random)
"""Modules whose functions are methods of one generator."""


def _with_size(
    args: tuple[Any, ...], options: dict[str, Any], at: int, size: list[int]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with another size: `size=`, or argument number `at`."""
    if "size" in options:
        return args, {**options, "size": size}
    return (*args[:at], size, *args[at + 1 :]), options


@cache
def _doc_size(doc: str) -> int | None:
    """Return which argument is a size, of a method of NumPy whose documentation begins with its
    signature; -1 if all are, None if none is."""
    names = [each.strip() for each in doc.partition("(")[2].partition(")")[0].split(",")]
    if names[0] == "d0":
        return -1
    return names.index("size=None") if "size=None" in names else None


def _size_at(method: Callable[..., Any]) -> int | None:
    return _doc_size((method.__doc__ or "").strip().partition("\n")[0])


def _parameters(options: dict[str, Any]) -> list[Any]:
    """Return the arguments by name that may be one for each number that is drawn."""
    return [value for name, value in options.items() if name not in ("size", "dtype", "out")]


def _length(value: Any) -> int:
    """Return how many a number, or a sequence, stands for."""
    if isinstance(value, torch.Tensor):
        return value.numel()
    if isinstance(value, int | np.integer):
        return int(value)
    return len(value) if hasattr(value, "__len__") and np.ndim(value) else 0


def _is_sequence(value: Any, count: int) -> bool:
    return isinstance(value, list | np.ndarray) and len(value) == count


def _has_no_seed(args: tuple[Any, ...], options: dict[str, Any]) -> bool:
    return all(each is None for each in (*args, *options.values()))


def _in_place_of(kind: type[Any], methods: dict[str, Any]) -> type[Any]:
    """Return a subclass of a class of generators with other methods, for which all of the class
    are instances."""
    check = {"__instancecheck__": lambda _, instance: isinstance(instance, kind)}
    meta: Any = type("SubclassOfGenerators", (type(kind),), check)
    about = {"__doc__": kind.__doc__, "__module__": kind.__module__}
    made: type[Any] = meta(kind.__name__, (kind,), {**about, **methods})
    return made


class _ThreadGenerators(threading.local):
    """Generators of one thread of a loader, seeded as torch seeds a worker process."""

    def __init__(self) -> None:
        info = torch.utils.data.get_worker_info()
        seed = 0 if info is None else info.seed
        self.torch = torch.Generator().manual_seed(seed)
        self.bound: dict[object, Any] = {
            random: random.Random(seed),  # noqa: S311 - as in torch's workers
            np.random: np.random.RandomState(seed % 2**32),
        }


class ScriptRandoms:
    """Replacements for torch's functions of random numbers.

    Args:
        rank: number of this rank.
        parameters: returns those that optimizers have, whose noise is the same on all ranks.
    """

    def __init__(
        self,
        rank: int,
        context: ScriptContext,
        parameters: Callable[[], Sequence[torch.Tensor]] = tuple,
    ) -> None:
        self._rank, self._context, self._parameters = rank, context, parameters
        self._is_inside = False
        self._thread = threading.get_ident()
        self._generators = _ThreadGenerators()
        self._amounts: dict[str, int] = {}
        """Lines of the script that draw while it has a part of a batch, with a digest of how
        much."""
        self._by_size: set[tuple[CodeType, int]] = set()
        """Calls of the script that have drawn a number for each sample of a part."""
        self._of_parts: set[tuple[CodeType, int, tuple[int, ...]]] = set()
        """Calls of the script, and shapes, that were taken for those of parts."""
        self._fixed: set[tuple[CodeType, int, tuple[int, ...]]] = set()
        """The same of calls whose shapes were not those of parts."""
        self._seeds = 0
        """Generators that had no seed of the script's so far."""
        self._given: dict[str, int] = {}
        """Lines of the script that seed, with a digest of the seeds."""
        self._has_told_inside = False
        self._all = list(self._replacements())
        self._originals = _present(self._all)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Replace the functions inside the `with` block."""
        scripted: Any = torch.jit.script
        # Its compiler reads the source of the functions that it meets.
        within: Any = self._with_originals(scripted)

        @wraps(scripted)
        def script(item: Any, given: None = None, up: int = 0, *args: Any, **options: Any) -> Any:
            # It takes the names in a class from a frame that it counts to, past this and `run`.
            up += options.pop("_frames_up", 0) + 2
            return within(item, given, up, *args, **options)

        vars(torch.jit)["script"] = script
        _put(self._all)
        try:
            yield
        finally:
            torch.jit.script = scripted
            _put(self._originals)

    def _with_originals(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def run(*args: Any, **options: Any) -> Any:
            before = _present(self._all)  # It calls itself.
            _put(self._originals)
            try:
                return original(*args, **options)
            finally:
                _put(before)

        return run

    def show_compiler(self) -> None:
        """Have torch's compiler take the original functions for torch's own: it lists them at its
        first use."""
        self._with_originals(torch._dynamo.trace_rules.get_torch_obj_rule_map)()

    def inside(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function of tensors that draws numbers of its own."""
        return self._inside(call)

    def _next_seed(self) -> int:
        """Return a seed that all ranks have, for a generator that the script gives none."""
        self._seeds += 1
        return rank_seed(0, torch.initial_seed(), self._seeds) % 2**32

    def _seeding(
        self, args: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call that seeds: with a seed if there is none; one of the
        script's is noted, as ranks may have others, such as the time."""
        if _has_no_seed(args, options):
            return (self._next_seed(),), {}
        if _is_called_by_others():
            self._context.worker_draws.seeded()
        is_main = threading.get_ident() == self._thread
        is_main &= not self._context.is_outside and _is_called_by_others()
        text = repr((args, options))
        # A generator, whose text has an address, is not a seed: `default_rng` returns it as it is.
        if is_main and " at 0x" not in text and (frame := script_frame()):
            line = line_of(frame)
            self._given[line] = zlib.crc32(text.encode(), self._given.get(line, 0))
        return args, options

    def _seeded(
        self, original: Callable[..., Any], result: Callable[[], Any] | None = None
    ) -> Callable[..., Any]:
        """Wrap a function that seeds; `result` returns what it is to return."""

        @wraps(original)
        def seed(*args: Any, **options: Any) -> Any:
            args, options = self._seeding(args, options)
            done = original(*args, **options)
            return done if result is None else result()

        return seed

    def _generator_of_torch(self) -> type[torch.Generator]:
        """Return a class in the place of torch's generators, whose seeds are known."""
        kind = torch.Generator

        def seed(generator: torch.Generator) -> int:
            number = self._next_seed()
            kind.manual_seed(generator, number)
            return number

        def manual_seed(generator: torch.Generator, seed: int) -> torch.Generator:
            self._seeding((seed,), {})
            kind.manual_seed(generator, seed)
            return generator

        # By that name, copies that are sent to worker processes find it.
        methods = {"seed": seed, "manual_seed": manual_seed, "__module__": "torch"}
        return _in_place_of(kind, methods)

    def _is_worker(self) -> bool:
        """True in a thread of a loader."""
        return (
            not torch.compiler.is_compiling()
            and threading.get_ident() != self._thread
            and torch.utils.data.get_worker_info() is not None
        )

    def _is_left(self) -> bool:
        """True where numbers are drawn as they would be without this."""
        if torch.compiler.is_compiling() or self._is_inside or self._is_worker():
            return True
        # The compiler draws, too, as by SymPy.
        return torch._guards.CompileContext.try_get() is not None

    def _by_thread(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function of torch that takes a generator."""

        @wraps(original)
        def draw(*args: Any, **options: Any) -> Any:
            if options.get("generator") is None and not torch.compiler.is_compiling():
                self._context.worker_draws.drawn()
                if self._is_worker():
                    options["generator"] = self._generators.torch
            return self._context.collate_draws.call(original, args, options)

        return draw

    def _of_module(self, module: object, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function of a module that is a method of its generator."""

        @wraps(original)
        def draw(*args: Any, **options: Any) -> Any:
            if original.__name__ not in _STATES:
                self._context.worker_draws.drawn()
            if self._is_worker():
                own = getattr(self._generators.bound[module], original.__name__)
                return self._drawn(own, args, options)
            return self._drawn(original, args, options)

        return draw

    def _of_class(self, kind: type[Any]) -> type[Any]:
        """Return a subclass of a class of generators, in whose place it is put."""

        def method(name: str) -> Callable[..., Any]:
            original = getattr(kind, name)

            @wraps(original)
            def draw(generator: Any, *args: Any, **options: Any) -> Any:
                bound = wraps(original)(partial(original, generator))
                return self._drawn(bound, args, options)

            return draw

        names = [name for name in dir(kind) if name[0] != "_" and callable(getattr(kind, name))]
        methods = {name: method(name) for name in names if name not in _STATES}

        def made(generator: Any, *args: Any, **options: Any) -> None:
            if kind is not np.random.Generator:
                args, options = self._seeding(args, options)
            kind.__init__(generator, *args, **options)

        methods["__init__"] = made
        return _in_place_of(kind, methods)

    def _drawn(
        self, original: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        """Call a method of a generator of Python or NumPy: for the whole batch if it draws for this
        rank's samples, which get their part."""
        name = original.__name__
        if name == "seed":
            args, options = self._seeding(args, options)
        if name in _STATES:
            return original(*args, **options)
        if self._is_left() or not any(self._context.places()):
            return self._context.collate_draws.call(original, args, options)
        self._is_inside = True  # Methods call others.
        try:
            part = self._of_whole(name, original, args, options)
            if part is not None:
                return part[0]
            result = original(*args, **options)
            self._note(name, args, result)
            return result
        finally:
            self._is_inside = False

    def _of_whole(
        self,
        name: str,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        options: dict[str, Any],
    ) -> tuple[Any] | None:
        """Draw for the whole batch, and take this rank's part; None if that is not asked for."""
        for place, size in self._context.places():
            count = len(place)
            if name == "shuffle" and args and _is_sequence(args[0], count):
                order = np.arange(size) if isinstance(args[0], np.ndarray) else list(range(size))
                original(order)
                mine = [k - place.start for k in order if k in place]
                is_array = isinstance(args[0], np.ndarray)
                args[0][:] = args[0][mine] if is_array else [args[0][k] for k in mine]
                return (None,)
            if not self._is_for_part((count,), 0):
                continue
            if name == "permutation" and args and _length(args[0]) == count:
                order = original(size)
                mine = order[(order >= place.start) & (order < place.stop)] - place.start
                return (mine if isinstance(args[0], int) else np.asarray(args[0])[mine],)
            given = args[1:2] if name == "sample" else ()
            several = options.get("k", *given) if len(given) == 1 else options.get("k")
            population = _length(args[0]) if args else 0
            can = population >= size if name == "sample" else name == "choices"
            if several == count and can and population != count:
                keeps = args[:1] if name == "sample" else args
                whole = original(*keeps, **{**options, "k": size})
                return (whole[place.start : place.stop],)
        at = _size_at(original)
        return None if at is None else self._array(name, original, at, args, options)

    def _array(
        self,
        name: str,
        original: Callable[..., Any],
        at: int,
        args: tuple[Any, ...],
        options: dict[str, Any],
    ) -> tuple[Any] | None:
        """Draw an array, of a size that is argument number `at`; -1 if all are sizes."""
        given = args if at < 0 else args[at : at + 1]
        shape = options.get("size", given if at < 0 else (given or [None])[0])
        shape = (shape,) if isinstance(shape, int | np.integer) else shape
        if shape is None or not isinstance(shape, tuple | list):
            return None
        if name in _OF_POPULATION:
            population = _length(args[0]) if args else 0
            is_within = any(population == len(place) for place, _ in self._context.places())
            replaces = options.get("replace", args[2] if len(args) > 2 else True)
            if name == "choice" and (is_within or (not replaces and population < self._most())):
                return None
        elif at > 0 and any(np.ndim(each) for each in (*args[:at], *_parameters(options))):
            return None
        self._is_inside = False
        sized = self._whole(tuple(shape))
        self._is_inside = True
        if sized is None:
            return None
        dim, place, whole = sized
        if at < 0 and "size" not in options:
            args = tuple(whole)
        else:
            args, options = _with_size(args, options, at, whole)
        return (original(*args, **options).take(place, dim),)

    def _most(self) -> int:
        return max((size for _, size in self._context.places()), default=0)

    def _note(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        """Note a draw: where ranks draw other amounts, these are for the samples of their parts."""
        if threading.get_ident() != self._thread or not any(self._context.places()):
            return
        if frame := script_frame():
            lengths = [_length(each) for each in (*args, result)]
            text = f"{self._context.batches} {name} {lengths}"
            line = line_of(frame)
            self._amounts[line] = zlib.crc32(text.encode(), self._amounts.get(line, 0))

    def tell(self) -> None:
        """Tell of lines where ranks have drawn other amounts of random numbers since the last call,
        and let all go on with the states of rank 0. Collective."""
        comm, mine, given = self._context.comm, self._amounts, self._given
        self._amounts, self._given = {}, {}
        numpy: Any = np.random
        torchs = torch.get_rng_state()
        state = repr((random.getstate(), numpy.get_state(), torchs.numpy().tobytes()))
        own = mine, zlib.crc32(state.encode()), given
        everyone: list[tuple[dict[str, int], int, dict[str, int]]] = uniform(
            comm, lambda: comm.allgather(own)
        )
        amounts = [each[0] for each in everyone]
        lines = [
            line for line in mine if any(each.get(line) != amounts[0].get(line) for each in amounts)
        ]
        if lines:
            self._context.say(
                f"{', '.join(lines[:_LINES])}: the random numbers that the script draws there "
                "depend on how many samples a batch has, and each rank draws for its part: they "
                "are not those of one process"
            )
        seeds = [
            line for line in given if any(each[2].get(line) != given[line] for each in everyone)
        ]
        if seeds:
            self._context.say(
                f"{', '.join(seeds[:_LINES])}: the script gives another seed there on each rank, "
                "as by the time or a process's number: what it draws from it, such as a split of "
                "the data, differs by rank and is not one process's. Give no seed, or one that all "
                "ranks have"
            )
        if any(each[1] != everyone[0][1] for each in everyone):
            version, words, gauss = random.getstate()
            kind, keys, *rest = numpy.get_state()
            states_of_root = [
                version,
                list(words),
                gauss,
                kind,
                keys.tolist(),
                rest,
                torchs.tolist(),
            ]
            version, words, gauss, kind, keys, rest, states = uniform(
                comm, lambda: comm.tell(states_of_root)
            )
            random.setstate((version, tuple(words), gauss))
            numpy.set_state((kind, np.asarray(keys, np.uint32), *rest))
            torch.set_rng_state(torch.tensor(states, dtype=torch.uint8))

    def _replacements(self) -> Iterator[_Place]:
        made = {name: self._by_thread(getattr(torch, name)) for name in _GENERATED}
        for name in _BY_SIZE:
            made[name] = self._sized(made[name])
        made["randint"] = self._integers(made["randint"])
        made["randperm"] = self._permutation(made["randperm"])
        for name in _OF_TENSORS:
            made[name] = self._by_values(made[name])
        for name in _LIKE:
            function = getattr(torch, name)
            # Earlier versions of torch have none of these that takes a generator.
            takes = "generator" in (function.__doc__ or "")
            made[name] = self._like(self._by_thread(function) if takes else function)
        for name, function in made.items():
            yield torch, name, function
        for name in _IN_PLACE:
            method = self._by_thread(getattr(torch.Tensor, name))
            yield torch.Tensor, name, self._in_place(method)
        for module in _BOUND:
            of: Any = vars(module)
            for name, function in list(of.items()):
                if getattr(function, "__self__", None) is of["random"].__self__:
                    yield module, name, self._of_module(module, function)
        generators = self._of_class(np.random.Generator)

        @wraps(np.random.default_rng)
        def default_rng(*args: Any, **options: Any) -> np.random.Generator:
            args, options = self._seeding(args, options)
            made = original_rng(*args, **options)
            is_plain = type(made) is np.random.Generator
            return generators(made.bit_generator) if is_plain else made

        original_rng = np.random.default_rng
        yield np.random, "default_rng", default_rng
        yield np.random, "RandomState", self._of_class(np.random.RandomState)
        yield random, "Random", self._of_class(random.Random)
        for module in (torch, torch.random):
            yield module, "manual_seed", self._seeded(torch.manual_seed)
            yield module, "seed", self._seeded(torch.manual_seed, torch.initial_seed)
        yield np.random, "seed", self._seeded(np.random.seed)
        yield torch, "Generator", self._generator_of_torch()
        for owner, name in _DROPS:
            yield owner, name, self._inside(getattr(owner, name))

    def _permutation(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `torch.randperm`."""

        @wraps(original)
        def draw(n: Any, *args: Any, **options: Any) -> Any:
            can = isinstance(n, int) and options.get("out") is None
            sized = self._whole((n,)) if can else None
            if sized is None:
                return self._noted(original(n, *args, **options))
            _, place, (size,) = sized
            # Of the whole batch, as one process draws it; of its order this rank's samples.
            whole = original(size, *args, **options)
            part = whole[(whole >= place.start) & (whole < place.stop)] - place.start
            self._context.mixed_inputs.knows_order(part)
            return part

        return draw

    def _whole(
        self, shape: Sequence[int], is_asked: bool = True
    ) -> tuple[int, range, list[int]] | None:
        """Return the dimension of this rank's samples in a shape, their place in it, and the shape
        of the whole batch; None if it has none. `is_asked` if the script asks for this shape."""
        if self._is_left() or tuple(shape) == ():
            return None
        is_single = tuple(shape) == (1,)
        if is_single and not self._is_of_part():
            return None  # One number for all samples.
        for place, size in self._context.places():
            for dim, count in enumerate(shape[:_DIMS]):
                if count == len(place) and not (is_asked and not self._is_for_part(shape, dim)):
                    if len(shape) == 1 and not is_single and (frame := script_frame()):
                        self._by_size.add((frame.f_code, frame.f_lasti))
                    return dim, place, [*shape[:dim], size, *shape[dim + 1 :]]
        if is_asked:
            self._note_fixed(shape)
        return None

    def _is_for_part(self, shape: Sequence[int], dim: int) -> bool:
        """False if a size that the script asks for is that of this rank's part by chance: it is
        written in the script, or was the same with a part of another size."""
        frame = calling_frame()
        if frame is None or self._context.batch == "per-rank":
            return True
        written = sizes_written(frame.f_code, frame.f_lasti, len(shape))
        call = (frame.f_code, frame.f_lasti, tuple(shape))
        if written[dim] == shape[dim] or call in self._fixed:
            return False
        self._of_parts.add(call)
        return True

    def _note_fixed(self, shape: Sequence[int]) -> None:
        """Note a shape that is not of this rank's part, and tell if it was taken for that."""
        frame = calling_frame()
        # Without gradients it may be for other samples, as of an evaluation.
        if frame is None or not torch.is_grad_enabled() or takes_size(frame.f_code, frame.f_lasti):
            return
        if self._context.batch == "per-rank" or not any(self._context.places()):
            return
        call = (frame.f_code, frame.f_lasti, tuple(shape))
        self._fixed.add(call)
        if call in self._of_parts:
            self._context.say(
                f"{line_of(frame)}: as many random numbers are drawn there whatever the size of a "
                "batch, and were taken for those of samples while a rank's part had that size: "
                "they are not one process's. Write the size as a number to tell them apart",
                any_rank=True,
            )

    def _is_of_part(self) -> bool:
        """True if a single number that the script draws is for the only sample of a part: its call
        has drawn one for each sample before, or says so."""
        frame = script_frame()
        if frame is None:
            return False
        call = (frame.f_code, frame.f_lasti)
        return call in self._by_size or takes_size(*call)

    def _whole_of(self, tensor: torch.Tensor) -> tuple[int, range, list[int]] | None:
        """Return the same of a tensor: None also for a parameter, its values or its gradient."""
        sized = None if isinstance(tensor, nn.Parameter) else self._whole(tensor.shape, False)
        if sized is not None and not tensor.requires_grad and tensor.is_leaf:
            for parameter in self._parameters():
                gradient = parameter.grad
                if gradient is tensor or (
                    parameter.shape == tensor.shape
                    and tensor.data_ptr()
                    in (parameter.data_ptr(), 0 if gradient is None else gradient.data_ptr())
                ):
                    return None
        return sized

    def _noted(self, drawn: torch.Tensor) -> torch.Tensor:
        if not self._is_left():
            self._note("torch", (), drawn)
        return drawn

    def _part(self, whole: torch.Tensor, dim: int, place: range) -> torch.Tensor:
        part = whole.detach().narrow(dim, place.start, len(place)).clone()
        return part.requires_grad_(whole.requires_grad)

    def _sized(self, original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Wrap `torch.rand` or `torch.randn`."""

        @wraps(original)
        def draw(*args: Any, **options: Any) -> torch.Tensor:
            several = args[0] if args and not isinstance(args[0], int) else args
            shape = options.get("size", several)
            sized = None if options.get("out") is not None else self._whole(shape)
            if sized is None:
                return self._noted(original(*args, **options))
            dim, place, whole = sized
            return self._part(original(**{**options, "size": whole}), dim, place)

        return draw

    def _integers(self, original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Wrap `torch.randint`."""

        @wraps(original)
        def draw(*args: Any, **options: Any) -> torch.Tensor:
            shape = options["size"] if "size" in options else args[-1]
            sized = None if options.get("out") is not None else self._whole(shape)
            if sized is None:
                return self._noted(original(*args, **options))
            dim, place, whole = sized
            args, options = _with_size(args, options, len(args) - 1, whole)
            return self._part(original(*args, **options), dim, place)

        return draw

    def _like(self, original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @wraps(original)
        def draw(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
            sized = self._whole_of(tensor)
            if sized is None:
                return self._noted(original(tensor, *args, **options))
            dim, place, whole = sized
            drawn = original(tensor.detach().new_empty(whole), *args, **options)
            return self._part(drawn, dim, place)

        return draw

    def _in_place(self, original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @wraps(original)
        def draw(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
            sized = self._whole_of(tensor)
            if sized is None:
                return self._noted(original(tensor, *args, **options))
            if any(isinstance(each, torch.Tensor) for each in (*args, *options.values())):
                with self._own_state(tensor.device):
                    return original(tensor, *args, **options)
            dim, place, whole = sized
            drawn = original(tensor.detach().new_empty(whole), *args, **options)
            return tensor.copy_(drawn.narrow(dim, place.start, len(place)))

        return draw

    def _by_values(self, original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Wrap a function of torch that draws numbers by the values of tensors, or `torch.normal`
        by numbers and a size."""

        @wraps(original)
        def draw(*args: Any, **options: Any) -> torch.Tensor:
            given = (*args, *options.values())
            tensors = [x for x in given if isinstance(x, torch.Tensor)]
            if self._is_left() or not any(self._context.places()):
                return original(*args, **options)
            if not tensors:
                sized = self._whole(options.get("size", args[-1]))
                if sized is None:
                    return self._noted(original(*args, **options))
                dim, place, whole = sized
                args, options = _with_size(args, options, len(args) - 1, whole)
                return self._part(original(*args, **options), dim, place)
            several = [(x, self._whole_of(x)) for x in tensors]
            dims = {sized[0] - x.dim() for x, sized in several if sized is not None}
            if original.__name__ == "_sample_dirichlet":
                dims.discard(-1)  # Parts of a whole.
            if not dims:
                return self._noted(original(*args, **options))
            is_counted = original.__name__ not in _BY_REJECTION and options.get("out") is None
            is_counted &= len(dims) == 1 and (original.__name__ != "multinomial" or dims == {-2})
            if not is_counted:  # How many numbers it draws depends on values of other ranks.
                with self._own_state(tensors[0].device):
                    return original(*args, **options)
            # Values of 1 stand for the samples of other ranks: they take as many numbers.
            dim, place, _ = next(sized for _, sized in several if sized is not None)
            wholes = {id(x): self._padded(x, *sized) for x, sized in several if sized is not None}
            args = tuple(wholes.get(id(x), x) for x in args)
            options = {name: wholes.get(id(x), x) for name, x in options.items()}
            drawn = original(*args, **options)
            return self._part(drawn, drawn.dim() + dims.pop(), place)

        return draw

    def _padded(
        self, tensor: torch.Tensor, dim: int, place: range, whole: list[int]
    ) -> torch.Tensor:
        values = tensor.detach().new_ones(whole)
        values.narrow(dim, place.start, len(place)).copy_(tensor.detach())
        return values

    def _inside(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap an operation that draws numbers of its own."""

        @wraps(original)
        def run(*args: Any, **options: Any) -> Any:
            tensors = [x for x in (*args, *options.values()) if isinstance(x, torch.Tensor)]
            if self._is_left() or not tensors or not any(self._context.places()):
                return original(*args, **options)
            with self._own_state(tensors[0].device):
                return original(*args, **options)

        return run

    def _tell_inside(self) -> None:
        if not self._has_told_inside:
            self._has_told_inside = True
            self._context.note(
                f"{script_line()}: dropout, or another operation that draws random numbers inside, "
                "draws others on each rank than in one process: the training is as that of one "
                "process with another seed"
            )

    @contextlib.contextmanager
    def _own_state(self, device: torch.device) -> Iterator[None]:
        """Have the `with` block draw from a state of this rank's, and leave all with equal ones."""
        self._is_inside = True
        try:
            with contextlib.ExitStack() as stack:
                if device.type == "cpu":
                    stack.enter_context(self._own_cpu_state())
                elif device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
                    stack.enter_context(self._own_cuda_state(device))
                yield
        finally:
            self._is_inside = False

    @contextlib.contextmanager
    def _own_cpu_state(self) -> Iterator[None]:
        generator = torch.default_generator
        before = generator.get_state()
        seed = int(torch.empty((), dtype=torch.int64).random_(generator=generator))
        after = generator.get_state()
        generator.manual_seed(rank_seed(self._rank, seed))
        own = generator.get_state()
        try:
            yield
        finally:
            draws = not torch.equal(own, generator.get_state())
            generator.set_state(after if draws else before)
            if draws:
                self._tell_inside()

    @contextlib.contextmanager
    def _own_cuda_state(self, device: torch.device) -> Iterator[None]:
        index = torch.cuda.current_device() if device.index is None else device.index
        generator = torch.cuda.default_generators[index]
        # A seed and a counter: nothing is read from the device, which would wait for it.
        seed, offset = generator.initial_seed(), generator.get_offset()
        generator.manual_seed(rank_seed(self._rank, seed, offset))
        try:
            yield
        finally:
            draws = generator.get_offset() > 0
            generator.manual_seed(seed)
            generator.set_offset(offset + 4 * draws)
            if draws:
                self._tell_inside()


def _is_called_by_others() -> bool:
    """True if what calls this module is neither torch nor dlio, which have seeds of each rank."""
    caller: FrameType | None = sys._getframe(1)
    while caller is not None and caller.f_code.co_filename == __file__:
        caller = caller.f_back
    return caller is not None and is_foreign(caller.f_code.co_filename)


def _present(places: Sequence[_Place]) -> list[_Place]:
    """Return the present functions of some places."""
    return [(owner, name, getattr(owner, name)) for owner, name, _ in places]


def _put(places: Sequence[_Place]) -> None:
    for owner, name, function in places:
        setattr(owner, name, function)
