"""Batches in the making: payloads become samples in the slots of a batch.

A `BatchFactory` is made once for a loader and keeps the memory of its batches from pass to pass. It
begins a `BatchBuilder` for each batch, which the pipeline drives:

    factory.begin(epoch, samples, sizes, partners)   the user's thread, in the order of steps
    builder.take_decoded(slots)                      decode threads, for parts of the batch
    builder.make_many(slots, payloads)               decode threads, for what was not decoded yet
    builder.finish(slots)                            the thread that made the last sample

Here is the builder of crops of images. `sample_builders` has the others of the host, and chooses
among them; `device_builders` has those that decode, or keep decoded images, on a device.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dlio.data.schema import Buffer
from dlio.image.decoder import finish_all
from dlio.loader.contract import BatchData, CollateFn, Sample
from dlio.loader.planned_engine.batch_memory import BatchMemory, CropMemory
from dlio.loader.planned_engine.mixup_partners import BatchPartners, decode_partners
from dlio.loader.planned_engine.native_pool import (
    DECODED,
    NativeArrays,
    NativeInput,
    NativeRecipe,
)
from dlio.loader.recipe import CropRecipe
from dlio.plan.epoch import EpochPlan
from dlio.storage.decoded_tier import DecodedTier
from dlio.storage.hierarchy import Hierarchy

# The contract between the pipeline and the kinds of batches


class BatchBuilder(ABC):
    """One batch in the making. Each slot is made once, from any thread; then `finish` is called.

    The batch is described by arrays with a row for each slot, and an error takes a sample's place
    in `failed` instead of ending the call: whoever makes a whole batch by one call, in Python or
    not, needs nothing else.

    `samples` has the index of each slot's sample.
    """

    makes_together = False
    """True if small samples are made several at a time, so that a thread gives the interpreter's
    lock away, and waits for it, once for all of them. Otherwise each sample is read just before it
    is made, while its payload is in the processor's cache."""
    may_be_decoded = False
    """True if a tier keeps samples decoded, so that their payloads may not be needed."""
    finds_whole = False
    """True if `find` looks up a whole batch, in the time of looking up one sample."""
    reads_directly = False
    """True if payloads are read into the batch itself, by `read_directly`."""
    decodes_whole = False
    """True if `make_many` only gathers bytes, which `decode_whole` decodes together."""
    native: NativeArrays | None = None
    """Memory that native threads may make slots in, in place of `make_many`; see
    `BatchFactory.native`."""
    has_inputs = False
    """True if `native_input` gives the payloads, which are not whole samples of the data set."""
    finishes_slowly = False
    """True if `finish` calls functions of the user, decodes, or computes: not for the user's
    thread."""
    transforms = False
    """True if `transform` is to be called for the slots that native threads have made."""

    def __init__(self, samples: npt.NDArray[np.int64]) -> None:
        self.samples = samples
        self.failed: dict[int, BaseException] = {}
        """Error of each slot that failed."""

    def find(self, slots: list[int]) -> tuple[list[int], float]:
        """Take samples that a device has; return (the other slots, seconds of decoding saved)."""
        return slots, 0.0

    def take_decoded(self, slots: list[int]) -> tuple[list[int], float]:
        """Make the samples that a tier of the host keeps decoded; return as `find`."""
        return slots, 0.0

    @abstractmethod
    def make_many(self, slots: Sequence[int], payloads: Sequence[Buffer]) -> float:
        """Make samples in their slots; return the seconds spent in the user's transform."""

    def native_input(self, slots: npt.NDArray[np.int64]) -> NativeInput:
        """Return the payloads that native threads make slots of."""
        raise NotImplementedError

    def make_room(  # noqa: B027
        self, given: NativeInput, known: npt.NDArray[np.bool_]
    ) -> None:
        """Get the memory that native threads write the `known` ones of some payloads to, where
        their sizes differ; called before they begin."""

    def transform(self, slots: Sequence[int]) -> float:
        """Do what is left in Python for slots that native threads have made, such as the user's
        transform; return the seconds spent in that."""
        raise NotImplementedError

    def read_directly(
        self, slot: int, read: Callable[[Sequence[memoryview]], str]
    ) -> tuple[str, int]:
        """Call `read` with the memory for a slot's payload; return (its result, bytes)."""
        raise NotImplementedError

    def decode_whole(self, slots: Sequence[int]) -> None:
        """Decode the slots that `make_many` has gathered; called once, before `finish`."""
        raise NotImplementedError

    @abstractmethod
    def finish(self, slots: Sequence[int] | None) -> BatchData:
        """Return the batch of the slots given; of all slots for None."""


