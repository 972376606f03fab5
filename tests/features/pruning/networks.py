"""Networks of each kind that can be pruned, with examples of their inputs."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "leaky_relu": lambda: nn.LeakyReLU(0.1),
    "identity": nn.Identity,
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "softplus": nn.Softplus,
    "hardtanh": nn.ReLU6,
}


def mlp(activation: str, width: int = 24) -> tuple[nn.Module, torch.Tensor]:
    act = ACTIVATIONS[activation]
    net = nn.Sequential(nn.Linear(7, width), act(), nn.Linear(width, 16), act(), nn.Linear(16, 3))
    return net, torch.randn(32, 7)


def convolutional(activation: str, width: int = 24) -> tuple[nn.Module, torch.Tensor]:
    """Make a net with padding, a stride, batch norms, pooling and a layer without bias."""
    act = ACTIVATIONS[activation]
    net = nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        act(),
        nn.Conv2d(width, 16, 3, stride=2, padding=1),
        act(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 16, 1, bias=False),
        nn.BatchNorm2d(16),
        act(),
        nn.Flatten(),
        nn.Linear(16 * 4, 16),
        act(),
        nn.Linear(16, 4),
    )
    return net, torch.randn(8, 3, 8, 8)


class Residual(nn.Module):
    def __init__(self, activation: str, width: int) -> None:
        super().__init__()
        self.act = ACTIVATIONS[activation]()
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.norm0 = nn.BatchNorm2d(width)
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.head = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.act(self.norm0(self.stem(x)))
        y = self.norm2(self.conv2(self.act(self.norm1(self.conv1(x)))))
        out: torch.Tensor = self.head(self.act(x + y).mean(dim=(2, 3)))
        return out


def residual(activation: str, width: int = 24) -> tuple[nn.Module, torch.Tensor]:
    return Residual(activation, width), torch.randn(8, 3, 8, 8)


def depthwise(activation: str, width: int = 24) -> tuple[nn.Module, torch.Tensor]:
    act = ACTIVATIONS[activation]
    net = nn.Sequential(
        nn.Conv2d(3, width, 1),
        nn.BatchNorm2d(width),
        act(),
        nn.Conv2d(width, width, 3, padding=1, groups=width, bias=False),
        nn.BatchNorm2d(width),
        act(),
        nn.Conv2d(width, 16, 1),
        nn.PReLU(16),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 4),
    )
    return net, torch.randn(8, 3, 6, 6)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, length, _ = x.shape
        q, k, v = (
            layer(x).view(n, length, self.num_heads, -1).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = scaled_dot_product_attention(q, k, v).transpose(1, 2)
        out: torch.Tensor = self.out(mixed.reshape(n, length, -1))
        return out


class FusedAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, length, _ = x.shape
        q, k, v = self.qkv(x).view(n, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v).transpose(1, 2)
        out: torch.Tensor = self.proj(mixed.reshape(n, length, -1))
        return out


class Block(nn.Module):
    def __init__(self, activation: str, width: int, hidden: int, attention: nn.Module) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = attention
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, hidden), ACTIVATIONS[activation](), nn.Linear(hidden, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        out: torch.Tensor = x + self.mlp(self.norm2(x))
        return out


class Transformer(nn.Module):
    def __init__(self, activation: str, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 32)
        self.blocks = nn.Sequential(
            Block(activation, 32, hidden, Attention(32, 4)),
            Block(activation, 32, hidden, FusedAttention(32, 4)),
        )
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 11)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.norm(self.blocks(self.embedding(x))))
        return out


def transformer(activation: str, width: int = 24) -> tuple[nn.Module, torch.Tensor]:
    return Transformer(activation, width), torch.randint(0, 11, (6, 5))


class Branches(nn.Module):
    """A net that downsamples and upsamples, with a concatenation and a gate on channels."""

    def __init__(self, activation: str, width: int) -> None:
        super().__init__()
        self.act = ACTIVATIONS[activation]()
        self.a = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.Conv2d(width, 16, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(16, width, 2, stride=2)
        self.joined = nn.Conv2d(2 * width, 16, 1, bias=False)
        self.squeeze = nn.Conv2d(16, 8, 1)
        self.gate = nn.Conv2d(8, 16, 1)
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.act(self.a(x))
        up = self.act(self.up(self.act(self.down(a))))
        joined = self.act(self.joined(torch.cat([a, up], 1)))
        gate = self.gate(self.act(self.squeeze(joined.mean(dim=(2, 3), keepdim=True))))
        out: torch.Tensor = self.head((joined * torch.sigmoid(gate)).mean(dim=(2, 3)))
        return out


def branches(activation: str, width: int = 24) -> tuple[nn.Module, torch.Tensor]:
    return Branches(activation, width), torch.randn(8, 3, 8, 8)


KINDS = {
    "mlp": mlp,
    "convolutional": convolutional,
    "residual": residual,
    "depthwise": depthwise,
    "branches": branches,
    "transformer": transformer,
}


def make(kind: str, activation: str, seed: int, width: int = 24) -> tuple[nn.Module, torch.Tensor]:
    """Make a net whose running statistics differ from those of a new net."""
    torch.manual_seed(seed)
    net, example = KINDS[kind](activation, width)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, 0, 0.3)
            assert module.running_mean is not None
            assert module.running_var is not None
            module.running_mean.normal_(0, 0.3)
            module.running_var.uniform_(0.5, 1.5)
    return net, example
