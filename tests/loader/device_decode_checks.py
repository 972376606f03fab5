"""A pass with `decode="cpu"` and one with "device"; run under mpirun with a folder.

Prints one JSON line per rank: the samples of each pass, and the largest difference of values.
"""

import json
import sys

import dlio
from dlio import transforms as T  # noqa: N812 - as everybody calls them

seen, made = {}, {}
for decode in ("cpu", "device"):
    transform = T.Compose(
        [
            T.RandomResizedCrop(32),
            T.Normalize([0.5] * 3, [0.2] * 3),
            T.MixUp(partners="step"),
        ]
    )
    with (
        dlio.open(sys.argv[1], tiers="none", transform=transform, seed=3) as data,
        dlio.DataLoader(data, 5, True, device="cpu", decode=decode, pretend_nodes=2) as loader,
    ):
        made[decode] = list(loader)
        loader.set_epoch(0)
        seen[decode] = [k for _ in loader for k in loader.last_samples.tolist()]
most = max(
    (one[0] - other[0]).abs().max().item() if len(one[0]) else 0.0
    for one, other in zip(made["cpu"], made["device"], strict=True)
)
print(json.dumps({**seen, "most": most}), flush=True)
