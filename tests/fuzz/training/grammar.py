"""Training scripts as text, from the choices of their features."""

from typing import Final

from tests.fuzz.training.choices import (
    BY_HAND,
    FEATURES,
    HABITS_OF_NETWORKS,
    Choices,
    decides_by,
    draws_by_part,
)


def marked(script: str) -> dict[int, tuple[str, ...]]:
    """Return the lines of a script that read numbers of training batches, with their uses.

    Such a line ends in a comment, as `total += loss.item()  # reads train loss`.
    """
    return {
        number: tuple(line.rpartition("  # reads ")[2].split(", "))
        for number, line in enumerate(script.splitlines(), 1)
        if "  # reads " in line
    }


def render(choices: Choices, way: str = "run") -> str:
    """Return the script of some choices.

    Args:
        way: `run` for a script of one process; `distribute` for a loop that shares its data by
            `dlio.DataLoader`, `slices` for one that does so itself, both with `dlio.distribute`.
    """
    chosen = {name: alternatives[0] for name, alternatives in FEATURES.items()} | choices
    if way != "run":
        chosen |= {name: FEATURES[name][0] for name in BY_HAND}
        if chosen["habit"] not in HABITS_OF_NETWORKS:
            chosen["habit"] = "none"
        if chosen["scheduler"] == "plateau on train":
            chosen["scheduler"] = "plateau"
        if chosen["loss"] in ("pairs", "root"):
            chosen["loss"] = "mean"  # The loop's losses have to be means.
        if way == "distribute" and chosen["loss"] in ("sum", "by class", "tokens", "masked"):
            chosen["loss"] = "mean"  # Over samples, as it does not weigh by itself.
        if chosen["optimizer"] == "by hand":
            chosen["optimizer"] = "sgd"
        if chosen["optimizer"] == "lbfgs with a search":
            chosen["optimizer"] = "lbfgs"  # By the last bit of a sum a search ends elsewhere.
        if chosen["optimizer"] == "lbfgs" and chosen["dropout"] == "half":
            chosen["dropout"] = "zero"  # Parts drop others: the search is another one.
        if way == "slices":
            _weigh_at_once(chosen)
        if way == "slices" and chosen["norm"] == "batch":
            chosen["norm"] = "layer"  # Of one sample it has no statistics.
    return _Script(chosen, way).text()


def _weigh_at_once(chosen: dict[str, str]) -> None:
    """Take choices away for which one call of `weigh` does not do: terms of a loss that are means
    over other elements. Nor can a loop of its own decide by the loss of a part."""
    chosen["skip"] = "none" if chosen["skip"] in ("nan", "loss") else chosen["skip"]
    if chosen["loss"] == "masked" and chosen["dropout"] == "half":
        chosen["dropout"] = "zero"  # Else another forward pass counts other elements.
    if chosen["loss"] in ("sum", "by class", "tokens", "masked"):
        if chosen["gradient"] in ("penalty", "two backwards"):
            chosen["gradient"] = FEATURES["gradient"][0]
        if chosen["several"] == "teacher":
            chosen["several"] = FEATURES["several"][0]
    if chosen["stage"] == "optimizer":
        chosen["stage"] = FEATURES["stage"][0]


