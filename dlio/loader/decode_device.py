"""Where a device can decode: the conditions of `decode="device"`."""

import torch

from dlio.errors import UsageError
from dlio.image.device_decode.nvimagecodec import REMEDY, is_installed
from dlio.loader.recipe import CropRecipe, Recipe


def check_device(device: torch.device | str | int | None) -> None:
    """Raise UsageError if a loader's device cannot decode.

    Args:
        device: one that torch knows, or None.
    """
    if device is None:
        raise UsageError(
            "decode='device' decodes on the loader's device: give device='cuda', too, or 'cpu'"
        )
    if torch.device(device).type not in ("cpu", "cuda"):
        raise UsageError(
            f"decode='device' on {torch.device(device)}: nvImageCodec decodes on 'cuda' and 'cpu' "
            "alone: leave decode= out"
        )
    if not is_installed():
        raise UsageError(f"decode='device' needs nvImageCodec: {REMEDY}, or leave decode= out")


def check_recipe(recipe: Recipe) -> CropRecipe:
    """Return the recipe of a device's crops. Raises UsageError for samples that it cannot make."""
    path, instead = recipe.reader.path, "or leave decode='device' out"
    if not isinstance(recipe, CropRecipe):
        raise UsageError(
            f"decode='device': samples of {path} are not crops of images: give image_size= or a "
            f"transform that begins with RandomResizedCrop, {instead}"
        )
    if recipe.transforms:
        raise UsageError(
            f"decode='device': the transform= of {path} has steps for each sample, which the CPU "
            f"does: leave only crops, flips, Normalize, RandomErasing, MixUp and CutMix, {instead}"
        )
    if recipe.decoder.kept:
        raise UsageError(
            f"decode='device': a tier of decoded images keeps what the CPU decodes: leave "
            f"':decoded' out of tiers= of {path}, {instead}"
        )
    return recipe
