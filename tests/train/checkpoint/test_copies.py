"""Copies of a run's tensors: complete when the owner may change them, whatever their layout."""

import threading

import pytest
import torch

from dlio.train.checkpoint.host_copies import HostCopies


def _tensors() -> dict[str, torch.Tensor]:
    image = torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).reshape(2, 3, 4, 5)
    return {
        "weight": torch.randn(300, 7),
        "kernel": image.to(memory_format=torch.channels_last),
        "half": torch.randn(33).to(torch.bfloat16),
        "slice": torch.randn(10, 10)[::2, 1:],
        "step": torch.tensor(3.0),
        "nothing": torch.empty(0),
    }


@pytest.mark.parametrize("later", [(), ("weight", "kernel", "half", "slice", "step", "nothing")])
def test_copies_are_equal_whatever_the_layout(later: tuple[str, ...]) -> None:
    copies, tensors = HostCopies(), _tensors()
    copies.begin(tensors, later)
    copies.finish()
    for name, tensor in tensors.items():
        assert torch.equal(copies.held[name], tensor), name
        assert copies.held[name].data_ptr() != tensor.data_ptr() or not tensor.numel()


def test_only_later_tensors_wait() -> None:
    copies = HostCopies()
    buffer, weight = torch.zeros(4), torch.zeros(4)
    copies.begin({"buffer": buffer, "weight": weight}, {"weight"})
    buffer += 1  # A forward pass changes it at once.
    assert not copies.wait(0)
    thread = threading.Thread(target=copies.finish)
    thread.start()
    assert copies.wait(60)
    weight += 1
    thread.join()
    assert copies.held["buffer"].tolist() == copies.held["weight"].tolist() == [0.0] * 4


def test_memory_is_used_again_until_a_shape_changes() -> None:
    copies = HostCopies()
    copies.begin({"a": torch.ones(5), "b": torch.ones(5)}, {"a"})
    copies.finish()
    places = {name: held.data_ptr() for name, held in copies.held.items()}
    copies.begin({"a": 2 * torch.ones(5), "b": torch.ones(3)}, {"a"})
    copies.finish()
    assert copies.held["a"].data_ptr() == places["a"]
    assert copies.held["a"].tolist() == [2.0] * 5
    assert copies.held["b"].tolist() == [1.0] * 3
    copies.begin({"b": torch.zeros(3)}, ())
    assert list(copies.held) == ["b"]


def test_an_error_while_copying_lets_nobody_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = HostCopies()
    copies.begin({"a": torch.ones(5)}, {"a"})

    def fail(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr("dlio.train.checkpoint.host_copies._copy", fail)
    with pytest.raises(MemoryError):
        copies.finish()
    assert copies.wait(0)
