"""A language model of two LSTM layers."""

import torch
from torch import nn


class LanguageModel(nn.Module):
    """The medium model for Penn Treebank: 19,780,400 parameters.

    Zaremba et al., "Recurrent neural network regularization", arXiv 1409.2329, section 4.1: two
    layers of 650 units, a vocabulary of 10,000 words, sequences of 35. torch's LSTM has two biases
    a layer, the paper's one: 2 * 4 * 650 parameters more.

    Input: words, int64 (n, steps). Output: logits of each next word (n, classes, steps).
    """

    def __init__(self, words: int = 10_000, width: int = 650) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.layers = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, words)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # x: (n, steps) -> (n, words, steps)
        states, _ = self.layers(self.embedding(x))
        logits: torch.Tensor = self.head(states).transpose(1, 2)
        return logits
