"""Random numbers that a script draws while it computes on its part of a batch.

All ranks draw from equal states, so that they decide alike. The samples of their parts are to have
numbers of their own all the same, as in one process:

- A tensor with a dimension of this rank's samples, such as noise or the time steps of a diffusion,
  is drawn for the whole batch, and the rank takes its part: one process draws the same.
- Threads of a loader, which stand for torch's worker processes, draw from generators of their own,
  also by Python's `random` and by NumPy.
- Operations that draw inside (dropout, a distribution's parameters) draw from a state of the rank,
  and leave all ranks with equal states. Their numbers are not one process's. So do calls of
  functions that TorchScript or `torch.compile` has made.
"""

import contextlib
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from torch import nn

from dlio.integrations.script.fetch_randoms import rank_seed
from dlio.integrations.script.share import ScriptContext

_BY_SIZE: Final = ("rand", "randn")
_LIKE: Final = ("rand_like", "randn_like", "randint_like")
_IN_PLACE: Final = (
    "normal_ uniform_ bernoulli_ random_ exponential_ log_normal_ geometric_ cauchy_"
).split()
_OF_TENSORS: Final = ("normal", "bernoulli", "multinomial", "poisson")
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
    "normal",
    "bernoulli",
    "multinomial",
    "poisson",
)
"""Functions of torch that take a generator."""
_OF_NUMPY: Final = {
    **dict.fromkeys(("rand", "randn"), -1),
    **dict.fromkeys(("random", "random_sample", "standard_normal"), 0),
    **dict.fromkeys(("exponential", "poisson"), 1),
    **dict.fromkeys(("normal", "uniform", "randint", "beta", "binomial", "laplace"), 2),
}
"""Functions of `np.random`, with the number of the argument that is a size; -1: all are sizes."""
_BOUND: Final = (random, np.random)
"""Modules whose functions are methods of one generator."""


