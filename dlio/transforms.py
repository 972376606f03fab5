"""torchvision's transforms, by its names, fused with the decoder; see `dlio.image.transforms`."""

from dlio.image.transforms import *  # noqa: F403
from dlio.image.transforms import __all__ as __all__