@dataclass(frozen=True, slots=True)
class BatchFactory:
    """Begins the batches of one loader. Owner: the engine, which closes it."""

    begin: Callable[[int, npt.NDArray[np.int64], Sequence[int], BatchPartners | None], BatchBuilder]
    """Called with the epoch of the crops, the samples of a batch, or of several, how many each of
    these has, and the samples' partners, if they are mixed."""
    batch_bytes: int
    """Approximate bytes of a batch."""
    native: NativeRecipe | None = None
    """How native threads make the batches; None where Python's threads make them."""
    together: int = 1
    """Batches that a builder may make as one, at most: of small samples, Python takes longer for a
    batch than for the samples themselves."""
    hierarchy: Hierarchy | None = None
    """Whose blocks native threads read; None for that of the data set."""
    keeps_payloads: bool = False
    """True if samples share the memory of their payloads, which is not used again then."""
    close: Callable[[], None] | None = None
    follow_plan: Callable[[EpochPlan], None] | None = None
    """Told the plan of a pass, before its first batch."""


def rows_of(slots: Sequence[int] | None) -> list[int] | slice:
    """Return the index of slots in an array, for `BatchBuilder.finish`: without a copy if none of a
    batch has failed."""
    if slots is None:
        return slice(None)
    return slice(slots.start, slots.stop) if isinstance(slots, range) else list(slots)


# Crops of images


@dataclass(frozen=True, slots=True)
class PixelNumbers:
    """Numbers that batches of crops have in place of bytes."""

    memory: CropMemory
    values: npt.NDArray[Any]
    """Number of each byte, by channel, shape (3, 256)."""
    dtype: torch.dtype
    """Of the numbers, whose bits are in the arrays."""

    def fill(self, slot: int, pixels: npt.NDArray[np.uint8]) -> None:
        """Write the numbers of a slot's crop, shape (height, width, 3)."""
        for channel, values in enumerate(self.values):
            self.memory[slot][..., channel] = values[pixels[..., channel]]


