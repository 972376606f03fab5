"""Notes on tensors: found for the same tensor alone, and gone with it."""

import gc

import torch

from dlio.exchange.tensor_notes import TensorNotes


def test_a_tensor_is_found_by_itself_and_not_by_its_values() -> None:
    notes: TensorNotes[str] = TensorNotes()
    first, second = torch.ones(2), torch.ones(2)
    notes.set([first], "first")
    assert notes.get(first) == "first"
    assert first in notes
    assert notes.get(second) is None
    assert first.view(1, 2) not in notes
    assert "first" not in notes
    notes.set([first, second], "both")
    assert (notes.get(first), notes.get(second)) == ("both", "both")
    assert [id(each) for each in notes] == [id(first), id(second)]


def test_notes_end_with_their_tensors_whoever_gets_their_numbers() -> None:
    notes: TensorNotes[int] = TensorNotes()
    kept = torch.zeros(1)
    notes.set([kept], -1)
    for number in range(100):
        tensor = torch.zeros(1)  # Often at the place of the one before.
        assert notes.get(tensor) is None, number
        notes.set([tensor], number)
    del tensor
    gc.collect()
    assert [id(each) for each in notes] == [id(kept)]


def test_a_tensor_that_only_a_graph_keeps_is_found_when_it_comes_back() -> None:
    notes: TensorNotes[str] = TensorNotes()
    tensor = torch.ones(2, requires_grad=True)
    notes.set([tensor], "kept")
    product = tensor * 2
    del tensor
    assert notes.get(product.grad_fn.next_functions[0][0].variable) == "kept"  # type: ignore[union-attr]
