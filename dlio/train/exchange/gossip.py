"""GossipGraD: each step a rank averages its weights with one other's (Daily et al., 2018).

Messages a step are constant, where an allreduce needs a logarithm of the ranks. Partners follow
a dissemination pattern: after ceil(log2 p) steps everyone's update has reached everyone, and with
p a power of two the weights are the exact mean. Then the ranks are permuted ("rotation"), so that
a rank is not always behind the same neighbour.

Weights, not gradients: averaging gradients with one partner lets ranks drift apart without bound.
"""

import math
import time

import numpy as np
import torch
from torch import nn

from dlio.comm import Communicator, Request
from dlio.order import Order
from dlio.train.exchange.buckets import Bucket, in_buckets

_ROTATIONS = 64
"""Length of the cycle of permutations."""
_FIRST_TAG = 1


def partners(step: int, rank: int, ranks: int, seed: int) -> tuple[int, int]:
    """(rank to send to, rank to receive from) at a step; both `rank` itself when it is alone.

    Source: dissemination with rotation, arXiv 1803.05880.
    """
    if ranks == 1:
        return rank, rank
    period = max(1, math.ceil(math.log2(ranks)))
    rotation = step // period % _ROTATIONS
    permutation = Order(ranks, seed, rotation).samples(np.arange(ranks, dtype=np.int64))
    place = int(np.flatnonzero(permutation == rank)[0])
    distance = 2 ** (step % period)
    return (
        int(permutation[(place + distance) % ranks]),
        int(permutation[(place - distance) % ranks]),
    )


class Gossip:
    """Sends weights after each step; joins and merges them layer by layer, before the next use.

    A bucket's message travels while the next batch is awaited and while the layers before it
    compute: a module that owns parameters joins their bucket in its forward pre-hook.
    """

    def __init__(self, model: nn.Module, comm: Communicator, seed: int) -> None:
        self._comm = comm
        self._seed = seed
        groups = in_buckets(model) if comm.size > 1 else []
        self._outgoing = [Bucket(group) for group in groups]
        self._incoming = [Bucket(group) for group in groups]
        self._requests: list[list[Request]] = [[] for _ in groups]
        number_of = {parameter: k for k, group in enumerate(groups) for parameter in group}
        self._hooks = []
        for module in model.modules():
            owned = sorted(
                {number_of[p] for p in module.parameters(recurse=False) if p in number_of}
            )
            if owned:
                self._hooks.append(
                    module.register_forward_pre_hook(
                        lambda _module, _inputs, owned=tuple(owned): self._join(owned)
                    )
                )
        self._step = 0
        self._wait_s = 0.0

    def before_backward(self, samples: int, planned: int) -> None:
        pass

    def before_step(self) -> None:
        # A parameter that this step did not use has not been joined yet.
        self.finish()

    def after_step(self) -> None:
        if not self._outgoing:
            return
        to, source = partners(self._step, self._comm.rank, self._comm.size, self._seed)
        self._step += 1
        # The first layers are used first and are in the last bucket: it leaves first.
        for number in reversed(range(len(self._outgoing))):
            outgoing, incoming = self._outgoing[number], self._incoming[number]
            with torch.no_grad():
                for parameter, view in zip(outgoing.parameters, outgoing.views, strict=True):
                    view.copy_(parameter)
            tag = _FIRST_TAG + number
            self._requests[number] = [
                self._comm.irecv(incoming.bytes, source, tag),
                self._comm.isend(outgoing.bytes, to, tag),
            ]

    def finish(self) -> None:
        self._join(tuple(range(len(self._requests))))

    def statistics(self) -> dict[str, float]:
        size = sum(bucket.flat.numel() * 4 for bucket in self._outgoing)
        return {
            "wait_s": self._wait_s,
            "messages": float(self._step * len(self._outgoing)),
            "bytes": float(self._step * size),
        }

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        if self._comm.size > 1:
            self._comm.close()

    def _join(self, numbers: tuple[int, ...]) -> None:
        """Wait for these buckets' messages, if any are under way, and merge them."""
        for number in numbers:
            requests = self._requests[number]
            if not requests:
                continue
            started = time.perf_counter()
            self._comm.wait(requests, "weights of a gossip partner")
            self._wait_s += time.perf_counter() - started
            self._requests[number] = []
            bucket = self._incoming[number]
            with torch.no_grad():
                for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                    parameter.lerp_(view.to(parameter.device, parameter.dtype), 0.5)
