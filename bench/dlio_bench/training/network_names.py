"""Names of networks, for options, which must not import torch."""

from typing import Final

NETWORK_NAMES: Final = ("lenet", "alexnet", "googlenet", "resnet50", "vit", "lstm", "unet3d")
"""The keys of `networks.registry.NETWORKS`."""
