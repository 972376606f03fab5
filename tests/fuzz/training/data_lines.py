"""Lines of a script that import, and make its data and loaders."""

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
