"""A generator and a discriminator, as in tutorials.

Each step has two backward passes through the discriminator and one through both networks.
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(8)
real = torch.randn(320, 2) @ torch.tensor([[1.0, 0.5], [0.0, 0.3]]) + 2
data = TensorDataset(real, torch.randn(320, 4))
generator = nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(0.2), nn.Linear(16, 2))
discriminator = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
of_generator = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
of_discriminator = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
judge = nn.BCEWithLogitsLoss()
for _ in range(2):
    for x, noise in DataLoader(data, batch_size=32, shuffle=True):
        discriminator.zero_grad()
        judge(discriminator(x), torch.ones(len(x), 1)).backward()
        fake = generator(noise)
        judge(discriminator(fake.detach()), torch.zeros(len(x), 1)).backward()
        of_discriminator.step()
        generator.zero_grad()
        judge(discriminator(fake), torch.ones(len(x), 1)).backward()
        of_generator.step()
torch.save([generator.state_dict(), discriminator.state_dict()], sys.argv[1])
