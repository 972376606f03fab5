"""Hugging Face Accelerate, whose `prepare` leaves a loader alone that says it is prepared, and then
uses it like one of its own.

Accelerate fills the last batch up with samples of the first one, trains on them again, and cuts
them off its metrics. dlio's ranks have other numbers of samples instead, and some functions of
Accelerate are replaced, for dlio's loaders alone: `backward` weighs a rank's loss by its samples,
`gather_for_metrics` gathers parts of different sizes, `skip_first_batches` asks the loader, and
`prepare_data_loader` gives it the seedable sampler. In a script of `dlio run`, where Accelerate
sees one process, `gather` joins the rows of a batch that the ranks share.
"""

import importlib.abc
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable
from functools import wraps
from typing import Any, Final, Protocol

import torch
from torch.utils.data import RandomSampler

from dlio.exchange.batch_share import BatchShare, listen, share_of
from dlio.exchange.joined_batches import JoinedBatches


class PreparedLoader(Protocol):
    """The attributes that Accelerate reads of a loader that it has prepared."""

    _is_accelerate_prepared: bool
    end_of_dataloader: bool
    remainder: int


class Registration:
    """Tells Accelerate which loader is active in a pass of so many batches, None if that is
    unknown, and when its last batch has come."""

    def __init__(self, loader: PreparedLoader, length: int | None) -> None:
        self._loader, self._length = loader, length
        self._step = 0
        self._state: Any = None
        loader.end_of_dataloader = False
        loader.remainder = -1
        module = _module_in_use(loader)
        self.is_active = module is not None
        """True if Accelerate uses the loader."""
        if module is not None:
            prepare()
            listen(_weights)
            self._state = module.GradientState()
            self._state._add_dataloader(loader)

    def step(self, ended: bool) -> None:
        """Count a batch, or the end of the pass."""
        self._step += 1
        # Accelerate synchronises gradients at the last batch, so it has to know before that batch
        # is used.
        if self._length is not None and self._step >= self._length:
            self._loader.end_of_dataloader = True
        if ended and self._state is not None:
            self._state._remove_dataloader(self._loader)
            self._state = None


def device(loader: PreparedLoader) -> torch.device | None:
    """Return the device that Accelerate wants batches on; None to leave them on the host."""
    module = _module_in_use(loader)
    if module is None:
        return None
    target: torch.device = module.PartialState().device
    return None if target.type == "cpu" else target


def is_used(loader: PreparedLoader) -> bool:
    """True if Accelerate uses the loader."""
    return _module_in_use(loader) is not None


def _module_in_use(loader: PreparedLoader) -> Any:
    """accelerate.state, if the process uses Accelerate and this loader is prepared."""
    module = sys.modules.get("accelerate.state")
    if module is None or not loader._is_accelerate_prepared:
        return None
    # Scripts import Accelerate without using it.
    return module if module.AcceleratorState._shared_state else None


# Weights of the ranks' losses


class LossWeights:
    """The batch that the next loss is of: the one that was handed out last, or the one whose
    tensors the model is given, as a loop may take several batches before it computes."""

    def __init__(self) -> None:
        self._share: BatchShare | None = None
        self.fixed: float | None = None
        """Weight of the next losses, for a loop that knows better."""
        self._joined = JoinedBatches(lambda: self._share)

    def wants_repeats(self) -> bool:
        """False: the loader that is registered decides."""
        return False

    def took(self, share: BatchShare | None) -> None:
        """Learn of the batch that is handed out."""
        self._share = share
        if torch.is_grad_enabled():
            self._joined.took(share)

    def computed(self, module: Any, args: Any, options: Any, output: Any) -> None:
        """Learn of the outputs of a model that is prepared."""
        if self.fixed is None and module.training:
            self._joined.computed(module, args, options, output)

    def sees(self, module: object, args: Any, options: Any) -> None:
        """Learn of the arguments of a model that is prepared."""
        share = None if torch.compiler.is_compiling() else share_of([args, options])
        if share is not None:
            self._share = share

    def weight(self) -> float:
        """Return the factor of the loss of this rank."""
        if self.fixed is not None:
            return self.fixed
        return 1.0 if self._share is None else self._share.weight


