"""Weighs the gradients of a model by the batches that a `dlio.DataLoader` hands out."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from dlio.exchange.batch_share import (
    BatchShare,
    listen,
    parts_of,
    share_of,
    stop_listening,
    tensors_of,
)
from dlio.exchange.exchange_base import Exchange
from dlio.exchange.joined_batches import JoinedBatches
from dlio.exchange.loss_watch import BatchCount
from dlio.exchange.synchronous_sgd import SynchronousSgd


class _Hook(Protocol):
    def remove(self) -> None: ...


class BatchWeights:
    """Has each rank's gradient count by its samples, until the loop weighs by itself.

    `exchanges` returns the exchanges of the model's optimizers. One that sums gradients gets the
    weight with them. Where gradients are held, which sum several batches before they are sent, and
    where ranks make steps of their own, each batch's gradient is scaled as backward computes it.
    """

    def __init__(self, model: nn.Module, exchanges: Callable[[], Sequence[Exchange]]) -> None:
        self._model, self._exchanges = model, exchanges
        self._share: BatchShare | None = None
        self._scale = 1.0
        """Factor of gradients that backward computes now."""
        self._was_held = False
        """True if a batch was held since the last step."""
        self._of_gradients: list[_Hook] = []
        self._of_model = model.register_forward_pre_hook(self._forward, with_kwargs=True)
        self._joined = JoinedBatches(lambda: self._share)
        self._of_outputs = model.register_forward_hook(self._computed, with_kwargs=True)
        self._closed = False
        self._counted, self._counts_training = 0, True
        self._rows: int | None = None
        """Rows of the tensor that the model computes on."""
        listen(self)

    def wants_repeats(self) -> bool:
        """True while the model is trained: in evaluation a repeated sample would count."""
        return self._model.training and torch.is_grad_enabled()

    def took(self, share: BatchShare | None) -> None:
        """Learn of the batch that is handed out."""
        is_training = self.wants_repeats()
        if is_training != self._counts_training:
            self._counted, self._counts_training = 0, is_training
        self._counted += 0 if share is None else share.samples
        if is_training:
            self._joined.took(share)
            self.use(share)

    def take_samples(self) -> int:
        """Return the number of this rank's samples since the last call, those of the latest
        evaluation if it is newer than any training: a metric is most likely their mean."""
        samples, self._counted = self._counted, 0
        return samples

    def use(self, share: BatchShare | None) -> None:
        """Weigh the next backward by a batch; None for one that all ranks count alike. Collective
        where ranks share it otherwise than the last one."""
        if not self._closed:
            if parts_of(share) != parts_of(self._share):
                for exchange in self._exchanges():
                    exchange.settle_assigned()
            self._share = share
            self._weigh()

    def use_again(self) -> None:
        """Weigh an exchange, too, that was started since the batch was handed out."""
        if not self._closed:
            self._weigh()

    @property
    def weight(self) -> float:
        """This rank's weight in the present batch; the ranks' mean weight is 1."""
        return 1.0 if self._share is None else self._share.weight

    @property
    def weighing(self) -> BatchCount:
        """How this rank's next loss counts."""
        share = self._share
        samples = share.samples if share is not None and share.samples else self._rows
        return BatchCount(samples, self.weight, share is None or share.is_even)

    @property
    def number(self) -> int:
        """Number of the present batch in its pass, from 1; 0 if unknown."""
        return 0 if self._share is None else self._share.number

    def hold(self, held: bool) -> None:
        """Note that gradients are held from now on, or no more."""
        if held and not self._was_held and not self._closed:
            self._was_held = True
            self._weigh()

    def stepped(self, *_: object) -> None:
        """Note that the optimizer has made its step: nothing is held."""
        if self._was_held:
            self._was_held = False
            if not self._closed:
                self._weigh()

    def close(self) -> None:
        """Weigh no more."""
        if not self._closed:
            self._closed = True
            stop_listening(self)
            self._of_model.remove()
            self._of_outputs.remove()
            self._scale_gradients(1.0)

    def _forward(self, module: nn.Module, args: Any, options: Any) -> None:
        # Not while the model is compiled: the batch that was handed out last is a good guess.
        if not torch.compiler.is_compiling() and self.wants_repeats():
            data = [args, options]
            shapes = (each.shape for each in tensors_of(data) if each.ndim)
            self._rows = next((shape[0] for shape in shapes), None)
            share = share_of(data)
            if share is not None and share is not self._share:
                self.use(share)

    def _computed(self, module: nn.Module, args: Any, options: Any, output: Any) -> None:
        if self._model.training:
            self._joined.computed(module, args, options, output)

    def _weigh(self) -> None:
        weight, exchanges = self.weight, self._exchanges()
        in_sums = not self._was_held and all(isinstance(e, SynchronousSgd) for e in exchanges)
        # With weights of 1 the mean over ranks of gradients that are scaled is the batch's.
        for exchange in exchanges:
            exchange.weigh(weight if in_sums else 1.0)
        self._scale_gradients(1.0 if in_sums else weight)

    def _scale_gradients(self, scale: float) -> None:
        self._scale = scale
        if (scale == 1.0) == (not self._of_gradients):
            return
        for hook in self._of_gradients:
            hook.remove()
        self._of_gradients = []
        if scale != 1.0:
            parameters: Iterable[Any] = self._model.parameters()  # torch leaves the method untyped.
            trained = [each for each in parameters if each.requires_grad]
            self._of_gradients = [each.register_hook(self._scaled) for each in trained]

    def _scaled(self, gradient: torch.Tensor) -> torch.Tensor:
        # A repeated sample's gradient may be NaN, such as of a standard deviation; it counts 0.
        return gradient * self._scale if self._scale else torch.zeros_like(gradient)
