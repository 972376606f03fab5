"""The contenders, and the environments of those that are not dlio's or torch's."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class PeerEnvironment:
    """Packages that are installed together, apart from dlio."""

    packages: tuple[str, ...]
    """Requirements for pip, the measured library first."""
    built: tuple[str, ...] = ()
    """Requirements that are built afterwards, with the packages above."""
    system: str = ""
    """What the system must have, in words, with Debian's names."""
    runner: str = ""
    """Module of `standalone.runners` that has a function for each contender; "" for the one of the
    environment's name."""
    archive: str = ""
    """Address of the source of a library that no registry has; the user gives its archive."""

    @property
    def library(self) -> str:
        """Name of the measured distribution."""
        if self.archive:
            return self.archive.partition("/archive/")[0].rpartition("/")[2]
        return (self.built or self.packages)[0].partition("==")[0]


_TORCH: Final = "torch==2.13.0"

ENVIRONMENTS: Final[dict[str, PeerEnvironment]] = {
    "turboloader": PeerEnvironment(("turboloader==2.39.0",)),
    "dali": PeerEnvironment(("nvidia-dali-cuda120==2.4.0",)),
    "tfdata": PeerEnvironment(("tensorflow-cpu==2.21.0",)),
    "ffcv": PeerEnvironment(
        (_TORCH, "torchvision", "numba", "cython", "setuptools", "wheel", "pillow"),
        ("ffcv==1.0.2",),
        "a C++ compiler, and headers of OpenCV and libjpeg-turbo (Debian: g++ pkg-config "
        "libopencv-dev libturbojpeg0-dev)",
    ),
    "spdl": PeerEnvironment(
        ("spdl==0.8.0",), system="FFmpeg's libraries (Debian: libavdevice59 libavfilter8)"
    ),
    "webdataset": PeerEnvironment(("webdataset==1.0.2", "pillow", _TORCH), runner="torchlike"),
    "mosaic": PeerEnvironment(("mosaicml-streaming==0.13.0", "pillow", _TORCH), runner="torchlike"),
    "litdata": PeerEnvironment(("litdata==0.2.76", "pillow", _TORCH), runner="torchlike"),
    "grain": PeerEnvironment(("grain==0.2.18", "pillow")),
    # PyPI's 2.0.0 is older, and does not go with today's pydftracer. torch, mpi4py, h5py and dlio
    # itself come from dlio's environment, so that both use the same versions of them.
    "dlio_benchmark": PeerEnvironment(
        (
            "pydftracer>=2.0.2",
            "hydra-core==1.3.2",
            "omegaconf<2.4",
            "antlr4-python3-runtime==4.9.3",
            "pandas",
            "psutil",
            "pillow",
        ),
        archive="https://github.com/argonne-lcf/dlio_benchmark/archive/e1919d7.tar.gz",
    ),
}

CASES: Final = {
    "files": "JPEG files as they are",
    "rows": "JPEGs packed losslessly with restart rows",
    "256": "JPEGs with a shorter edge of 256 pixels, quality 90",
    "raw": "decoded pictures of 256 pixels",
}
"""Groups of contenders that do the same work, and their descriptions."""


@dataclass(frozen=True, slots=True)
class ContenderEntry:
    """A contender."""

    title: str
    case: str
    """One of `CASES`; "" for the loops that show a limit."""
    environment: str = ""
    """One of `ENVIRONMENTS`; "" for dlio's own."""