_weights = LossWeights()


def loss_weights() -> LossWeights:
    """Return the weights of this process's losses."""
    return _weights


class _PreparesLater(importlib.abc.MetaPathFinder):
    """Prepares Accelerate where it is imported after loaders of dlio were made."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> Any:
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            executes = loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                executes(module)
                prepare()

            loader.exec_module = exec_module
        return spec


_MODULE: Final = "accelerate.accelerator"
_later = _PreparesLater()


def prepare() -> None:
    """Replace Accelerate's functions, once it is imported."""
    module: Any = sys.modules.get(_MODULE)
    if module is None and _later not in sys.meta_path:
        sys.meta_path.insert(0, _later)
    kind = getattr(module, "Accelerator", None)  # None while it is being imported.
    if kind is None or getattr(kind, "_knows_dlio", False):
        return
    kind._knows_dlio = True
    kind.backward = _backward(kind.backward)
    kind.gather_for_metrics = _gather_for_metrics(kind.gather_for_metrics)
    kind.gather = _gather(kind.gather)
    kind.prepare_data_loader = _prepare_data_loader(kind.prepare_data_loader)
    _replace(sys.modules["accelerate.data_loader"].skip_first_batches, _skip_first_batches)
    _replace(sys.modules["accelerate.utils"].gather, _gather_tensors)
    _replace(sys.modules["accelerate.utils"].gather_object, _gather_objects)


_originals: dict[str, Any] = {}


def _replace(function: Any, by: Any) -> None:
    """Replace a function's code: scripts and Trainer have imported it by name."""
    inner = inspect.unwrap(function)
    kept = types.FunctionType(inner.__code__, inner.__globals__, inner.__name__)
    kept.__defaults__ = inner.__defaults__
    _originals[inner.__name__] = kept
    inner.__code__ = by.__code__


