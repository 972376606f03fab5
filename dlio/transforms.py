"""torchvision's transforms, by its names, fused with the decoder; see `dlio.image.transforms`."""

from dlio.image.transforms import *  # noqa: F403
