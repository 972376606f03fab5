"""An epoch of boxes over several ranks; prints a digest of each picture's crop and target."""

import hashlib
import json
import sys

import dlio


def main(folder: str) -> None:
    digests = {}
    with (
        dlio.open(folder, tiers="ram:16MiB", image_size=48, seed=3, masks=True) as data,
        dlio.DataLoader(data, 4, True, mode="global") as loader,
    ):
        loader.set_epoch(1)
        for images, targets in loader:
            assert len(images) == len(targets) == len(loader.last_samples)
            for image, target in zip(images, targets, strict=True):
                digest = hashlib.sha256(image.numpy().tobytes())
                for name in ("boxes", "labels", "masks", "keypoints"):
                    digest.update(target[name].numpy().tobytes())
                digests[str(target["image_id"])] = digest.hexdigest()
    print(json.dumps(digests), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