class CropBatchBuilder(BatchBuilder):
    """Images as crops in the batch's own memory.

    A batch is (uint8 tensor of shape (n, 3, size, size), int64 tensor of shape (n,)); with a
    transform the first is default_collate's result for the transformed crops.
    Several crops of each image have shape (n, crops, 3, size, size).
    In place of the labels it has masks of shape (n, size, size), or a list of targets. Unlabelled
    images are {name of the field: images}.

    `collate` is a function of the user; None for torch's own. The tier `decoded` is offered the
    images that are decoded here, and `images` is the memory of the batch, or of several. With
    `numbers`, which are the crops' bytes as `numbers.values` has them, the batch is made of these.
    With `planar`, of shape (batch, 3, height, width), they are copied into memory of that.
    """

    def __init__(
        self,
        recipe: CropRecipe,
        collate: CollateFn | None,
        decoded: DecodedTier | None,
        images: CropMemory,
        epoch: int,
        samples: npt.NDArray[np.int64],
        partners: BatchPartners | None,
        numbers: PixelNumbers | None = None,
        planar: BatchMemory | None = None,
    ) -> None:
        super().__init__(samples)
        self.may_be_decoded = decoded is not None
        self.makes_together = decoded is None
        self._recipe, self._collate, self._decoded = recipe, collate, decoded
        self._images, self._partners, self._epoch = images, partners, epoch
        self._numbers, self._planar = numbers, planar
        fields = recipe.companion.numbers
        # Class numbers in an array, where native threads may write them.
        classes = np.zeros(len(samples), np.int64)
        self._companions: Any = [0] * len(samples) if fields is None else classes
        # Drawn for the whole batch: numpy's calls take as long for one sample as for many.
        self._uniforms = recipe.decoder.draw(epoch, samples)
        if fields is not None:
            memory = images if numbers is None else numbers.memory
            self.native = NativeArrays(
                dict.fromkeys(fields, classes), memory.addresses(), self._uniforms, memory.arrays
            )
        self.has_inputs = decoded is not None
        self.transforms = recipe.transforms
        self.finishes_slowly = (
            collate is not None
            or partners is not None
            or recipe.batch_transform is not None
            or planar is not None
        )
        self._transformed: list[Sample] = [None] * len(samples) if recipe.transforms else []

    def native_input(self, slots: npt.NDArray[np.int64]) -> NativeInput:
        """Return the images of slots that are kept decoded, and write their classes."""
        assert self._decoded is not None
        located, shapes, labels = self._decoded.locate(self.samples[slots])
        located.column("tier")[:] = DECODED
        self._companions[slots[located.known]] = labels[located.known]
        return NativeInput(
            slots,
            located,
            located.column("block"),
            None,
            pixels=shapes,
            saved_s=self._decoded.saves_s,
        )

    def take_decoded(self, slots: list[int]) -> tuple[list[int], float]:
        if self._decoded is None:
            return slots, 0.0
        rest, there, pixels = [], [], []
        for slot in slots:
            kept = self._decoded.get(int(self.samples[slot]))
            if kept is None:
                rest.append(slot)
                continue
            there.append(slot)
            pixels.append(kept[0])
            self._companions[slot] = kept[1]
        uniforms = [self._uniforms[slot] for slot in there]
        finish_all(self._recipe.decoder, pixels, uniforms, [self._images[slot] for slot in there])
        self.transform(there)
        return rest, len(there) * self._decoded.saves_s

    def make_many(self, slots: Sequence[int], payloads: Sequence[Buffer]) -> float:
        if self._decoded is not None:
            return self.transform(self._decode_and_keep(self._decoded, slots, payloads))
        # One call for all: a thread that gives up the interpreter's lock waits for it afterwards.
        made = self._recipe.decode_many(
            [self._images[slot] for slot in slots],
            self.samples[list(slots)].tolist(),
            payloads,
            [self._uniforms[slot] for slot in slots],
        )
        decoded = []
        for slot, companion in zip(slots, made, strict=True):
            if isinstance(companion, Exception):
                self.failed[slot] = companion
                continue
            self._companions[slot] = companion
            decoded.append(slot)
        return self.transform(decoded)

    def _decode_and_keep(
        self, tier: DecodedTier, slots: Sequence[int], payloads: Sequence[Buffer]
    ) -> list[int]:
        """Decode images, offer them to the tier, and crop them; return the slots that are made."""
        made = []
        for slot, payload in zip(slots, payloads, strict=True):
            sample = int(self.samples[slot])
            try:
                pixels, label, seconds = self._recipe.prepare(sample, payload)
                tier.put(sample, pixels, label, seconds)
                self._recipe.decoder.finish(pixels, self._uniforms[slot], self._images[slot])
                self._companions[slot] = label
                made.append(slot)
            except Exception as error:
                self.failed[slot] = error
        return made

    def transform(self, slots: Sequence[int]) -> float:
        seconds = 0.0
        if self._numbers is not None:
            for slot in slots:
                self._numbers.fill(slot, self._images[slot])
        if not self._transformed:
            return seconds
        for slot in slots:
            try:
                self._transformed[slot], more = self._recipe.transformed(
                    self._images[slot], self._epoch, int(self.samples[slot])
                )
                seconds += more
            except BaseException as error:  # SystemExit too: it must not end the thread.
                self.failed[slot] = error
        return seconds

    def finish(self, slots: Sequence[int] | None) -> BatchData:
        memory = self._images if self._numbers is None else self._numbers.memory
        images, first = memory.batch_of(slots[0] if slots else 0)
        companions, transformed = self._companions, self._transformed
        count, samples = len(companions), self.samples
        if isinstance(slots, range):  # One of several batches.
            count, rows = len(slots), rows_of(slots)
            companions, samples = companions[rows], samples[rows]
        elif slots is not None:
            # Moved up over samples that failed, so that the tensor stays a view of the memory.
            for k, slot in enumerate(slots):
                if k != slot - first:
                    images[k] = images[slot - first]
            count = len(slots)
            if isinstance(companions, list):
                companions = [companions[slot] for slot in slots]
            else:
                companions = companions[list(slots)]
            samples = samples[list(slots)]
            transformed = [transformed[slot] for slot in slots] if transformed else []
        recipe, companion = self._recipe, self._recipe.companion
        mixed: tuple[npt.NDArray[np.int64], ...] = ()  # Samples behind the others, and partners.
        if self._partners is not None:
            partners = self._partners if slots is None else self._partners.of(slots)
            labels = np.asarray(companions, np.int64)

            def partner(row: int, sample: int, uniforms: npt.NDArray[np.float64]) -> int:
                own = self._images[row]
                label: int = recipe.decode(own, sample, partners.fetch(sample), uniforms)
                recipe.transformed(own, self._epoch, sample)
                if self._numbers is not None:
                    self._numbers.fill(row, own)
                return label

            labels, *rest = decode_partners(partners, recipe, self._epoch, samples, partner, labels)
            companions, mixed, count = labels, tuple(rest), len(labels)
        # Channels-last memory, which convolutions prefer: torch's layout costs a copy here.
        crops = torch.from_numpy(images[:count]).movedim(-1, -3)
        if self._planar is not None and not recipe.transforms:
            crops = torch.from_numpy(self._planar.take(count)).copy_(crops)
        if self._numbers is not None:
            crops = crops.view(self._numbers.dtype)  # numpy knows no bfloat16.
        if self._collate is not None:
            if isinstance(companions, np.ndarray):
                companions = companions.tolist()
            firsts: BatchData = transformed
            if recipe.transform is None:
                firsts, batchwise = crops, recipe.batch_transform
                if batchwise is not None:
                    targets = torch.tensor(companions) if batchwise.mixes else companions
                    firsts, companions = batchwise(crops, targets, self._epoch, samples, *mixed)
            return self._collate(list(map(companion.sample, firsts, companions)))
        if recipe.transform is None:
            made = companion.batch(crops, companions)
            return (*made, *mixed) if mixed else made
        whole = torch.utils.data.default_collate(transformed) if transformed else torch.empty(0)
        return companion.batch(whole, companions)
