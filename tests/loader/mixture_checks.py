"""A mixture on several ranks; run under mpirun. Prints a JSON line per rank."""

import json
import sys

import dlio
from dlio.comm import world


def main(first: str, second: str, batch: int, state: str, stop: int, nodes: int) -> None:
    mixed = dlio.mix(
        {"first": (first, 0.7), "second": (second, 0.3)},
        image_size=16,
        seed=5,
        samples_per_epoch=96,
        schedule={5: {"first": 0.25, "second": 0.75}},
        tiers="ram:64MiB",
    )
    steps = []
    with mixed as data, dlio.DataLoader(data, batch, True, pretend_nodes=nodes) as loader:
        if state:
            loader.load_state_dict(json.loads(state))
        for images, _ in loader:
            steps.append([loader.last_samples.tolist(), int(images.sum())])
            if len(steps) == stop:
                break
        about = {"rank": world().rank, "steps": steps, "stats": loader.stats()}
        print(json.dumps({**about, "state": loader.state_dict()}), flush=True)


if __name__ == "__main__":
    first, second, batch, state, stop, nodes = sys.argv[1:]
    main(first, second, int(batch), state, int(stop), int(nodes))
