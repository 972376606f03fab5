"""Names of networks, for options, which must not import torch."""

from typing import Final

__all__ = ["NETWORK_NAMES"]

NETWORK_NAMES: Final = ("lenet", "alexnet", "googlenet", "resnet50", "vit", "lstm", "unet3d")
"""The keys of `networks.registry.NETWORKS`."""
