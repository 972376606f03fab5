"""Lines of a script that make a step of training."""

from typing import Final

from tests.fuzz.training.choices import TOKENS
from tests.fuzz.training.script_text import ScriptText


class StepLines(ScriptText):
    """Adds the step of a batch."""

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
        if is_["habit"] == "mixup":
            self._put("part, turn = np.random.beta(0.4, 0.4), torch.randperm(len(a))", extra)
        mixed = {
            "mixed": f"0.7 * a + 0.3 * a.flip({batch})",
            "mixup": "part * a + (1 - part) * a[turn]",
        }.get(is_["habit"], "a")
        call = f"model({mixed})"
        if is_["habit"] == "functional":
            call = "torch.func.functional_call(model, dict(model.named_parameters()), (a,))"
        self._put(f"out = {call}", extra)
        if is_["gradient"] == "noise":
            self._put("out = out + 0.1 * torch.randn_like(out)", extra)
        self._put(f"loss = loss_of(out, b{self._own})", extra)
        more = {
            "mixed": f"loss = 0.7 * loss + 0.3 * loss_of(out, b.flip({batch}))",
            "mixup": "loss = part * loss + (1 - part) * loss_of(out, b[turn])",
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
        if is_["several"] == "centers":
            kind = "b" if self._has_classes else "(b.reshape(len(b), -1)[:, 0] > 0).long()"
            term = f"0.1 * (out[:, :2] - centers({kind}).to(out)).square().sum(1).mean()"
            self._put(f"loss = loss + {term}", extra)
        if self._has_loaders:
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
            if is_["loss"] in TOKENS:
                hits = "(out.reshape(-1, 5, 9).argmax(-1) == b)"
            elif self._has_classes:
                hits = "(out.argmax(-1) == b)"
            self._put(f"right += {hits}.sum().item()  # reads accuracy", 2)
        if is_["prints"] == "scores":
            self._put(
                "scores.append(out.detach().float().flatten(1).numpy())  # reads scores\n"
                "labels.append(b.float().reshape(len(b), -1).numpy())  # reads scores",
                2,
            )
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
        if self._is["prints"] == "tensor loss":
            self._put("far = far + loss.detach()  # reads tensor loss", 2)
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
        kept = "set_to_none=False" if is_["zero"] == "kept" else ""
        zero = "; ".join(f"{each}.zero_grad({kept})" for each in every)
        if not every or is_["zero"] == "model":
            zero = f"model.zero_grad({kept})"
        elif is_["zero"] == "none":
            zero = '[setattr(p, "grad", None) for p in model.parameters()]'
        if many == 1:
            self._put(zero, indent)
        if many > 1 and is_["leftover"] == "own":
            self._put(f"window = min({many}, len(loader) - number // {many} * {many})", indent)
        self._put(self._backward(many), indent)
        if is_["prints"] == "largest gradient":
            self._put(
                "far = max(p.grad.to_dense().abs().max().item() for p in model.parameters() if "
                "p.grad is not None)  # reads largest gradient",
                indent,
            )
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
        is_scaled_here = is_["gradient"] not in ("twice", "autograd.grad")
        scaled = "scaler" in is_["precision"] and is_scaled_here
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
        split = "window" if self._is["leftover"] == "own" else many
        part = f"loss / {split}" if many > 1 else "loss"
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
        later = {
            "weighted": f"({part}).backward(gradient=torch.full_like(loss, 0.5))",
            "outputs": "out.backward(gradient=((out.detach() - b) / b.numel() / {many}).to(out))",
            "per sample": 'each = F.mse_loss(out, b, reduction="none").mean(-1)\n'
            f"each.backward(torch.full_like(each, 1 / each.numel() / {many}))",
            "list": f"torch.autograd.backward([{part}, 0.1 * out.square().mean()])",
        }
        if gradient in later:
            return later[gradient].replace("{many}", str(many))
        if "scaler" in self._is["precision"]:
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
        if is_["scheduler"] in ("onecycle", "onecycle by length", "warmup", "cyclic"):
            self._put("scheduler.step()", indent)
        if is_["scheduler"] == "warm restarts":
            self._put("scheduler.step(epoch + number / len(loader))", indent)
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


_BY_HAND_STEP: Final = """
with torch.no_grad():
    for p in model.parameters():
        if p.grad is not None:
            p -= 0.1 * p.grad
"""