def _with_size(
    args: tuple[Any, ...], options: dict[str, Any], at: int, size: list[int]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with another size: `size=`, or argument number `at`."""
    if "size" in options:
        return args, {**options, "size": size}
    return (*args[:at], size, *args[at + 1 :]), options


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
        self._all = list(self._replacements())
        self._originals = _present(self._all)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Replace the functions inside the `with` block."""
        scripted = torch.jit.script
        # Its compiler reads the source of the functions that it meets.
        torch.jit.script = self._with_originals(scripted)
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
        return self._inside(call, by_shape=False)

    def _is_worker(self) -> bool:
        """True in a thread of a loader."""
        return (
            not torch.compiler.is_compiling()
            and threading.get_ident() != self._thread
            and torch.utils.data.get_worker_info() is not None
        )

    def _is_left(self) -> bool:
        """True where numbers are drawn as they would be without this."""
        return torch.compiler.is_compiling() or self._is_inside or self._is_worker()

    def _by_thread(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function of torch that takes a generator."""

        @wraps(original)
        def draw(*args: Any, **options: Any) -> Any:
            if self._is_worker() and options.get("generator") is None:
                options["generator"] = self._generators.torch
            return original(*args, **options)

        return draw

    def _of_module(self, module: object, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function of a module that is a method of its generator."""

        @wraps(original)
        def draw(*args: Any, **options: Any) -> Any:
            if self._is_worker():
                return getattr(self._generators.bound[module], original.__name__)(*args, **options)
            return original(*args, **options)

        return draw

    def _replacements(self) -> Iterator[_Place]:
        made = {name: self._by_thread(getattr(torch, name)) for name in _GENERATED}
        for name in _BY_SIZE:
            made[name] = self._sized(made[name])
        made["randint"] = self._integers(made["randint"])
        made["randperm"] = self._permutation(made["randperm"])
        for name in _OF_TENSORS:
            made[name] = self._inside(made[name], by_shape=True)
        for name in _LIKE:
            made[name] = self._like(getattr(torch, name))
        for name, function in made.items():
            yield torch, name, function
        for name in _IN_PLACE:
            method = self._by_thread(getattr(torch.Tensor, name))
            yield torch.Tensor, name, self._in_place(method)
        for module in _BOUND:
            of: Any = vars(module)
            for name, function in list(of.items()):
                if getattr(function, "__self__", None) is of["random"].__self__:
                    drawn = self._of_module(module, function)
                    if module is np.random and name in _OF_NUMPY:
                        drawn = self._arrays(drawn, _OF_NUMPY[name])
                    elif module is np.random and name == "permutation":
                        drawn = self._permutation(drawn)
                    yield module, name, drawn
        for owner, name in _DROPS:
            yield owner, name, self._inside(getattr(owner, name), by_shape=False)

    def _permutation(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `torch.randperm` or `np.random.permutation`."""

        @wraps(original)
        def draw(n: Any, *args: Any, **options: Any) -> Any:
            can = isinstance(n, int) and options.get("out") is None
            sized = self._whole((n,)) if can else None
            if sized is None:
                return original(n, *args, **options)
            _, place, (size,) = sized
            # Of the whole batch, as one process draws it; of its order this rank's samples.
            whole = original(size, *args, **options)
            return whole[(whole >= place.start) & (whole < place.stop)] - place.start

        return draw

    def _arrays(self, original: Callable[..., Any], size_at: int) -> Callable[..., Any]:
        """Wrap a function of `np.random` whose argument number `size_at` is a size; -1 for one
        whose arguments are all sizes."""

        @wraps(original)
        def draw(*args: Any, **options: Any) -> Any:
            given = args if size_at < 0 else args[size_at : size_at + 1]
            shape = options.get("size", given if size_at < 0 else (given or [None])[0])
            shape = (shape,) if isinstance(shape, int) else shape
            scalars = size_at < 0 or all(np.ndim(each) == 0 for each in args[:size_at])
            sized = self._whole(tuple(shape)) if scalars and shape else None
            if sized is None:
                return original(*args, **options)
            dim, place, whole = sized
            if size_at < 0 and "size" not in options:
                args = tuple(whole)
            else:
                args, options = _with_size(args, options, size_at, whole)
            return original(*args, **options).take(place, dim)

        return draw

    def _whole(self, shape: Sequence[int]) -> tuple[int, range, list[int]] | None:
        """Return the dimension of this rank's samples in a shape, their place in it, and the shape
        of the whole batch; None if it has none."""
        if self._is_left() or tuple(shape) in ((), (1,)):
            return None  # A single number is one for all samples.
        for place, size in self._context.places():
            for dim, count in enumerate(shape[:_DIMS]):
                if count == len(place):
                    return dim, place, [*shape[:dim], size, *shape[dim + 1 :]]
        return None

    def _whole_of(self, tensor: torch.Tensor) -> tuple[int, range, list[int]] | None:
        """Return the same of a tensor: None also for a parameter, its values or its gradient."""
        sized = None if isinstance(tensor, nn.Parameter) else self._whole(tensor.shape)
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
                return original(*args, **options)
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
                return original(*args, **options)
            dim, place, whole = sized
            args, options = _with_size(args, options, len(args) - 1, whole)
            return self._part(original(*args, **options), dim, place)

        return draw

    def _like(self, original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @wraps(original)
        def draw(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
            sized = self._whole_of(tensor)
            if sized is None:
                return original(tensor, *args, **options)
            dim, place, whole = sized
            drawn = original(tensor.detach().new_empty(whole), *args, **options)
            return self._part(drawn, dim, place)

        return draw

    def _in_place(self, original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @wraps(original)
        def draw(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
            sized = self._whole_of(tensor)
            if sized is None:
                return original(tensor, *args, **options)
            if any(isinstance(each, torch.Tensor) for each in (*args, *options.values())):
                with self._own_state(tensor.device):
                    return original(tensor, *args, **options)
            dim, place, whole = sized
            drawn = original(tensor.detach().new_empty(whole), *args, **options)
            return tensor.copy_(drawn.narrow(dim, place.start, len(place)))

        return draw

    def _inside(self, original: Callable[..., Any], by_shape: bool) -> Callable[..., Any]:
        """Wrap an operation that draws numbers of its own.

        Args:
            by_shape: it does so for samples only if a tensor has a dimension of them.
        """

        @wraps(original)
        def run(*args: Any, **options: Any) -> Any:
            tensors = [x for x in (*args, *options.values()) if isinstance(x, torch.Tensor)]
            if self._is_left() or not tensors or not any(self._context.places()):
                return original(*args, **options)
            if by_shape and all(self._whole_of(each) is None for each in tensors):
                return original(*args, **options)
            with self._own_state(tensors[0].device):
                return original(*args, **options)

        return run

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


def _present(places: Sequence[_Place]) -> list[_Place]:
    """Return the present functions of some places."""
    return [(owner, name, getattr(owner, name)) for owner, name, _ in places]


def _put(places: Sequence[_Place]) -> None:
    for owner, name, function in places:
        setattr(owner, name, function)
