"""Buckets of parameters, and means of models over ranks."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dlio.comm.single import SingleCommunicator
from dlio.exchange.buckets import (
    BUCKET_BYTES,
    Bucket,
    averaged_state,
    consensus_distance,
    in_buckets,
    trainable,
)


@given(st.lists(st.tuples(st.integers(0, 400_000), st.booleans()), max_size=30))
def test_buckets_hold_each_trainable_parameter_once_last_first(
    sizes: list[tuple[int, bool]],
) -> None:
    model = nn.ParameterList(
        # Untouched memory is not allocated by the kernel.
        [nn.Parameter(torch.empty(size), requires_grad=trained) for size, trained in sizes]
    )
    buckets = [[p for _, p in bucket] for bucket in in_buckets(trainable(model))]
    flat = [parameter for bucket in buckets for parameter in bucket]
    expected = [parameter for parameter in model if parameter.requires_grad]
    assert [id(p) for p in flat] == [id(p) for p in reversed(expected)]
    for bucket in buckets:
        assert bucket
        # A bucket is full with its last parameter, not before.
        assert sum(4 * parameter.numel() for parameter in bucket[:-1]) < BUCKET_BYTES
    for bucket in buckets[:-1]:
        assert sum(4 * parameter.numel() for parameter in bucket) >= BUCKET_BYTES


def test_small_networks_have_as_many_buckets_as_are_wanted() -> None:
    layers = nn.ParameterList([nn.Parameter(torch.empty(8, 8)) for _ in range(6)])
    for wanted, sizes in ((1, [6]), (2, [3, 3]), (3, [2, 2, 2]), (6, [1] * 6), (99, [1] * 6)):
        assert [len(bucket) for bucket in in_buckets(trainable(layers), wanted)] == sizes


def test_views_array_and_bytes_share_memory() -> None:
    parameters = [
        nn.Parameter(torch.empty(2, 3)),
        nn.Parameter(torch.empty(())),
        nn.Parameter(torch.empty(4, dtype=torch.bfloat16)),
    ]
    bucket = Bucket([(str(k), p) for k, p in enumerate(parameters)], extra=1)
    for number, view in enumerate(bucket.views):
        view.fill_(number + 1)
    bucket.flat[-1] = 9
    assert bucket.array.dtype == np.float32
    assert bucket.array.tolist() == [1] * 6 + [2] + [3] * 4 + [9]
    assert bucket.bytes.nbytes == 4 * 12
    bucket.bytes[:] = 0
    assert not bucket.flat.any()
    assert [view.shape for view in bucket.views] == [p.shape for p in parameters]


def test_the_mean_of_one_model_is_a_copy_of_it() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)).to(
        memory_format=torch.channels_last  # type: ignore[call-overload]
    )
    comm = SingleCommunicator()
    mean = averaged_state(model, comm)
    assert consensus_distance(model, mean, comm) == 0
    for name, tensor in model.state_dict().items():
        assert torch.equal(mean[name], tensor)
        mean[name].fill_(7)
        assert not (tensor == 7).any()
