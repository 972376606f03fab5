"""Gradients that come late, twice or sparse: checkpointed blocks, tied weights, embeddings."""

import sys

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

WORDS = 30
torch.manual_seed(3)
text = torch.randint(0, WORDS, (66, 5))
targets = torch.randn(66, 2)


class Tied(nn.Module):
    """A block that is computed three times, and a table of words that is the last layer, too."""

    def __init__(self, reentrant):
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
        self.last = nn.Linear(8, WORDS, bias=False)
        self.last.weight = self.words.weight
        self.reentrant = reentrant

    def forward(self, numbers):
        hidden = self.words(numbers)
        for _ in range(3):
            hidden = hidden + checkpoint(self.block, hidden, use_reentrant=self.reentrant)
        return self.last(hidden)


def train_tied(reentrant):
    torch.manual_seed(4)
    model = Tied(reentrant)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for (numbers,) in DataLoader(TensorDataset(text), batch_size=11):
        out = model(numbers[:, :-1])
        loss = functional.cross_entropy(out.reshape(-1, WORDS), numbers[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.state_dict()


def train_sparse():
    torch.manual_seed(4)
    words = nn.EmbeddingBag(WORDS, 4, sparse=True)
    head = nn.Linear(4, 2)
    optimizers = (
        torch.optim.SparseAdam(words.parameters(), lr=0.05),
        torch.optim.SGD(head.parameters(), lr=0.1),
    )
    for step, (numbers, y) in enumerate(DataLoader(TensorDataset(text, targets), batch_size=11)):
        functional.mse_loss(head(words(numbers)), y).backward()
        if step % 2:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return words.state_dict() | head.state_dict()


saved = {"sparse": train_sparse()}
for reentrant in (True, False):
    saved[f"tied {reentrant}"] = train_tied(reentrant)
torch.save(saved, sys.argv[1])
