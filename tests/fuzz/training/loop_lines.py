"""Lines of a script that are its loop over epochs."""

from tests.fuzz.training.optimizer_lines import OptimizerLines
from tests.fuzz.training.saving_lines import SavingLines
from tests.fuzz.training.step_lines import StepLines


class LoopLines(OptimizerLines, StepLines, SavingLines):
    """Adds the loop over epochs."""

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
        first = "begun, " if is_["resume"] == "second run" else ""
        self._put(f"""
for epoch in range({first}{is_["epochs"]}):
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
        if is_["prints"] == "scores":
            self._put("scores, labels = [], []", 1)
        if self._has_loaders:
            second = "itertools.cycle(second)" if is_["several"] != "loaders" else "second"
            source = f"zip({source}, {second})"
        if is_["habit"] == "restarted":
            self._put(
                """
for number in range(5):
    try:
        item = next(again)
    except StopIteration:
        again = iter(loader)
        item = next(again)
""",
                1,
            )
        else:
            self._put(f"for number, item in enumerate({source}):", 1)
        if self._has_loaders:
            self._put("item, (c, d) = item", 2)
        self._put(self._unpacked(), 2)
        self._step()
        self._after_epoch()

    def _before_epochs(self) -> None:
        if self._is["habit"] == "restarted":
            self._put("again = iter(loader)")
        if self._is["stop"] == "patience":
            self._put("least, kept_best = 1e9, None")
        if self._is["resume"] == "second run":
            self._resume_run()
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
        if is_["ema"] == "swa":
            self._put("averaged.update_parameters(model)", 1)
        if is_["inner"] == "scores":
            self._put(
                """
model.eval()
with torch.no_grad():
    found = [(model(a).double().numpy(), b.double().numpy()) for a, b in held_loader]
print(f"epoch {epoch}: outputs {np.abs(np.concatenate([a for a, _ in found])).mean():.3f}")
print(f"epoch {epoch}: labels {np.abs(np.concatenate([b for _, b in found])).mean():.3f}")
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
            "sequential": "scheduler.step()",
            "swa": "scheduler.step()",
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
        if is_["resume"] == "second run":
            self._save_run()
        if is_["stop"] == "patience":
            self._put(
                """
if val < least - 0.02:
    least, stale, kept_best = val, 0, copy.deepcopy(model.state_dict())
else:
    stale += 1
if stale == 1:
    break
""",
                1,
            )
        if is_["stop"] == "val":
            self._put("if val < 0.3:\n    break", 1)
        if is_["stop"] == "train":
            self._put(f"if {self._mean} < 0.35:\n    break", 1)
