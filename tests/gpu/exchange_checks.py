"""Steps of an exchange of ranks that share one GPU; run under mpirun with a device and an exchange.

Prints one JSON line on rank 0: the path of the gradients, the number of different weights among
the ranks, and the weights of rank 0 after some steps.
"""

import hashlib
import json
import sys

import torch

from dlio.comm import world
from dlio.exchange import parse_exchange
from dlio.exchange.buffer_placement import find_path
from tests.exchange.training import (
    BATCH,
    make_net,
    make_optimizer,
    samples,
    started,
    train_step,
)

_STEPS = 4


def main(device: str, name: str) -> None:
    torch.set_num_threads(1)
    comm, place = world(), torch.device(device)
    net = make_net(0).to(place)
    optimizer = make_optimizer(net)
    path = find_path([place], parse_exchange(name), comm)
    exchange = started(name, net, comm)
    for step in range(_STEPS):
        inputs, labels = samples(step, BATCH * comm.size)
        mine = slice(comm.rank * BATCH, (comm.rank + 1) * BATCH)
        own, planned = (inputs[mine].to(place), labels[mine].to(place)), BATCH * comm.size
        train_step(net, exchange, optimizer, *own, planned, comm.size)
    exchange.finish()
    exchange.close()
    weights = torch.cat([each.detach().cpu().reshape(-1) for each in net.parameters()])
    digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()
    different = len(set(comm.allgather(digest)))
    if comm.rank == 0:
        few = weights[:: len(weights) // 500].tolist()
        print(json.dumps({"path": path, "different": different, "weights": few}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
