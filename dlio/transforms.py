"""torchvision's transforms, by name, fused with the decoder; see `dlio.image.crop_transforms`."""

from dlio.image.crop_transforms import *  # noqa: F403
from dlio.image.crop_transforms import __all__ as __all__
