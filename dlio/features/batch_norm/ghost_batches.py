"""Training steps that are the same, bit for bit, whichever rank computes a sample.

`--batch-norm ghost(16)` cuts each global batch into groups of 16 samples at fixed places of the
epoch's order. A rank computes its groups one by one. Each is normalised by its own mean and
variance (ghost batch normalisation, arXiv 1705.08741) and draws dropout from a seed of its own, so
that its gradient is the same on any rank, as of the logical workers of EasyScale
(arXiv 2208.14228).

Gradients of groups are float32. Their sum over groups and ranks is float64, rounded to float32
once. It is exact, and so independent of the order of its terms, unless one term is smaller than
another by a factor of 2^25 or more; even then a different rounding of the sum to float32 has a
chance of about 2^-28. The statistics of each batch normalisation travel in the same message: the
running ones are updated once per step, by the mean over groups.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Final

import torch
import xxhash
from torch.nn import functional

from dlio.exchange.buckets import broadcast_state, check_real
from dlio.exchange.rank_group import RankGroup
from dlio.features.batch_norm.batch_norm_feature import BatchNormOptions, group_size
from dlio.features.batch_norm.sync_batch_norm import TrackingNorm, change_norms
from dlio.train.feature_hooks import FeatureHooks, FeatureRun

_WIDE: Final = torch.float64


class _GhostBatchNorm(TrackingNorm):
    """A batch normalisation that sums up the statistics of groups in place of tracking them."""

    sums: torch.Tensor
    """Sums over groups of the mean, the variance and 1; shape (2 channels + 1,)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # x: (n, channels, ...) -> the same shape
        if not self.training:
            return super().forward(x)
        check: Callable[[torch.Tensor], None] = self._check_input_dim
        check(x)
        channels = self.num_features
        alone = x.numel() == channels  # One value has no variance.
        if alone and self.running_mean is not None:
            return functional.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
            )
        dtype = torch.float32 if self.weight is None else self.weight.dtype
        mean, variance = torch.zeros(2, channels, dtype=dtype, device=x.device)
        normalised = functional.batch_norm(
            x, mean, variance, self.weight, self.bias, True, 1.0, self.eps
        )
        with torch.no_grad():
            self.sums[:channels] += mean
            self.sums[channels:-1] += variance
            self.sums[-1] += 1
        return normalised

    def note_groups(self, sums: torch.Tensor) -> None:
        """Take the mean of all groups' statistics into the running ones."""
        if groups := float(sums[-1]):
            self.note(*sums[:-1].div(groups).chunk(2))


class GhostHooks(FeatureHooks):
    """The groups of a run, which sum gradients in place of its exchange.

    Changes the model's batch normalisations in place; its parameters' shapes stay.
    """

    sums_gradients = True

    def __init__(self, options: BatchNormOptions, run: FeatureRun) -> None:
        """Raises UsageError for complex parameters."""
        size, config, model = group_size(options.batch_norm), run.config, run.model
        assert size is not None
        if not run.is_found:
            broadcast_state(model, run.layout.replicas)
        check_real(list(model.named_parameters()))
        self._comm = run.layout.replicas.dup()
        self._traffic = RankGroup(self._comm)
        self._per_rank, self._seed = config.batches.batch_size // size, config.data.seed
        """Groups of each rank's part of a global batch, and the seed of dropout."""
        self._parameters = list(model.parameters())
        self._layers = change_norms(model, _GhostBatchNorm)
        counts = [parameter.numel() for parameter in self._parameters]
        counts += [len(counts), *(2 * layer.num_features + 1 for layer in self._layers), 1]
        device = self._parameters[0].device if self._parameters else None
        self._flat = torch.zeros(sum(counts), dtype=_WIDE, device=device)
        self._gradients, self._reached, self._statistics, self._samples = self._split(self._flat)
        for layer, sums in zip(self._layers, self._statistics, strict=True):
            layer.sums = sums
        self._wait_s, self._sums = 0.0, 0

    def groups(self, count: int, planned: int) -> Sequence[slice]:
        # They divide the batch evenly, as ranks do, so that they are within ranks' parts. If
        # unreadable samples are missing, they are others. Empty ones are left out.
        first, groups = self._comm.rank * self._per_rank, self._comm.size * self._per_rank
        edges = [planned * (first + k) // groups for k in range(self._per_rank + 1)]
        edges = [edge - edges[0] for edge in edges]
        if edges[-1] != count:
            edges = [count * k // self._per_rank for k in range(self._per_rank + 1)]
        pairs = itertools.pairwise(edges)
        return [slice(start, stop) for start, stop in pairs if stop > start]

    def begin_group(self, run: FeatureRun, group: slice, planned: int) -> None:
        place = run.position + planned * self._comm.rank // self._comm.size + group.start
        text = f"{self._seed} {run.epoch_number} {place}".encode()
        torch.manual_seed(xxhash.xxh3_64_intdigest(text) >> 1)

    @torch.no_grad()
    def end_group(self, samples: int) -> None:
        # The sum over groups takes the place of the gradients.
        for number, parameter in enumerate(self._parameters):
            if parameter.grad is not None:
                self._gradients[number] += parameter.grad
                self._reached[number] += 1
                parameter.grad = None
        self._samples += samples

    @torch.no_grad()
    def before_step(self, planned: int) -> None:
        # Gradients are those of the sum of losses divided by `planned`; they are scaled if
        # unreadable samples are missing. A parameter that no group has reached gets none.
        began = time.perf_counter()
        total = self._traffic.total(self._flat)
        self._wait_s += time.perf_counter() - began
        self._sums += self._comm.size > 1
        gradients, reached, statistics, samples = self._split(total)
        taken = float(samples)
        are_reached = reached.tolist()
        for number, parameter in enumerate(self._parameters):
            parameter.grad = None
            if are_reached[number]:
                gradient = gradients[number]
                if taken not in (0, planned):
                    gradient *= planned / taken
                parameter.grad = torch.empty_like(parameter).copy_(gradient)
        for layer, sums in zip(self._layers, statistics, strict=True):
            layer.note_groups(sums)
        self._flat.zero_()

    def statistics(self) -> dict[str, float]:
        # A sum counts as one message of its length.
        size = self._flat.numel() * self._flat.element_size()
        return {"wait_s": self._wait_s, "messages": self._sums, "bytes": self._sums * size}

    def close(self) -> None:
        if self._comm.size > 1:
            self._comm.close()

    def _split(
        self, flat: torch.Tensor
    ) -> tuple[list[torch.Tensor], torch.Tensor, list[torch.Tensor], torch.Tensor]:
        """Return views of the gradients, the counts of groups that reached each parameter, the
        layers' sums, and the count of samples."""
        shapes = [parameter.shape for parameter in self._parameters]
        sizes = [2 * layer.num_features + 1 for layer in self._layers]
        counts = [shape.numel() for shape in shapes]
        parts = torch.split(flat, [*counts, len(counts), *sizes, 1])
        gradients = [part.view(shape) for part, shape in zip(parts, shapes, strict=False)]
        return gradients, parts[len(counts)], list(parts[len(counts) + 1 : -1]), parts[-1]