class _Script:
    """A script in the making."""

    def __init__(self, chosen: Choices, way: str) -> None:
        self._is, self._way = chosen, way
        self._lines: list[str] = []
        self._every: list[str] = []
        """Names of the optimizers that step after each backward."""
        self._counts_loss = chosen["prints"] == "train loss" or "train loss" in decides_by(chosen)
        self._samples = "a.shape[1]" if chosen["layout"] == "time first" else "len(a)"
        self._mean = {
            "samples": "total / max(seen, 1)",
            "batches": "total / (number + 1)",
            "dataset": "total / len(data)",
        }[chosen["average"]]

    def _put(self, text: str, indent: int = 0) -> None:
        self._lines += [" " * 4 * indent + line for line in text.strip("\n").splitlines()]

    def text(self) -> str:
        """Return the whole script."""
        self._imports()
        self._data()
        self._loaders()
        self._model()
        self._loss()
        self._optimizer()
        self._loop()
        self._end()
        return "\n".join(self._lines) + "\n"

    def _imports(self) -> None:
        self._put("""
import copy, csv, itertools, json, logging, os, shutil
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler
from torch.utils.data import TensorDataset, WeightedRandomSampler
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
size = int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1"))
torch.manual_seed(1)
""")
        if self._way != "run":
            # One process is plain torch: dlio is not its own measure.
            self._put("""
class Alone:
    def weigh(self, samples):
        pass
    def take_assigned(self):
        pass
    def close(self):
        pass
if size > 1:
    import dlio
""")

    def _data(self) -> None:
        is_ = self._is
        kind = {"float64": "float64"}.get(is_["precision"], "float32")
        steps = "5, " if is_["layout"] == "time first" else ""
        self._put(f"torch.set_default_dtype(torch.{kind})")
        self._put(f"""
count, batch = {is_["samples"]}, {is_["batch"]}
x = torch.randn(count, {steps}6)
held = torch.randn(30, {steps}6)
""")
        if "nan" in is_["skip"]:
            self._put('x[21] = float("nan")')
        if is_["loss"] == "tokens":
            self._put("""
words = torch.randint(1, 9, (count, 5))
words[torch.arange(5) > (torch.arange(count) % 5)[:, None]] = 0
y, held_y = words, torch.randint(1, 9, (30, 5))
""")
        elif is_["task"] == "classes" or is_["loss"] == "by class":
            self._put("y, held_y = (x.nan_to_num().sum(1) > 0).long(), (held.sum(1) > 0).long()")
        else:
            self._put("y, held_y = x.nan_to_num()[..., :2].tanh(), held[..., :2].tanh()")
        if is_["precision"] == "bfloat16":
            self._put("x, held = x.bfloat16(), held.bfloat16()")
            if is_["loss"] not in ("tokens", "by class") and is_["task"] != "classes":
                self._put("y, held_y = y.bfloat16(), held_y.bfloat16()")
        self._put("data, held_data = TensorDataset(x, y), TensorDataset(held, held_y)")

    def _loaders(self) -> None:
        is_ = self._is
        order = {
            "given": "",
            "shuffled": ", shuffle=True",
            "generator": ", shuffle=True, generator=torch.Generator().manual_seed(3)",
            "weighted": ", sampler=WeightedRandomSampler(torch.rand(count) + 0.1, count)",
        }[is_["order"]]
        drop = is_["drop_last"] == "yes"
        last = ", drop_last=True" if drop else ""
        packs = is_["layout"] == "time first" or is_["loader"] == "collate dict"
        pack = ", collate_fn=pack" if packs else ""
        options = order + last + pack
        if is_["layout"] == "time first":
            self._put("""
def pack(items):
    return torch.stack([a for a, _ in items], 1), torch.stack([b for _, b in items], 1)
""")
        elif is_["loader"] == "collate dict":
            self._put("""
def pack(items):
    return {"x": torch.stack([a for a, _ in items]), "y": torch.stack([b for _, b in items])}
""")
        turned = ".transpose(0, 1)" if is_["layout"] == "time first" else ""
        if self._way == "distribute":
            self._put(f"""
whole = 12 if batch < 12 else 18
kind = dlio.DataLoader if size > 1 else DataLoader
loader = kind(data, batch_size=whole // size{options})
""")
        elif self._way == "slices":
            self._put(f"""
order = torch.arange(count)
whole = order.split(batch)
parts = [each[rank::size] for each in whole]
counts = [len(part) for part in parts]
parts = [part if len(part) else each[:1] for part, each in zip(parts, whole)]
loader = [(x[part]{turned}, y[part]{turned}) for part in parts]
""")
        elif is_["loader"] == "batch sampler":
            self._put(
                f"batches = BatchSampler(RandomSampler(data), batch, {drop})\n"
                f"loader = DataLoader(data, batch_sampler=batches{pack})"
            )
        elif is_["loader"] == "iterable":
            self._put(f"""
class Stream(IterableDataset):
    def __len__(self):
        return count
    def __iter__(self):
        return iter(zip(x, y))
loader = DataLoader(Stream(), batch_size=batch{pack})
""")
        elif is_["loader"] == "slices":
            self._put(
                f"loader = [(a{turned}, b{turned}) for a, b in zip(x.split(batch), y.split(batch))]"
            )
        else:
            more = ", num_workers=1" if is_["loader"] == "workers" else ""
            self._put(f"loader = DataLoader(data, batch_size=batch{options}{more})")
        pack = pack if is_["layout"] == "time first" else ""
        self._put(f"held_loader = DataLoader(held_data, batch_size=8{pack})")
        if is_["several"] == "loaders":
            if self._way == "run":
                self._put("second = DataLoader(data, batch_size=max(1, batch // 2), shuffle=True)")
            else:
                self._put("second = loader")

    def _model(self) -> None:
        is_ = self._is
        norms = {
            "layer": "nn.LayerNorm(8)",
            "batch": "nn.BatchNorm1d(8)",
            "group": "nn.GroupNorm(2, 8)",
        }
        rates = {"zero": "nn.Dropout(0.0)", "half": "nn.Dropout(0.5)"}
        between = [norms.get(is_["norm"]), "nn.Tanh()", rates.get(is_["dropout"])]
        inner = ", ".join(each for each in between if each)
        out = {"tokens": "5 * 9"}.get(is_["loss"], "2")
        own = {
            "sparse": "self.table = nn.Embedding(7, 8, sparse=True)",
            "weight norm": "self.head = nn.utils.parametrizations.weight_norm(self.head)",
            "spectral norm": "self.middle = nn.utils.parametrizations.spectral_norm(self.middle)",
            "learned weight": "self.scale = nn.Parameter(torch.zeros(()))",
        }.get(is_["habit"], "pass")
        if "branch" in is_["habit"]:
            own = "self.extra, self.is_on = nn.Linear(8, 8), True"
        hidden = {
            "checkpointing": "checkpoint(self.back, x, use_reentrant=False)",
            "sparse": "self.back(x) + self.table((x[..., 0].nan_to_num() * 2).long().clamp(-3, 3) "
            "+ 3)",
        }.get(is_["habit"], "self.back(x)")
        more = "h = h + self.extra(h) if self.is_on else h" if "branch" in is_["habit"] else "pass"
        self._put(f"""
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.back = nn.Sequential(nn.Linear(6, 8), {inner})
        self.middle = nn.Linear(8, 8)
        self.again = nn.Linear(8, 8)
        self.head = nn.Linear(8, {out})
        {own}

    def forward(self, x):
        h = {hidden}
        {more}
        return self.head(torch.tanh(self.again(torch.tanh(self.middle(h)))))

def build():
    net = Net(){".bfloat16()" if is_["precision"] == "bfloat16" else ""}
""")
        if is_["tied"] == "yes":
            self._put("net.again.weight = net.middle.weight", 1)
        if is_["frozen"] == "yes":
            self._put("net.middle.requires_grad_(False)", 1)
        if is_["stage"] in ("unfreeze", "group"):
            self._put("net.back.requires_grad_(False)", 1)
        self._put("    return net\n\nmodel = build()")
        if is_["several"] == "teacher":
            self._put("teacher = build()")
        if is_["several"] == "gan":
            self._put("judge = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))")
        self._put("""
if "FUZZ_SHAKE" in os.environ:  # Weights differ by rounding: by how much do those at the end?
    shaken = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for p in model.parameters():
            eps = 8 * torch.finfo(p.dtype).eps
            p.mul_((1 + eps * torch.randn(p.shape, generator=shaken).to(p.dtype)))
""")
        if draws_by_part(is_):
            self._put('torch.manual_seed(7 if "FUZZ_SHAKE" in os.environ else 1)')

    def _loss(self) -> None:
        is_ = self._is
        if is_["loss"] == "custom":
            self._put("""
class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, far):
        ctx.save_for_backward(far)
        return far.square().mean()
    @staticmethod
    def backward(ctx, gradient):
        far, = ctx.saved_tensors
        return gradient * 2 * far / far.numel()
""")
        if is_["task"] == "classes":
            far = "(F.softmax(out, 1) - F.one_hot(b, 2).to(out))"
            plain = "F.cross_entropy(out, b"
            second = "out.square().mean()"
            by_hand = "-F.log_softmax(out, 1)[torch.arange(len(b)), b].mean()"
            smooth = "F.cross_entropy(out, b, label_smoothing=0.1)"
        else:
            far, plain, second = "(out - b)", "F.mse_loss(out, b", "F.l1_loss(out, b)"
            by_hand = f"{far}.square().sum() / {self._samples.replace('a', 'b', 1)}"
            smooth = "F.smooth_l1_loss(out, b)"
        kept = f"({far} > -0.1)"
        loss = {
            "mean": f"{plain})",
            "smooth": smooth,
            "penalty": f"{plain}) + 1e-3 * sum(p.square().sum() for p in every)",
            "sum": f'{plain}, reduction="sum") / 10',
            "by class": "F.cross_entropy(out, b, weight=torch.tensor([1.0, 3.0]).to(out))",
            "tokens": "F.cross_entropy(out.reshape(-1, 9), b.reshape(-1), ignore_index=0)",
            "pairs": "F.cross_entropy(F.normalize(out) @ F.normalize(out + 0.1).T * 5, "
            "torch.arange(len(out)))",
            "two terms": f"{plain}) + 0.1 * {second}",
            "root": f"({plain}) + 1e-3).sqrt()",
            "by hand": by_hand,
            "masked": f"({far}.square() * {kept}).sum() / {kept}.sum().clamp(min=1)",
            "custom": f"Square.apply({far})",
        }[is_["loss"]]
        if self._way == "slices" and is_["loss"] == "sum":
            loss = f"({loss}) * size * is_own"
        self._put(f"""
def loss_of(out, b{", is_own=1" if self._way == "slices" else ""}):
    every = list(model.parameters())
    return {loss}
""")
        # Argument of the loop's own `weigh` where a loss is not a mean over samples.
        self._weight = {
            "sum": "1.0",
            "by class": "torch.tensor([1.0, 3.0])[b].sum().item()",
            "tokens": "(b != 0).sum().item()",
            "masked": f"{kept}.sum().item()",
        }.get(is_["loss"], "")

    def _optimizer(self) -> None:
        is_ = self._is
        if is_["optimizer"] != "by hand":
            self._put(f"def make(parameters):\n    return {_OPTIMIZERS[is_['optimizer']]}")
        parameters = {
            "one": "model.parameters()",
            "two": '[{"params": model.head.parameters(), "lr": 0.02}, {"params": '
            '[p for n, p in model.named_parameters() if "head" not in n]}]',
            "decay": '[{"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": '
            '0.01}, {"params": [p for p in model.parameters() if p.ndim < 2]}]',
        }[is_["groups"]]
        if is_["stage"] == "group":
            parameters = "[p for p in model.parameters() if p.requires_grad]"
        if is_["stage"] == "optimizer":
            parameters = "model.head.parameters()"
        every = ["optimizer"]
        if is_["several"] == "optimizers" and is_["stage"] == "one":
            parameters = "model.head.parameters()"
            every.append("body")
            self._put(
                "rest = [p for n, p in model.named_parameters() if 'head' not in n]\n"
                "body = torch.optim.SGD(rest, lr=0.05)"
            )
        if is_["optimizer"] == "by hand":
            every = []
        else:
            self._put(f"optimizer = make({parameters})")
        if is_["several"] == "gan":
            self._put("optimizer_j = torch.optim.Adam(judge.parameters(), lr=0.01)")
        self._every = every
        if self._way != "run":
            models = "nn.ModuleList([model, judge])" if is_["several"] == "gan" else "model"
            more = ["optimizer_j"] if is_["several"] == "gan" else []
            made = f"dlio.distribute({models}, [{', '.join([*every, *more])}])"
            self._put(f"ranks = {made} if size > 1 else Alone()")
        scheduler = _SCHEDULERS.get(is_["scheduler"])
        if scheduler:
            self._put(f"scheduler = torch.optim.lr_scheduler.{scheduler}")
        if is_["ema"] == "averaged":
            self._put(
                "averaged = torch.optim.swa_utils.AveragedModel(model, "
                "multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))"
            )
        if is_["ema"] == "by hand":
            self._put("averaged = copy.deepcopy(model).requires_grad_(False)")
        if is_["precision"] == "scaler":
            self._put('scaler = torch.amp.GradScaler("cpu", init_scale=64.0)')
        if is_["files"] == "kept open":
            self._put("log = open('log.txt', 'w')")

    def _loop(self) -> None:
        is_ = self._is
        self._put(f"""
def validate():
    model.eval()
    total = 0.0
    with torch.no_grad():
        for a, b in held_loader:
            total += loss_of(model(a), b).item() * {self._samples}
    model.train()
    return total / len(held_data)

best, steps, stale = 1e9, 0, 0
""")
        self._before_epochs()
        self._put(f"""
for epoch in range({is_["epochs"]}):
    total, seen, right, far, number = 0.0, 0, 0, 0.0, 0
""")
        self._stages()
        if is_["several"] == "teacher":
            self._put("teacher.eval()", 1)
        source = "itertools.islice(endless, 5)" if is_["habit"] == "endless" else "loader"
        if is_["habit"] == "collected":
            self._put("outs = []", 1)
        if is_["resume"] == "in the middle":
            self._put(
                """
source = iter(loader)
if epoch == 1:
    next(source)  # A run before has trained on it.
""",
                1,
            )
            source = "source"
        if is_["loader"] == "fetch ahead":
            self._put("batches = list(loader)", 1)
            source = "batches"
        if is_["several"] == "loaders":
            source = f"zip({source}, second)"
        self._put(f"for number, item in enumerate({source}):", 1)
        if is_["several"] == "loaders":
            self._put("item, (c, d) = item", 2)
        self._put(self._unpacked(), 2)
        self._step()
        self._after_epoch()

    def _before_epochs(self) -> None:
        if self._is["habit"] == "peek":
            self._put(
                f"item = next(iter(loader))\n{self._unpacked()}\n"
                f'print(f"epoch 0: peek {{{self._samples}}} {{a.double().nansum():.3f}}")'
            )
        if self._is["habit"] == "endless":
            self._put("""
def forever():
    while True:
        yield from loader
endless = forever()
""")
        if self._is["habit"] == "finder":
            self._put(f"""
kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
for number, item in enumerate(loader):
    {self._unpacked()}
    for group in optimizer.param_groups:
        group["lr"] = 1e-3 * 2**number
    optimizer.zero_grad()
    loss_of(model(a), b{self._own}).backward()
    optimizer.step()
    if number == 2:
        break
model.load_state_dict(kept[0])
optimizer.load_state_dict(kept[1])
""")

    @property
    def _own(self) -> str:
        """Argument of a loss: 1 if this rank has samples of the batch, in a loop over slices."""
        return ", float(counts[number] > 0)" if self._way == "slices" else ""

    def _unpacked(self) -> str:
        return (
            'a, b = item["x"], item["y"]'
            if self._is["loader"] == "collate dict"
            else ("a, b = item")
        )

    def _stages(self) -> None:
        stage = {
            "unfreeze": "model.back.requires_grad_(True)",
            "freeze": "model.back.requires_grad_(False)",
            "group": 'model.back.requires_grad_(True)\noptimizer.add_param_group({"params": '
            "list(model.back.parameters())})",
            "optimizer": "optimizer = make(model.parameters())",
            "replaced head": "model.head = nn.Linear(8, model.head.out_features)"
            ".to(model.head.weight)\noptimizer = make(model.parameters())",
        }.get(self._is["stage"])
        if not stage:
            return
        self._put("if epoch == 1:", 1)
        self._put(stage, 2)
        if self._way != "run" and "make" in stage:
            models = "nn.ModuleList([model, judge])" if self._is["several"] == "gan" else "model"
            more = ", optimizer_j" if self._is["several"] == "gan" else ""
            self._put(
                f"ranks.close()\nranks = dlio.distribute({models}, [optimizer{more}]) if size > 1 "
                "else Alone()",
                2,
            )
        if self._is["scheduler"] != "none" and "make" in stage:
            self._put(
                f"scheduler = torch.optim.lr_scheduler.{_SCHEDULERS[self._is['scheduler']]}", 2
            )

    def _step(self) -> None:
        is_ = self._is
        if is_["habit"] == "branch":
            self._put("model.is_on = number % 2 == 0", 2)
        if self._way == "slices":
            self._put(f"ranks.weigh({self._weigh_by()})", 2)
        if is_["skip"] == "every third":
            self._put("if number % 3 == 2:\n    continue", 2)
        if is_["gradient"] == "penalty":
            self._put("a = a.clone().requires_grad_(True)", 2)
        batch = int(is_["layout"] == "time first")
        if is_["habit"] == "branch by data":
            self._put("model.is_on = bool(a.nanmean() > 0)  # reads branch", 2)
        if is_["habit"] == "centred":
            self._put(f"a = a - a.mean({batch}, keepdim=True)", 2)
        autocast = is_["precision"] in ("autocast", "scaler")
        if autocast:
            exact = 'enabled="FUZZ_SHAKE" not in os.environ'
            self._put(f'with torch.autocast("cpu", dtype=torch.bfloat16, {exact}):', 2)
        extra = autocast + 2
        mixed = f"0.7 * a + 0.3 * a.flip({batch})" if is_["habit"] == "mixed" else "a"
        self._put(f"out = model({mixed})", extra)
        if is_["gradient"] == "noise":
            self._put("out = out + 0.1 * torch.randn_like(out)", extra)
        self._put(f"loss = loss_of(out, b{self._own})", extra)
        more = {
            "mixed": f"loss = 0.7 * loss + 0.3 * loss_of(out, b.flip({batch}))",
            "hardest": f"loss = loss + out.square().mean(-1).amax({batch}).mean()",
            "learned weight": "loss = loss * torch.exp(-model.scale) + model.scale",
            "collected": "outs.append(out.detach())",
        }.get(is_["habit"])
        self._put(more or "", extra)
        if is_["gradient"] == "penalty":
            self._put(
                "slope, = torch.autograd.grad(out.sum(), a, create_graph=True)\n"
                "loss = loss + 0.1 * (slope.square().sum(1) + 1e-3).sqrt().mean()",
                extra,
            )
        if is_["several"] == "teacher":
            self._put("with torch.no_grad():\n    goal = teacher(a)", extra)
            self._put("loss = loss + 0.5 * F.mse_loss(out, goal)", extra)
        if is_["several"] == "loaders":
            self._put(f"loss = loss + 0.5 * loss_of(model(c), d{self._own})", extra)
        if is_["skip"] == "nan":
            self._put("if not torch.isfinite(loss):  # reads skip\n    continue", 2)
        if is_["skip"] == "loss":
            self._put("if loss.item() < 0.2:  # reads skip\n    continue", 2)
        if is_["read"] == "before":
            self._read()
        if is_["prints"] == "metric":
            self._put(
                "with torch.no_grad():\n    far += out.abs().mean().item()  # reads metric", 2
            )
        if is_["prints"] == "accuracy":
            hits = "(out.argmax(-1) == b.argmax(-1))"
            if is_["loss"] == "tokens":
                hits = "(out.reshape(-1, 5, 9).argmax(-1) == b)"
            elif is_["loss"] == "by class" or is_["task"] == "classes":
                hits = "(out.argmax(-1) == b)"
            self._put(f"right += {hits}.sum().item()  # reads accuracy", 2)
        self._update(2)
        if is_["read"] == "after":
            self._read()
        self._put("steps += 1", 2)
        if is_["prints"] == "each step":
            self._put('print(f"step {steps}: step loss {loss.item():.3f}")  # reads step loss', 2)
        if is_["files"] == "each step":
            self._put(
                """
with open("steps.txt", "a") as file:
    file.write(f"step {steps}: step loss {loss.item():.3f}\\n")  # reads step loss
""",
                2,
            )
        if is_["inner"] == "eval":
            self._put(
                'if number == 1:\n    print(f"epoch {epoch}: inner {validate():.3f}")',
                2,
            )
        if is_["inner"] == "no_grad":
            self._put(
                """
if number == 1:
    with torch.no_grad():
        far_ = sum(loss_of(model(a), b).item() for a, b in held_loader)
    print(f"epoch {epoch}: inner {far_:.3f}")
""",
                2,
            )
        if is_["stop"] == "steps":
            self._put("if steps == 5:\n    break", 2)

    def _weigh_by(self) -> str:
        if not self._weight or self._weight == "1.0":
            return self._weight or "counts[number]"
        return f"{self._weight.replace('out', 'model(a)')} * (counts[number] > 0)"

    def _read(self) -> None:
        if self._counts_loss:
            by = "" if self._is["average"] == "batches" else f" * {self._samples}"
            self._put(f"total += loss.item(){by}  # reads train loss", 2)
            self._put(f"seen += {self._samples}", 2)

    def _update(self, indent: int) -> None:
        is_ = self._is
        every = self._every
        many = int(is_["accumulate"])
        if is_["optimizer"].startswith("lbfgs"):
            self._put(
                f"""
def closure():
    optimizer.zero_grad()
    again = loss_of(model(a), b{self._own})
    again.backward()
    return again
optimizer.step(closure)
""",
                indent,
            )
            self._rest_of_update(indent)
            return
        zero = "; ".join(f"{each}.zero_grad()" for each in every) or "model.zero_grad()"
        if many == 1:
            self._put(zero, indent)
        self._put(self._backward(many), indent)
        if is_["habit"] == "sam":
            self._put(
                f"""
with torch.no_grad():
    ways = [(p, 0.05 * p.grad / (p.grad.norm() + 1e-6)) for p in model.parameters()
            if p.grad is not None]
    for p, way in ways:
        p.add_(way)
model.zero_grad()
loss_of(model(a), b{self._own}).backward()
with torch.no_grad():
    for p, way in ways:
        p.sub_(way)
""",
                indent,
            )
        if is_["skip"] == "nan at the end":
            self._put(f"if not torch.isfinite(loss):\n    {zero}\n    continue", indent)
        if many > 1:
            last = "" if is_["leftover"] == "drop" else " or number + 1 == len(loader)"
            self._put(f"if (number + 1) % {many} == 0{last}:", indent)
            indent += 1
        scaled = is_["precision"] == "scaler" and is_["gradient"] not in ("twice", "autograd.grad")
        if is_["clip"] != "none" and self._way != "run":
            self._put("ranks.take_assigned()", indent)
        if is_["clip"] == "norm":
            if scaled:
                self._put("scaler.unscale_(optimizer)", indent)
            self._put("size_ = nn.utils.clip_grad_norm_(model.parameters(), 0.5)", indent)
        if is_["clip"] == "value":
            self._put("nn.utils.clip_grad_value_(model.parameters(), 0.05)", indent)
        if scaled:
            steps = [f"scaler.step({each})" for each in every]
            self._put("\n".join([*steps, "scaler.update()"]), indent)
        else:
            self._put("\n".join(f"{e}.step()" for e in every) or _BY_HAND_STEP, indent)
        if many > 1:
            self._put(zero, indent)
        self._rest_of_update(indent)

    def _backward(self, many: int) -> str:
        part = f"loss / {many}" if many > 1 else "loss"
        gradient = self._is["gradient"]
        if gradient == "twice":
            half = f"({part} * 0.5).backward"
            return f"{half}(retain_graph=True)\n{half}()"
        if gradient == "autograd.grad":
            return f"""
used = [p for p in model.parameters() if p.requires_grad]
for p, g in zip(used, torch.autograd.grad({part}, used)):
    p.grad = g if p.grad is None else p.grad + g
"""
        if gradient == "two backwards":
            more = "(0.1 * model(a).square().mean()"
            return f"({part}).backward()\n{more} / {many}).backward()"
        if self._is["precision"] == "scaler":
            return f"scaler.scale({part}).backward()"
        return f"({part}).backward()" if many > 1 else "loss.backward()"

    def _rest_of_update(self, indent: int) -> None:
        is_ = self._is
        if is_["several"] == "gan":
            self._put(
                """
optimizer_j.zero_grad()
WEIGH
fake = judge(model(a)[:, :2].detach().to(judge[0].weight))
real = judge(a[:, :2].to(judge[0].weight))
F.softplus(fake - real).mean().backward()
optimizer_j.step()
""".replace("WEIGH\n", "ranks.weigh(counts[number])\n" if self._way == "slices" else ""),
                indent,
            )
        if is_["scheduler"] in ("onecycle", "warmup"):
            self._put("scheduler.step()", indent)
        if is_["ema"] == "averaged":
            self._put("averaged.update_parameters(model)", indent)
        if is_["ema"] == "by hand":
            self._put(
                """
with torch.no_grad():
    for mean, p in zip(averaged.parameters(), model.parameters()):
        mean.lerp_(p, 0.1)
""",
                indent,
            )

    def _after_epoch(self) -> None:
        is_ = self._is
        if is_["habit"] == "collected":
            # The script reads training batches here.
            batch = int(is_["layout"] == "time first")
            self._put(
                f"far_ = torch.cat(outs, {batch}).double().abs().mean().item()  # reads collected",
                1,
            )
            self._put('print(f"epoch {epoch}: collected {far_:.3f}")', 1)
        if is_["habit"] == "statistics":
            self._put("torch.optim.swa_utils.update_bn(loader, model)", 1)
        self._put("val = validate()", 1)
        if is_["inner"] == "with gradients":
            self._put(
                """
model.eval()
far_ = sum(loss_of(model(a), b).item() for a, b in held_loader)
print(f"epoch {epoch}: held {far_:.3f}")
model.train()
""",
                1,
            )
        if is_["inner"] == "train set":
            self._put(
                f"""
model.eval()
far_ = 0.0
with torch.no_grad():
    for item in loader:
        {self._unpacked()}
        far_ += loss_of(model(a), b).item() * {self._samples} / len(data)
print(f"epoch {{epoch}}: train set {{far_:.3f}}")
model.train()
""",
                1,
            )
        self._prints()
        steps = {
            "step": "scheduler.step()",
            "cosine": "scheduler.step()",
            "plateau": "scheduler.step(val)",
            "plateau on train": f"scheduler.step({self._mean})",
        }.get(is_["scheduler"])
        if steps:
            self._put(steps, 1)
        state = "{'model': model.state_dict(), 'epoch': epoch}"
        saves = {
            "epochs": f"torch.save({state}, f'epoch{{epoch}}.pt')",
            "best by val": f"if val < best:\n    best = val\n    torch.save({state}, 'best.pt')",
            "best by train": f"if {self._mean} < best:\n    best = {self._mean}\n"
            f"    torch.save({state}, 'best.pt')",
            "replaced": f"torch.save({state}, 'new.pt')\nos.replace('new.pt', 'last.pt')",
        }.get(is_["save"])
        if saves:
            self._put(saves, 1)
        self._files()
        if is_["resume"] in ("between epochs", "new objects"):
            self._resume()
        if is_["stop"] == "val":
            self._put("if val < 0.3:\n    break", 1)
        if is_["stop"] == "train":
            self._put(f"if {self._mean} < 0.35:\n    break", 1)

    def _prints(self) -> None:
        printed = {
            "val": 'print(f"epoch {epoch}: val {val:.3f}")',
            "train loss": f'print(f"epoch {{epoch}}: train loss {{{self._mean}:.3f}}")',
            "last loss": 'print(f"epoch {epoch}: last loss {loss.item():.3f}")  # reads last loss',
            "accuracy": 'print(f"epoch {epoch}: accuracy {right} of {len(data)}")',
            "metric": 'print(f"epoch {epoch}: metric {far:.3f}")',
            "norm": 'print(f"epoch {epoch}: weights {sum(p.norm().item() for p in '
            'model.parameters()):.3f}")',
            "rate": "print(f\"epoch {epoch}: rate {optimizer.param_groups[0]['lr']:.4f}\")",
        }.get(self._is["prints"])
        if printed:
            self._put(printed, 1)

    def _files(self) -> None:
        files = {
            "csv": "with open('log.csv', 'a', newline='') as file:\n    csv.writer(file).writerow("
            "[epoch, round(val, 3)])",
            "json": "json.dump({'epoch': epoch, 'val': round(val, 3)}, open('log.json', 'w'))",
            "makedirs": "os.makedirs(f'run/epoch{epoch}')\n"
            "open(f'run/epoch{epoch}/done', 'w').write('x')",
            "logging": "logging.basicConfig(filename='train.log', format='%(message)s', level=20)\n"
            "logging.info('epoch %d: val %.3f', epoch, val)",
            "numpy": "np.save(f'val{epoch}.npy', np.array([val]))",
            "removed": "open('old', 'w').close()\nos.remove('old')",
            "kept open": 'print(f"epoch {epoch}: val {val:.3f}", file=log, flush=True)',
            "moved": "os.mkdir('part')\nopen('part/val', 'w').write(f'{val:.3f}')\n"
            "shutil.move('part', f'epoch{epoch}')",
        }.get(self._is["files"])
        if files:
            self._put(files, 1)

    def _resume(self) -> None:
        is_ = self._is
        has_state = is_["optimizer"] != "by hand"
        states = ', "optimizer": optimizer.state_dict()' if has_state else ""
        again = "model = build()\noptimizer = make(model.parameters())\n"
        self._put("if epoch == 0:", 1)
        self._put(f'torch.save({{"model": model.state_dict(){states}}}, "resume.pt")', 2)
        self._put('stored = torch.load("resume.pt")', 2)
        self._put(again if is_["resume"] == "new objects" else "", 2)
        if self._way != "run" and is_["resume"] == "new objects":
            self._put(
                "ranks.close()\nranks = dlio.distribute(model, optimizer) if size > 1 else Alone()",
                2,
            )
        self._put('model.load_state_dict(stored["model"])', 2)
        if has_state:
            self._put('optimizer.load_state_dict(stored["optimizer"])', 2)

    def _end(self) -> None:
        if self._is["save"] == "end":
            self._put("torch.save(model.state_dict(), 'end.pt')")
        if self._way != "run":
            self._put("ranks.close()")
        self._put("""
weights = {n: p.detach().double().numpy() for n, p in model.named_parameters()}
weights |= {"buffer " + n: b.double().numpy() for n, b in model.named_buffers()}
""")
        more = {"ema": self._is["ema"] != "none", "judge": self._is["several"] == "gan"}
        for name, model in (("ema", "averaged"), ("judge", "judge")):
            if more[name]:
                self._put(
                    f"for n, p in {model}.named_parameters():\n"
                    f"    weights['{name} ' + n] = p.detach().double().numpy()"
                )
        self._put("np.savez(f\"{os.environ['FUZZ_OUT']}/rank{rank}.npz\", **weights)")


