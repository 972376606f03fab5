"""Stacked autoencoders: layers that are trained one by one, and what remains as it is meanwhile."""

import pytest
import torch

from dlio.errors import UsageError
from dlio.train.networks.autoencoder import Autoencoder, EncoderClassifier, autoencoder


@pytest.mark.parametrize("size", [32, 50, 65])
def test_a_reconstruction_has_the_size_of_the_image(size: int) -> None:
    model = autoencoder(1, size, reconstructs=True, width=4, depth=2)
    assert model(torch.randn(2, 3, size, size)).shape == (2, 3, size, size)
    with pytest.raises(UsageError, match="give 1 to 3"):
        autoencoder(1, 32, depth=4)


@pytest.mark.parametrize("layer", [1, 2, 3])
def test_a_chosen_layer_learns_alone(layer: int) -> None:
    torch.manual_seed(0)
    model = autoencoder(1, 32, reconstructs=True, width=4, depth=3).train()
    assert isinstance(model, Autoencoder)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.choose_layer(layer)
    made, of = model(torch.randn(8, 3, 32, 32))
    assert made.shape == of.shape
    (made - of).square().mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(0.1 * parameter.grad)
    changed = {
        name for name, value in model.state_dict().items() if not torch.equal(value, before[name])
    }
    mine = (f"encoder.{layer - 1}.", f"decoders.{layer - 1}.")
    assert changed
    assert all(name.startswith(mine) for name in changed)
    model.train()
    model.choose_layer(None)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_dense_layer_trains_on_one_sample_by_running_statistics() -> None:
    model = autoencoder(5, 32, width=8, dense=True)
    model(torch.randn(16, 3, 32, 32))  # Running statistics differ from the initial ones.
    state = {name: value.clone() for name, value in model.state_dict().items()}
    image = torch.randn(1, 3, 32, 32)
    logits = model.train()(image)
    assert torch.allclose(logits, model.eval()(image))
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_the_classifier_has_the_encoders_names() -> None:
    encoder = autoencoder(5, 32, reconstructs=True).state_dict()
    classifier = autoencoder(5, 32)
    assert isinstance(classifier, EncoderClassifier)
    shared = [name for name in classifier.state_dict() if name in encoder]
    assert set(classifier.state_dict()) - set(shared) == {"head.weight", "head.bias"}
