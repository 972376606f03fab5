"""Training scripts drawn from a grammar: a choice for each of some thirty features, as text.

The same seed gives the same script. A choice that is left out is the plainest one, so that a
failing script can be made smaller by taking its choices away one by one.
"""

import random
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

Choices: TypeAlias = dict[str, str]

FEATURES: Final[Mapping[str, Sequence[str]]] = {
    "samples": ("48", "37", "61", "49", "64"),
    "batch": ("12", "8", "16", "7"),
    "order": ("given", "shuffled", "generator", "weighted"),
    "drop_last": ("no", "yes"),
    "task": ("numbers", "classes"),
    "loss": ("mean", "smooth", "penalty", "sum", "by class", "tokens", "pairs", "two terms"),
    "norm": ("none", "layer", "batch", "group"),
    "dropout": ("none", "zero", "half"),
    "tied": ("no", "yes"),
    "frozen": ("no", "yes"),
    "optimizer": ("sgd", "momentum", "adam", "adamw", "rmsprop", "lbfgs"),
    "groups": ("one", "two", "decay"),
    "scheduler": ("none", "step", "cosine", "onecycle", "warmup", "plateau", "plateau on train"),
    "accumulate": ("1", "2", "3"),
    "leftover": ("step", "drop"),
    "clip": ("none", "norm", "value"),
    "ema": ("none", "averaged", "by hand"),
    "precision": ("float32", "float64", "autocast", "scaler"),
    "several": ("one", "optimizers", "loaders", "gan", "teacher"),
    "stage": ("one", "unfreeze", "optimizer", "group", "replaced head"),
    "gradient": ("backward", "autograd.grad", "noise", "twice"),
    "prints": ("none", "val", "train loss", "last loss", "accuracy", "norm", "rate"),
    "inner": ("none", "eval", "no_grad"),
    "stop": ("none", "val", "train", "steps"),
    "skip": ("none", "loss", "nan"),
    "save": ("none", "end", "epochs", "best by val", "best by train", "replaced"),
    "resume": ("no", "between epochs"),
    "files": ("none", "csv", "json", "makedirs", "logging", "numpy", "removed"),
    "loader": ("plain", "workers", "batch sampler", "collate dict", "fetch ahead"),
    "epochs": ("2", "3"),
}
"""Alternatives of each feature; the plainest first."""
_RARE: Final = 0.78
"""Probability of the plainest alternative."""
BY_HAND: Final = ("prints", "files", "save", "resume", "stop", "skip", "loader", "inner", "order")
"""Features that loops with `dlio.distribute` leave out: their results are the loop's affair."""


def draw(seed: int) -> Choices:
    """Return the choices of a seed that are not the plainest."""
    rng = random.Random(seed)
    choices = {}
    for name, alternatives in FEATURES.items():
        often = name in ("samples", "batch", "order", "optimizer", "prints", "task")
        if rng.random() > (0.4 if often else _RARE):
            choices[name] = rng.choice(alternatives[1:])
    return _sensible(choices)


def _sensible(choices: Choices) -> Choices:
    """Take away choices that make a script fail in one process, too."""
    count, batch = (int(choices.get(name, FEATURES[name][0])) for name in ("samples", "batch"))
    if choices.get("norm") == "batch" and count % batch == 1 and "drop_last" not in choices:
        del choices["samples"]
    if choices.get("stage") == "group" and choices.get("scheduler") != "step":
        choices.pop("scheduler", None)
    if choices.get("optimizer") == "lbfgs":
        # It takes one group, and only a plain step.
        for name in ("groups", "accumulate", "leftover", "clip", "precision", "gradient"):
            choices.pop(name, None)
        if choices.get("stage") == "group":
            del choices["stage"]
    return choices


def differs_by_design(choices: Choices) -> bool:
    """True if ranks draw or average in other groups than one process: weights then differ, which
    the documentation says."""
    return (
        choices.get("dropout") == "half"
        or choices.get("norm") == "batch"
        or choices.get("gradient") == "noise"
    )


def render(choices: Choices, way: str = "run") -> str:
    """Return the script of some choices.

    Args:
        way: `run` for a script of one process; `distribute` for a loop that shares its data by
            `dlio.DataLoader`, `slices` for one that does so itself, both with `dlio.distribute`.
    """
    chosen = {name: alternatives[0] for name, alternatives in FEATURES.items()} | choices
    if way != "run":
        chosen |= {name: FEATURES[name][0] for name in BY_HAND}
        if chosen["scheduler"] == "plateau on train":
            chosen["scheduler"] = "plateau"
    return _Script(chosen, way).text()


