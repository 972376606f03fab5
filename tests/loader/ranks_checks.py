"""Epochs of several ranks; run under mpirun with a folder and a JSON list of the jobs' arguments.

Prints one JSON line per rank and job: its samples per step, a digest of each sample's pixels, its
counts.
"""

import hashlib
import json
import sys

import dlio
from dlio.comm import world


def main(
    folder: str,
    tiers: str,
    mode: str,
    source_order: str,
    nodes: int,
    batch: int,
    leave_at: int,
) -> None:
    epochs = []
    with (
        dlio.open(folder, tiers=tiers, image_size=32, seed=3) as data,
        dlio.DataLoader(
            data,
            batch,
            True,
            mode=mode,
            source_order=source_order,
            pretend_nodes=nodes,
        ) as loader,
    ):
        if leave_at:
            # All ranks leave; some samples sent for later steps are never consumed.
            for step, _ in enumerate(loader):
                if step == leave_at:
                    break
        for epoch in range(2):
            loader.set_epoch(epoch)
            steps, digests = [], {}
            for images, labels in loader:
                samples = loader.last_samples.tolist()
                steps.append(samples)
                for sample, image, label in zip(samples, images, labels, strict=True):
                    assert label == data.reader.labels[sample]
                    digests[sample] = hashlib.sha256(image.numpy().tobytes()).hexdigest()[:16]
            epochs.append({"steps": steps, "digests": digests, "stats": loader.stats()})
        assert data.mounted is not None
        names, key = data.mounted.nodes.names, data.reader.fingerprint
    about = {"rank": world().rank, "nodes": list(names), "key": key}
    print(json.dumps({**about, "epochs": epochs}), flush=True)


if __name__ == "__main__":
    for arguments in json.loads(sys.argv[2]):
        main(sys.argv[1], *arguments)
        world().barrier()
