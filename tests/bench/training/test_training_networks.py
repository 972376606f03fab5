"""Networks of `dlio bench train` are those of their papers."""

import pytest
import torch

from dlio_bench.training.bench_networks import NETWORKS, make_batch, make_network

SIDES = {
    "lenet": 32,
    "alexnet": 224,
    "googlenet": 224,
    "resnet50": 224,
    "vit": 224,
    "lstm": 35,
    "unet3d": 128,
}
"""Pixels per side of a paper's samples; of text, words."""


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_has_its_papers_number_of_parameters(name: str) -> None:
    network = NETWORKS[name]
    with torch.device("meta"):
        model = network.make(SIDES[name])
    # torch's LSTM has a second bias of 4 x 650 in each of its two layers, which the paper's lacks.
    surplus = 2 * 4 * 650 if name == "lstm" else 0
    papers = {
        "lenet": 61_706,
        "alexnet": 61_100_840,
        "googlenet": 6_998_552,
        "resnet50": 25_557_032,
        "vit": 5_717_416,
        "lstm": 19_775_200,
        "unet3d": 19_069_955,
    }
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count - surplus == papers[name]


@pytest.mark.parametrize("name", ["lenet", "googlenet", "vit", "unet3d", "lstm"])
def test_a_batch_suits_its_network(name: str) -> None:
    network = NETWORKS[name]
    samples, labels = make_batch(name, 2, network.side)
    logits = make_network(name, network.side)(samples)
    assert logits.shape == (2, network.classes, *labels.shape[1:])
    loss = torch.nn.functional.cross_entropy(logits, labels)
    assert torch.isfinite(loss)
