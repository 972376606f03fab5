"""Lines of a script that import, and make its data and loaders."""

from tests.fuzz.training.choices import TOKENS, whole_batch
from tests.fuzz.training.script_text import ScriptText


class DataLines(ScriptText):
    """Adds data and loaders."""

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
        if is_["resume"] == "second run":
            self._put("# runs twice")
        if is_["habit"] == "mixup":
            self._put("np.random.seed(1)")
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
        if self._is_ragged:
            self._put("""
lengths = torch.randint(1, 5, (count + 30,)).tolist()
x, held = torch.randn(sum(lengths), 6).split(lengths), ()
x, held = x[:count], x[count:]
y, held_y = ([each[:, :2].tanh() for each in every] for every in (x, held))
data, held_data = list(zip(x, y)), list(zip(held, held_y))
""")
            self._divide_data()
            return
        if is_["loss"] in TOKENS:
            self._put("""
words = torch.randint(1, 9, (count, 5))
words[torch.arange(5) > (torch.arange(count) % 5)[:, None]] = 0
y, held_y = words, torch.randint(1, 9, (30, 5))
""")
        elif self._has_classes:
            self._put("y, held_y = (x.nan_to_num().sum(1) > 0).long(), (held.sum(1) > 0).long()")
        else:
            self._put("y, held_y = x.nan_to_num()[..., :2].tanh(), held[..., :2].tanh()")
        if is_["precision"] == "bfloat16":
            self._put("x, held = x.bfloat16(), held.bfloat16()")
            if is_["loss"] not in TOKENS and not self._has_classes:
                self._put("y, held_y = y.bfloat16(), held_y.bfloat16()")
        self._put("data, held_data = TensorDataset(x, y), TensorDataset(held, held_y)")
        self._divide_data()

    def _divide_data(self) -> None:
        kind = self._is["data"]
        if kind in ("own class", "augmented"):
            noise = " + 0.1 * torch.randn_like(self.x[at])" if kind == "augmented" else ""
            self._put(f"""
class Rows(torch.utils.data.Dataset):
    def __init__(self, x, y):
        self.x, self.y = x, y
    def __len__(self):
        return len(self.x)
    def __getitem__(self, at):
        return self.x[at]{noise}, self.y[at]
data = Rows(x, y)
""")
        ways = {
            "random_split": "random_split(data, [count - 10, 10])",
            "fractions": "random_split(data, [0.8, 0.2])",
            "split by generator": "random_split(data, [count - 10, 10], "
            "torch.Generator().manual_seed(5))",
            "subset": "Subset(data, range(0, count, 2)), held_data",
            "concat": "ConcatDataset([data, held_data]), held_data",
        }
        if kind in ways:
            self._put(f"""
from torch.utils.data import ConcatDataset, Subset, random_split
data, held_data = {ways[kind]}
count = len(data)
""")

    def _loaders(self) -> None:
        is_ = self._is
        order = {
            "given": "",
            "shuffled": ", shuffle=True",
            "generator": ", shuffle=True, generator=torch.Generator().manual_seed(3)",
            "weighted": ", sampler=WeightedRandomSampler(torch.rand(count) + 0.1, count)",
            "subset": ", sampler=torch.utils.data.SubsetRandomSampler(range(0, count, 2))",
            "subset drawn": ", sampler=torch.utils.data.SubsetRandomSampler("
            "torch.randperm(count)[6:].tolist())",
        }[is_["order"]]
        drop = is_["drop_last"] == "yes"
        last = ", drop_last=True" if drop else ""
        is_turned = is_["layout"] == "time first"
        packs = is_turned or self._is_ragged or is_["loader"] == "collate dict"
        pack = ", collate_fn=pack" if packs else ""
        options = order + last + pack
        if self._is_ragged:
            self._put("""
def pack(items):
    return tuple(map(list, zip(*items)))
""")
        elif is_turned:
            self._put("""
def pack(items):
    return torch.stack([a for a, _ in items], 1), torch.stack([b for _, b in items], 1)
""")
        elif is_["loader"] == "collate dict":
            self._put("""
def pack(items):
    return {"x": torch.stack([a for a, _ in items]), "y": torch.stack([b for _, b in items])}
""")
        turned = ".transpose(0, 1)" if is_turned else ""
        if self._way == "distribute":
            self._put(f"""
whole = {whole_batch(is_)}
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
        elif is_["loader"] == "sampler of batches":
            self._put(
                f"batches = BatchSampler(RandomSampler(data), batch, {drop})\n"
                "loader = DataLoader(data, sampler=batches, batch_size=None)"
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
        pack = pack if is_["loader"] != "collate dict" or is_turned else ""
        self._put(f"held_loader = DataLoader(held_data, batch_size=8{pack})")
        if is_["several"] == "loaders cycled":
            self._put(f"second = DataLoader(held_data, batch_size=batch{pack})")
        if is_["several"] == "loaders":
            if self._way == "run":
                self._put("second = DataLoader(data, batch_size=max(1, batch // 2), shuffle=True)")
            else:
                self._put("second = loader")