def _prepare_data_loader(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def prepare_data_loader(accelerator: Any, loader: Any, *args: Any, **options: Any) -> Any:
        prepared = getattr(loader, "_is_accelerate_prepared", False)
        if prepared and accelerator.use_seedable_sampler and not loader.follows_formula():
            _make_seedable(loader, accelerator.dataloader_config.data_seed)
        return original(accelerator, loader, *args, **options)

    return prepare_data_loader


def _make_seedable(loader: Any, seed: int | None) -> None:
    """Give a loader that shuffles the sampler that Accelerate gives it in one process."""
    seedable: Any = sys.modules["accelerate.data_loader"].SeedableRandomSampler
    batches = loader.batch_sampler
    sampler = getattr(batches, "sampler", None)
    if not isinstance(sampler, RandomSampler) or isinstance(sampler, seedable):
        return
    batches.sampler = seedable(
        data_source=sampler.data_source,
        replacement=sampler.replacement,
        num_samples=sampler._num_samples,
        generator=sampler.generator,
        data_seed=seed,
    )


def _backward(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def backward(accelerator: Any, loss: Any, *args: Any, **options: Any) -> None:
        for model in accelerator._models:
            if not getattr(model, "_dlio_sees", False):
                model._dlio_sees = True
                model.register_forward_pre_hook(_weights.sees, with_kwargs=True)
                model.register_forward_hook(_weights.computed, with_kwargs=True)
        weight = _weights.weight() if accelerator.num_processes > 1 else 1.0
        if weight != 1.0:
            # A repeated sample's loss may be NaN; it counts 0.
            loss = loss * weight if weight else torch.nan_to_num(loss, 0.0, 0.0, 0.0) * 0.0
        original(accelerator, loss, *args, **options)

    return backward


def _skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    # This code runs as Accelerate's function: it sees that module's names, not this one's.
    from dlio.loader.third_party.accelerate import skipped

    return skipped(dataloader, num_batches)


def skipped(loader: Any, count: int) -> Any:
    """Return a loader that leaves out the first `count` batches, as Accelerate's function does;
    one of dlio's leaves them out of its next pass."""
    ask = getattr(loader, "skip_first_batches", None)
    if ask is None or not loader.follows_formula():
        rest = _originals["skip_first_batches"](loader, count)
        if ask is not None and hasattr(rest, "follows_formula"):
            # Accelerate hears of its last batch as it did of the loader's.
            rest._is_accelerate_prepared = loader._is_accelerate_prepared
        return rest
    ask(count)
    return loader


# Metrics


def _gather_tensors(tensor: Any) -> Any:
    from dlio.loader.third_party.accelerate import gathered

    return gathered("gather", tensor)


def _gather_objects(object: Any) -> Any:  # noqa: A002 - Accelerate's name, which callers may use
    from dlio.loader.third_party.accelerate import gathered

    return gathered("gather_object", object)


def gathered(name: str, data: Any) -> Any:
    """Return what a function of Accelerate's, called by itself, gathers: in a script of `dlio run`,
    the rows of a batch that the ranks share."""
    loader = sys.modules["accelerate.state"].GradientState().active_dataloader
    join = getattr(loader, "joined_rows", None)
    if join is None:
        return _originals[name](data)
    if name == "gather_object":
        return join(data)
    return sys.modules["accelerate.utils"].recursively_apply(join, data)


def _gather(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def gather(accelerator: Any, tensor: Any) -> Any:
        join = getattr(accelerator.gradient_state.active_dataloader, "joined_rows", None)
        if join is not None:
            return sys.modules["accelerate.utils"].recursively_apply(join, tensor)
        return original(accelerator, tensor)

    return gather


def _gather_for_metrics(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def gather(accelerator: Any, input_data: Any, use_gather_object: bool = False) -> Any:
        loader = accelerator.gradient_state.active_dataloader
        join = getattr(loader, "joined_rows", None)
        if join is not None and _has_others(input_data, use_gather_object):
            return join(input_data)
        share = getattr(loader, "batch_share", None)
        if not isinstance(share, BatchShare):
            return original(accelerator, input_data, use_gather_object)
        size = loader.batch_size
        if share.is_even and share.counts[0] == size:
            return original(accelerator, input_data, use_gather_object)
        utils: Any = sys.modules["accelerate.utils"]
        if _has_others(input_data, use_gather_object):
            if isinstance(input_data, list | tuple | torch.Tensor) and not share.samples:
                input_data = input_data[:0]
            return utils.gather_object(input_data)
        return utils.recursively_apply(
            lambda tensor: _gathered(accelerator, tensor, share, size), input_data
        )

    return gather


def _has_others(data: Any, is_known: bool) -> bool:
    """True if something is gathered that is not all tensors."""
    try:
        sys.modules["accelerate.utils"].recursively_apply(
            lambda x: x, data, error_on_other_type=True
        )
    except TypeError:
        return True
    return is_known


def _gathered(accelerator: Any, tensor: torch.Tensor, share: BatchShare, size: int) -> torch.Tensor:
    """Return the rows of all ranks that are of samples, in the order of ranks."""
    rows = tensor.reshape(1) if not tensor.ndim else tensor
    if len(rows) == size < share.samples:  # A loss, repeated as for an ordinary batch.
        rows = rows[:1].expand(share.samples, *rows.shape[1:])
    own = torch.tensor([len(rows), share.samples], device=rows.device)
    lengths = accelerator.gather(own).reshape(-1, 2).tolist()
    most = max(length for length, _ in lengths)
    if most > len(rows):
        rows = torch.cat([rows, rows.new_zeros((most - len(rows), *rows.shape[1:]))])
    whole = accelerator.gather(rows.contiguous())
    kept = [
        whole[rank * most : rank * most + _rows_of(length, samples, size)]
        for rank, (length, samples) in enumerate(lengths)
    ]
    return torch.cat(kept)


def _rows_of(length: int, samples: int, size: int) -> int:
    """Return how many of a rank's rows are of its samples. There are as many, or one value of the
    batch is repeated for a whole one, as Trainer does with losses."""
    if not samples:
        return 0
    return samples if length == size else length
