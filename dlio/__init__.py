"""dlio feeds distributed deep learning from a deep memory hierarchy.

    import dlio

    with dlio.open("/data/imagenet/train", tiers="ram:8GiB,/local/scratch:200GiB") as data:
        for images, labels in dlio.DataLoader(data, batch_size=64, shuffle=True):
            ...

Importing dlio starts no MPI, thread or process. Each public name imports its module on first use.
"""

from importlib import import_module

TYPE_CHECKING = False  # `typing` takes longer to import than all that is here.
if TYPE_CHECKING:
    from dlio import transforms
    from dlio.comm.process_group import init_process_group
    from dlio.errors import (
        CommError,
        CommTimeout,
        CorruptBlock,
        DecodeError,
        DlioError,
        PeerLost,
        SourceError,
        TierError,
        TierFull,
        UsageError,
    )
    from dlio.exchange.distribute import distribute
    from dlio.features.mesh.rank_mesh import Mesh
    from dlio.features.pruning.apoptosis import Apoptosis
    from dlio.features.pruning.pruned_file import load_pruned
    from dlio.features.skipping.skipper import SampleSkipper
    from dlio.loader.dataloader import DataLoader
    from dlio.loader.dataset import Dataset
    from dlio.loader.dataset import open_dataset as open
    from dlio.loader.mixture_dataset import mix
    from dlio.loader.padding import PadTargets
    from dlio.loader.stateful import StatefulDataLoader

__all__ = [
    "Apoptosis",
    "CommError",
    "CommTimeout",
    "CorruptBlock",
    "DataLoader",
    "Dataset",
    "DecodeError",
    "DlioError",
    "Mesh",
    "PadTargets",
    "PeerLost",
    "SampleSkipper",
    "SourceError",
    "StatefulDataLoader",
    "TierError",
    "TierFull",
    "UsageError",
    "__version__",
    "distribute",
    "init_process_group",
    "load_pruned",
    "mix",
    "open",
    "transforms",
]

_WHERE = {
    "Apoptosis": ("dlio.features.pruning.apoptosis", "Apoptosis"),
    "DataLoader": ("dlio.loader.dataloader", "DataLoader"),
    "Dataset": ("dlio.loader.dataset", "Dataset"),
    "Mesh": ("dlio.features.mesh.rank_mesh", "Mesh"),
    "PadTargets": ("dlio.loader.padding", "PadTargets"),
    "SampleSkipper": ("dlio.features.skipping.skipper", "SampleSkipper"),
    "StatefulDataLoader": ("dlio.loader.stateful", "StatefulDataLoader"),
    "distribute": ("dlio.exchange.distribute", "distribute"),
    "init_process_group": ("dlio.comm.process_group", "init_process_group"),
    "load_pruned": ("dlio.features.pruning.pruned_file", "load_pruned"),
    "mix": ("dlio.loader.mixture_dataset", "mix"),
    "open": ("dlio.loader.dataset", "open_dataset"),
    **{
        name: ("dlio.errors", name)
        for name in __all__
        if name.endswith("Error") or name in ("CommTimeout", "CorruptBlock", "PeerLost", "TierFull")
    },
}


_MODULES = ("errors", "integrations", "testing", "transforms")


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("dlio")
    if name in _MODULES:
        return import_module(f"dlio.{name}")
    if name not in _WHERE:
        raise AttributeError(f"module 'dlio' has no attribute {name!r}")
    module, attribute = _WHERE[name]
    value = globals()[name] = getattr(import_module(module), attribute)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