class _Script:
    """A script in the making."""

    def __init__(self, chosen: Choices, way: str) -> None:
        self._is, self._way = chosen, way
        self._lines: list[str] = []

    def _put(self, text: str, indent: int = 0) -> None:
        self._lines += [" " * 4 * indent + line for line in text.strip("\n").splitlines()]

    def text(self) -> str:
        """Return the whole script."""
        self._imports()
        self._data()
        self._model()
        self._optimizer()
        self._loop()
        self._end()
        return "\n".join(self._lines) + "\n"

    def _imports(self) -> None:
        self._put("""
import copy, csv, json, logging, os
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset
from torch.utils.data import WeightedRandomSampler
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
size = int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1"))
torch.manual_seed(1)
""")
        if self._way != "run":
            self._put("import dlio")

    def _data(self) -> None:
        is_ = self._is
        kind = "float64" if is_["precision"] == "float64" else "float32"
        self._put(f"torch.set_default_dtype(torch.{kind})")
        self._put(f"""
count, batch = {is_["samples"]}, {is_["batch"]}
x = torch.randn(count, 6)
held = torch.randn(30, 6)
""")
        if is_["skip"] == "nan":
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
            self._put("y, held_y = x.nan_to_num()[:, :2].tanh(), held[:, :2].tanh()")
        self._put("data, held_data = TensorDataset(x, y), TensorDataset(held, held_y)")
        order = {
            "given": "",
            "shuffled": ", shuffle=True",
            "generator": ", shuffle=True, generator=torch.Generator().manual_seed(3)",
            "weighted": ", sampler=WeightedRandomSampler(torch.rand(count) + 0.1, count)",
        }[is_["order"]]
        last = ", drop_last=True" if is_["drop_last"] == "yes" else ""
        more = {"workers": ", num_workers=1", "collate dict": ", collate_fn=pack"}
        options = order + last + more.get(is_["loader"], "")
        if is_["loader"] == "collate dict":
            self._put("""
def pack(items):
    return {"x": torch.stack([a for a, _ in items]), "y": torch.stack([b for _, b in items])}
""")
        if is_["loader"] == "batch sampler":
            drop = is_["drop_last"] == "yes"
            self._put(
                f"batches = BatchSampler(RandomSampler(data), batch, {drop})\n"
                "loader = DataLoader(data, batch_sampler=batches)"
            )
        elif self._way == "distribute":
            self._put(
                "whole = 12 if batch < 12 else 18\n"
                f"loader = dlio.DataLoader(data, batch_size=whole // size{options})"
            )
        elif self._way == "slices":
            self._put("""
order = torch.arange(count)
whole = order.split(batch)
parts = [each[rank::size] for each in whole]
counts = [len(part) for part in parts]
parts = [part if len(part) else each[:1] for part, each in zip(parts, whole)]
loader = [(x[part], y[part]) for part in parts]
""")
        else:
            self._put(f"loader = DataLoader(data, batch_size=batch{options})")
        self._put("held_loader = DataLoader(held_data, batch_size=8)")
        if is_["several"] == "loaders":
            if self._way == "run":
                self._put("second = DataLoader(data, batch_size=batch // 2, shuffle=True)")
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
        self._put(f"""
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.back = nn.Sequential(nn.Linear(6, 8), {inner})
        self.middle = nn.Linear(8, 8)
        self.again = nn.Linear(8, 8)
        self.head = nn.Linear(8, {out})

    def forward(self, x):
        h = self.back(x)
        return self.head(torch.tanh(self.again(torch.tanh(self.middle(h)))))

model = Net()
""")
        if is_["tied"] == "yes":
            self._put("model.again.weight = model.middle.weight")
        if is_["frozen"] == "yes":
            self._put("model.middle.requires_grad_(False)")
        if is_["stage"] in ("unfreeze", "group"):
            self._put("model.back.requires_grad_(False)")
        self._put("""
if "FUZZ_SHAKE" in os.environ:  # Weights differ by rounding: by how much do those at the end?
    shaken = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + 8 * torch.finfo(p.dtype).eps * torch.randn(p.shape, generator=shaken))
""")
        if is_["several"] == "teacher":
            self._put("teacher = Net()")
        if is_["several"] == "gan":
            self._put("judge = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))")
        losses = {
            "smooth": "F.smooth_l1_loss(out, b)",
            "penalty": "F.mse_loss(out, b) + 1e-3 * sum(p.square().sum() for p in every)",
            "sum": 'F.mse_loss(out, b, reduction="sum") / 10',
            "two terms": "F.mse_loss(out, b) + 0.1 * F.l1_loss(out, b)",
            "mean": "F.mse_loss(out, b)",
        }
        classes = {
            "smooth": "F.cross_entropy(out, b, label_smoothing=0.1)",
            "penalty": "F.cross_entropy(out, b) + 1e-3 * sum(p.square().sum() for p in every)",
            "sum": 'F.cross_entropy(out, b, reduction="sum") / 10',
            "two terms": "F.cross_entropy(out, b) + 0.1 * out.square().mean()",
            "mean": "F.cross_entropy(out, b)",
        }
        special = {
            "by class": "F.cross_entropy(out, b, weight=torch.tensor([1.0, 3.0]))",
            "tokens": "F.cross_entropy(out.reshape(-1, 9), b.reshape(-1), ignore_index=0)",
            "pairs": "F.cross_entropy(F.normalize(out) @ F.normalize(out + 0.1).T * 5, "
            "torch.arange(len(out)))",
        }
        of_task = classes if is_["task"] == "classes" else losses
        loss = special.get(is_["loss"]) or of_task[is_["loss"]]
        self._put(f"""
def loss_of(out, b):
    every = list(model.parameters())
    return {loss}
""")

    def _optimizer(self) -> None:
        is_ = self._is
        self._put(f"def make(parameters):\n    return {_OPTIMIZERS[is_['optimizer']]}")
        parameters = {
            "one": "model.parameters()",
            "two": '[{"params": model.head.parameters(), "lr": 0.02}, {"params": '
            '[p for n, p in model.named_parameters() if "head" not in n]}]',
            "decay": '[{"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": '
            '0.01}, {"params": [p for p in model.parameters() if p.ndim < 2]}]',
        }[is_["groups"]]
        if is_["optimizer"] == "lbfgs":
            parameters = "model.parameters()"
        if is_["stage"] == "group":
            parameters = "[p for p in model.parameters() if p.requires_grad]"
        if is_["stage"] == "optimizer":
            parameters = "model.head.parameters()"
        if is_["several"] == "optimizers" and is_["stage"] == "one":
            parameters = "model.head.parameters()"
            self._put(
                "rest = [p for n, p in model.named_parameters() if 'head' not in n]\n"
                "body = torch.optim.SGD(rest, lr=0.05)"
            )
        self._put(f"optimizer = make({parameters})")
        every = ["optimizer"]
        if is_["several"] == "optimizers" and is_["stage"] == "one":
            every.append("body")
        if is_["several"] == "gan":
            self._put("optimizer_j = torch.optim.Adam(judge.parameters(), lr=0.01)")
            every.append("optimizer_j")
        if self._way != "run":
            models = "nn.ModuleList([model, judge])" if is_["several"] == "gan" else "model"
            self._put(f"ranks = dlio.distribute({models}, [{', '.join(every)}])")
        self._every = every
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

    def _loop(self) -> None:
        is_ = self._is
        self._put(f"""
def validate():
    model.eval()
    total = 0.0
    with torch.no_grad():
        for a, b in held_loader:
            total += loss_of(model(a), b).item() * len(a)
    model.train()
    return total / len(held_data)

best, steps, stale = 1e9, 0, 0
for epoch in range({is_["epochs"]}):
    total, seen, right, pending = 0.0, 0, 0, 0
""")
        self._stages()
        if is_["several"] == "teacher":
            self._put("teacher.eval()", 1)
        source = "loader"
        if is_["several"] == "loaders":
            source = "zip(loader, second)"
        if is_["loader"] == "fetch ahead":
            self._put("batches = list(loader)", 1)
            source = "zip(batches, second)" if is_["several"] == "loaders" else "batches"
        self._put(f"for number, item in enumerate({source}):", 1)
        if is_["several"] == "loaders":
            self._put("item, (c, d) = item", 2)
        two = 'a, b = item["x"], item["y"]' if is_["loader"] == "collate dict" else "a, b = item"
        self._put(two, 2)
        if self._way == "slices":
            self._put("ranks.weigh(counts[number])", 2)
        self._step()
        self._after_epoch()

    def _stages(self) -> None:
        stage = {
            "unfreeze": "model.back.requires_grad_(True)",
            "group": 'model.back.requires_grad_(True)\noptimizer.add_param_group({"params": '
            "list(model.back.parameters())})",
            "optimizer": "optimizer = make(model.parameters())",
            "replaced head": "model.head = nn.Linear(8, model.head.out_features)\n"
            "optimizer = make(model.parameters())",
        }.get(self._is["stage"])
        if not stage:
            return
        self._put("if epoch == 1:", 1)
        self._put(stage, 2)
        if self._way != "run" and "make" in stage:
            self._put("ranks.close()\nranks = dlio.distribute(model, optimizer)", 2)
        if self._is["scheduler"] != "none" and "make" in stage:
            self._put(
                f"scheduler = torch.optim.lr_scheduler.{_SCHEDULERS[self._is['scheduler']]}", 2
            )

    def _step(self) -> None:
        is_ = self._is
        autocast = is_["precision"] in ("autocast", "scaler")
        if autocast:
            self._put('with torch.autocast("cpu", dtype=torch.bfloat16):', 2)
        extra = autocast + 2
        self._put("out = model(a)", extra)
        if is_["gradient"] == "noise":
            self._put("out = out + 0.1 * torch.randn_like(out)", extra)
        self._put("loss = loss_of(out, b)", extra)
        if is_["several"] == "teacher":
            self._put("with torch.no_grad():\n    goal = teacher(a)", extra)
            self._put("loss = loss + 0.5 * F.mse_loss(out, goal)", extra)
        if is_["several"] == "loaders":
            self._put("loss = loss + 0.5 * loss_of(model(c), d)", extra)
        if is_["skip"] == "nan":
            self._put("if not torch.isfinite(loss):\n    continue", 2)
        if is_["skip"] == "loss":
            self._put("if loss.item() < 0.2:\n    continue", 2)
        self._put(
            "total += loss.item() * len(a)\nseen += len(a)\n"
            "right += (out.argmax(-1) == b.argmax(-1)).sum().item() if b.ndim > 1 and b.shape == "
            "out.shape else (out.argmax(-1) == b).sum().item() if b.ndim == 1 else 0",
            2,
        )
        self._update(2)
        self._put("steps += 1", 2)
        if is_["inner"] != "none":
            check = "validate()" if is_["inner"] == "eval" else "no_grad()"
            if check == "no_grad()":
                self._put(
                    """
if number == 1:
    with torch.no_grad():
        print("inner", round(sum(loss_of(model(a), b).item() for a, b in held_loader), 3))
""",
                    2,
                )
            else:
                self._put('if number == 1:\n    print("inner", round(validate(), 3))', 2)
        if is_["stop"] == "steps":
            self._put("if steps == 5:\n    break", 2)

    def _update(self, indent: int) -> None:
        is_ = self._is
        every = self._every
        many = int(is_["accumulate"])
        if is_["optimizer"] == "lbfgs":
            self._put(
                """
def closure():
    optimizer.zero_grad()
    again = loss_of(model(a), b)
    again.backward()
    return again
optimizer.step(closure)
""",
                indent,
            )
            return
        zero = "; ".join(f"{each}.zero_grad()" for each in every if each != "optimizer_j")
        if many == 1:
            self._put(zero, indent)
        backward = f"(loss / {many}).backward()" if many > 1 else "loss.backward()"
        if is_["precision"] == "scaler":
            backward = backward.replace(".backward", ").backward").replace(
                "loss", "scaler.scale(loss", 1
            )
            if many > 1:
                backward = f"scaler.scale(loss / {many}).backward()"
        if is_["gradient"] == "twice":
            half = f"(loss * 0.5 / {many}).backward"
            backward = f"{half}(retain_graph=True)\n{half}()"
        if is_["gradient"] == "autograd.grad":
            backward = f"""
used = [p for p in model.parameters() if p.requires_grad]
for p, g in zip(used, torch.autograd.grad(loss / {many}, used)):
    p.grad = g if p.grad is None else p.grad + g
"""
        self._put(backward, indent)
        if many > 1:
            self._put("pending += 1", indent)
            last = "" if is_["leftover"] == "drop" else " or number + 1 == len(loader)"
            self._put(f"if (number + 1) % {many} == 0{last}:", indent)
            indent += 1
        scaled = is_["precision"] == "scaler" and is_["gradient"] not in ("twice", "autograd.grad")
        if is_["clip"] == "norm":
            if scaled:
                self._put("scaler.unscale_(optimizer)", indent)
            self._put("size_ = nn.utils.clip_grad_norm_(model.parameters(), 0.5)", indent)
        if is_["clip"] == "value":
            self._put("nn.utils.clip_grad_value_(model.parameters(), 0.05)", indent)
        if scaled:
            steps = [f"scaler.step({each})" for each in every if each != "optimizer_j"]
            self._put("\n".join([*steps, "scaler.update()"]), indent)
        else:
            self._put("\n".join(f"{e}.step()" for e in every if e != "optimizer_j"), indent)
        if many > 1:
            self._put(f"{zero}\npending = 0", indent)
        if is_["several"] == "gan":
            self._put(
                """
optimizer_j.zero_grad()
fake = judge(model(a)[:, :2].float().detach())
real = judge(a[:, :2].float())
F.softplus(fake - real).mean().backward()
optimizer_j.step()
""",
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
        self._put("val = validate()", 1)
        printed = {
            "val": 'print(f"epoch {epoch}: val {val:.3f}")',
            "train loss": 'print(f"epoch {epoch}: train loss {total / max(seen, 1):.3f}")',
            "last loss": 'print(f"epoch {epoch}: last loss {loss.item():.3f}")',
            "accuracy": 'print(f"epoch {epoch}: {right} of {len(data)} right")',
            "norm": 'print(f"epoch {epoch}: weights {sum(p.norm().item() for p in '
            'model.parameters()):.3f}")',
            "rate": "print(f\"epoch {epoch}: rate {optimizer.param_groups[0]['lr']:.4f}\")",
        }.get(is_["prints"])
        if printed:
            self._put(printed, 1)
        steps = {
            "step": "scheduler.step()",
            "cosine": "scheduler.step()",
            "plateau": "scheduler.step(val)",
            "plateau on train": "scheduler.step(total / max(seen, 1))",
        }.get(is_["scheduler"])
        if steps:
            self._put(steps, 1)
        state = "{'model': model.state_dict(), 'epoch': epoch}"
        saves = {
            "epochs": f"torch.save({state}, f'epoch{{epoch}}.pt')",
            "best by val": f"if val < best:\n    best = val\n    torch.save({state}, 'best.pt')",
            "best by train": f"if total / max(seen, 1) < best:\n    best = total / max(seen, 1)\n"
            f"    torch.save({state}, 'best.pt')",
            "replaced": f"torch.save({state}, 'new.pt')\nos.replace('new.pt', 'last.pt')",
        }.get(is_["save"])
        if saves:
            self._put(saves, 1)
        files = {
            "csv": "with open('log.csv', 'a', newline='') as file:\n    csv.writer(file).writerow("
            "[epoch, round(val, 3)])",
            "json": "json.dump({'epoch': epoch, 'val': round(val, 3)}, open('log.json', 'w'))",
            "makedirs": "os.makedirs(f'run/epoch{epoch}')\n"
            "open(f'run/epoch{epoch}/done', 'w').write('x')",
            "logging": "logging.basicConfig(filename='train.log', format='%(message)s', level=20)\n"
            "logging.info('epoch %d val %.3f', epoch, val)",
            "numpy": "np.save(f'val{epoch}.npy', np.array([val]))",
            "removed": "open('old', 'w').close()\nos.remove('old')",
        }.get(is_["files"])
        if files:
            self._put(files, 1)
        if is_["resume"] == "between epochs":
            self._put(
                """
if epoch == 0:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "resume.pt")
    stored = torch.load("resume.pt")
    model.load_state_dict(stored["model"])
    optimizer.load_state_dict(stored["optimizer"])
""",
                1,
            )
        if is_["stop"] == "val":
            self._put("if val < 0.3:\n    break", 1)
        if is_["stop"] == "train":
            self._put("if total / max(seen, 1) < 0.35:\n    break", 1)

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


_OPTIMIZERS: Final = {
    "sgd": "torch.optim.SGD(parameters, lr=0.1)",
    "momentum": "torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True)",
    "adam": "torch.optim.Adam(parameters, lr=0.01)",
    "adamw": "torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)",
    "rmsprop": "torch.optim.RMSprop(parameters, lr=0.005)",
    "lbfgs": "torch.optim.LBFGS(parameters, lr=0.2, max_iter=3)",
}
_SCHEDULERS: Final = {
    "step": "StepLR(optimizer, 1, gamma=0.5)",
    "cosine": "CosineAnnealingLR(optimizer, 3)",
    "onecycle": "OneCycleLR(optimizer, 0.1, total_steps=200, cycle_momentum=False)",
    "warmup": "LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 6))",
    "plateau": "ReduceLROnPlateau(optimizer, patience=0, threshold=0.3, factor=0.5)",
    "plateau on train": "ReduceLROnPlateau(optimizer, patience=0, threshold=0.3, factor=0.5)",
}