_BY_HAND_STEP: Final = """
with torch.no_grad():
    for p in model.parameters():
        if p.grad is not None:
            p -= 0.1 * p.grad
"""
_OPTIMIZERS: Final = {
    "sgd": "torch.optim.SGD(parameters, lr=0.1)",
    "momentum": "torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True)",
    "adam": "torch.optim.Adam(parameters, lr=0.01)",
    "adamw": "torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)",
    "rmsprop": "torch.optim.RMSprop(parameters, lr=0.005)",
    "adagrad": "torch.optim.Adagrad(parameters, lr=0.05)",
    "lbfgs": "torch.optim.LBFGS(parameters, lr=0.05, max_iter=2, history_size=2)",
    "lbfgs with a search": "torch.optim.LBFGS(parameters, max_iter=4, "
    'line_search_fn="strong_wolfe")',
}
_SCHEDULERS: Final = {
    "step": "StepLR(optimizer, 1, gamma=0.5)",
    "cosine": "CosineAnnealingLR(optimizer, 3)",
    "onecycle": "OneCycleLR(optimizer, 0.1, total_steps=200, cycle_momentum=False)",
    "warmup": "LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 6))",
    "plateau": "ReduceLROnPlateau(optimizer, patience=0, threshold=0.3, factor=0.5)",
    "plateau on train": "ReduceLROnPlateau(optimizer, patience=0, threshold=0.3, factor=0.5)",
}