CONTENDERS: Final[dict[str, ContenderEntry]] = {
    "torch": ContenderEntry("torch DataLoader, Pillow, uint8 (processes)", "files"),
    "torch_floats": ContenderEntry("torch DataLoader, Pillow, ToTensor (processes)", "files"),
    "torch_dlio_data": ContenderEntry("torch DataLoader over dlio's data set (processes)", "files"),
    "webdataset": ContenderEntry("WebDataset, Pillow (processes)", "files", "webdataset"),
    "mosaic": ContenderEntry("MosaicML Streaming, Pillow (processes)", "files", "mosaic"),
    "litdata": ContenderEntry("LitData, Pillow (processes)", "files", "litdata"),
    "grain": ContenderEntry("Grain, Pillow (processes)", "files", "grain"),
    "spdl": ContenderEntry("SPDL, FFmpeg (threads)", "files", "spdl"),
    "tfdata": ContenderEntry("tf.data (threads)", "files", "tfdata"),
    "dali": ContenderEntry("NVIDIA DALI, processor only (threads)", "files", "dali"),
    "ffcv": ContenderEntry("FFCV, JPEGs encoded anew, quality 90 (threads)", "files", "ffcv"),
    "turboloader": ContenderEntry("TurboLoader (threads)", "files", "turboloader"),
    "turboloader_uint8": ContenderEntry("TurboLoader, rounded to uint8", "files", "turboloader"),
    "full_decode": ContenderEntry("bare loop: decode whole, resize (threads)", ""),
    "ceiling": ContenderEntry("bare loop: dlio's decoder alone (threads)", ""),
    "dlio": ContenderEntry("dlio.DataLoader, RAM tier (threads)", "files"),
    "dlio_floats": ContenderEntry("dlio.DataLoader, RAM tier, ToTensor (threads)", "files"),
    "dlio_rows": ContenderEntry("dlio.DataLoader, RAM tier (threads)", "rows"),
    "ffcv_256": ContenderEntry("FFCV (threads)", "256", "ffcv"),
    "dlio_256": ContenderEntry("dlio.DataLoader, RAM tier (threads)", "256"),
    "ffcv_raw": ContenderEntry("FFCV, RAW (threads)", "raw", "ffcv"),
    "tbl_raw": ContenderEntry("TurboLoader, TBL-RAW (threads)", "raw", "turboloader"),
    "tbl_raw_uint8": ContenderEntry("TurboLoader, TBL-RAW, rounded to uint8", "raw", "turboloader"),
    "dlio_raw": ContenderEntry("dlio.DataLoader, tier of decoded pictures (threads)", "raw"),
}

RATIOS: Final[dict[str, tuple[str, str]]] = {
    "dlio_over_torch": ("dlio", "torch"),
    "dlio_over_torch_floats": ("dlio", "torch_floats"),
    "dlio_over_ceiling": ("dlio", "ceiling"),
    "dlio_over_full_decode": ("dlio", "full_decode"),
    **{
        f"dlio_over_{name}": ("dlio", name)
        for name, entry in CONTENDERS.items()
        if entry.case == "files" and entry.environment
    },
    "dlio_floats_over_torch_floats": ("dlio_floats", "torch_floats"),
    "dlio_floats_over_turboloader": ("dlio_floats", "turboloader"),
    "rows_over_torch": ("dlio_rows", "torch"),
    "rows_over_ffcv": ("dlio_rows", "ffcv"),
    "rows_over_full_decode": ("dlio_rows", "full_decode"),
    "dlio_256_over_ffcv_256": ("dlio_256", "ffcv_256"),
    "dlio_raw_over_ffcv_raw": ("dlio_raw", "ffcv_raw"),
    "dlio_raw_over_tbl_raw": ("dlio_raw", "tbl_raw"),
    "dlio_raw_over_tbl_raw_uint8": ("dlio_raw", "tbl_raw_uint8"),
}
"""Names of ratios: (ours, the other's)."""


def cpu_ratio(
    report: Mapping[str, object], key: str, pairs: Mapping[str, tuple[str, str]] = RATIOS
) -> float | None:
    """Seconds on processors that another contender takes for a sample, over ours, for one of
    `pairs`: medians of a report of `dlio bench loader`. None where they are missing, or too
    small."""
    figures: Any = report.get("cpu_ms_per_sample", {})
    mine, other = (figures.get(name, {}).get("median", 0.0) for name in pairs[key])
    return other / mine if mine and other else None
