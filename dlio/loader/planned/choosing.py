"""The maker that a loader's options ask for, kept from pass to pass with its memory."""

import os
from dataclasses import dataclass

import torch

from dlio.errors import UsageError
from dlio.loader.contract import CollateFn
from dlio.loader.dataset import Dataset
from dlio.loader.decoding import check_recipe
from dlio.loader.device import target_of
from dlio.loader.options import LoaderOptions
from dlio.loader.planned.device_maker import DeviceMaker
from dlio.loader.planned.makers import Maker, maker_for
from dlio.loader.planned.tier_maker import TierMaker
from dlio.loader.streams import Pinned
from dlio.storage.device_tier import DeviceTier
from dlio.storage.mount import Mount
from dlio.util.settings import DEVICE_TIER
from dlio.util.units import format_bytes

__all__ = ["Makers"]


@dataclass(frozen=True, slots=True, eq=False)
class _Made:
    """A maker, and the choices that it was made for."""

    data: Dataset
    collate: CollateFn
    pinned: Pinned
    decodes_on: torch.device | None
    batch_size: int
    maker: Maker

    def serves(self, data: Dataset, options: LoaderOptions, batch_size: int) -> bool:
        """True if batches of these options can be made by it."""
        return (
            self.data is data
            and self.collate is options.collate_fn
            and self.pinned is _pinned(options)
            and self.decodes_on == _decodes_on(options)
            and batch_size <= self.batch_size
        )


class Makers:
    """The maker of a loader's passes, made anew when its options change. Owner: the engine."""

    def __init__(self) -> None:
        self._made: _Made | None = None
        self._on_devices: list[DeviceMaker] = []
        """Makers to close; a pass that was begun ahead may use an earlier one."""

    def get(
        self,
        options: LoaderOptions,
        data: Dataset,
        mounted: Mount,
        batch_size: int,
        threads: int,
    ) -> Maker:
        """Return the maker.

        Args:
            batch_size: samples of the largest batch.
            threads: of the loader.

        Raises UsageError for options that do not go together with the data set or its tiers.
        """
        if self._made is None or not self._made.serves(data, options, batch_size):
            pinned, device = _pinned(options), _decodes_on(options)
            if device is not None:
                maker = self._decoding(options, data, mounted, batch_size, (device, threads))
            else:
                maker = _on_host(options, data, mounted, batch_size, pinned)
            self._made = _Made(data, options.collate_fn, pinned, device, batch_size, maker)
        return self._made.maker

    def close(self) -> None:
        """End the decoders of devices."""
        for maker in self._on_devices:
            maker.close()
            self._made = None
        self._on_devices.clear()

    def _decoding(
        self,
        options: LoaderOptions,
        data: Dataset,
        mounted: Mount,
        batch_size: int,
        place: tuple[torch.device, int],
    ) -> Maker:
        """Return a maker that decodes on a device, with so many threads."""
        check_recipe(data.recipe)
        collate = None if options.collates_by_default else options.collate_fn
        counters = mounted.hierarchy.counters
        made = DeviceMaker(data.recipe, batch_size, collate, *place, counters)
        self._on_devices.append(made)
        return made


def _on_host(
    options: LoaderOptions, data: Dataset, mounted: Mount, batch_size: int, pinned: Pinned
) -> Maker:
    """Return a maker that decodes in the loader's threads."""
    recipe, collate = data.recipe, options.collate_fn
    decoded = mounted.decoded(recipe.decoder.recipe)
    tier = _device_tier(options, mounted)
    if tier is not None:
        return TierMaker(recipe, batch_size, pinned, tier, decoded)
    return maker_for(recipe, batch_size, collate, options.collates_by_default, pinned, decoded)


def _pinned(options: LoaderOptions) -> Pinned:
    """Kind of memory that batches are made in."""
    if options.device is not None and torch.device(options.device).type == "cuda":
        return Pinned.IN_POOL
    return Pinned.BY_TORCH if options.pin_memory and torch.cuda.is_available() else Pinned.NO


def _decodes_on(options: LoaderOptions) -> torch.device | None:
    """Return the device that decodes; None for the loader's threads."""
    if options.decode == "cpu" or options.device is None:
        return None
    return target_of(options.device)


def _device_tier(options: LoaderOptions, mounted: Mount) -> DeviceTier | None:
    """Return the tier on the device of the batches; None if none is specified.

    Raises UsageError for a loader that cannot use it.
    """
    spec = mounted.device_spec
    if spec is None:
        return None
    device = None if options.device is None else target_of(options.device)
    if device is None or (device.type != "cuda" and not os.environ.get(DEVICE_TIER)):
        raise UsageError(
            f"tier {spec} is on the GPU that batches are handed out on, and this loader's device "
            f"is {options.device}: give device='cuda' (dlio train: --device cuda), or write "
            f"ram:{format_bytes(spec.capacity).replace(' ', '')}:decoded"
        )
    if not options.collates_by_default:
        raise UsageError(
            f"tier {spec}: its crops are made on the device, where collate_fn= cannot take single "
            "samples: leave collate_fn out, or write ram:SIZE:decoded"
        )
    return mounted.on_device(device)
