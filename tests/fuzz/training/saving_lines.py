"""Lines of a script that print, save, resume and end."""

from typing import Final

from tests.fuzz.training.script_text import ScriptText

_ARGMAX: Final = "np.concatenate(labels).argmax(1)"


class SavingLines(ScriptText):
    """Adds the files that a script leaves behind."""

    def _prints(self) -> None:
        printed = {
            "val": 'print(f"epoch {epoch}: val {val:.3f}")',
            "train loss": f'print(f"epoch {{epoch}}: train loss {{{self._mean}:.3f}}")',
            "last loss": 'print(f"epoch {epoch}: last loss {loss.item():.3f}")  # reads last loss',
            "accuracy": 'print(f"epoch {epoch}: accuracy {right} of {len(data)}")',
            "metric": 'print(f"epoch {epoch}: metric {far:.3f}")',
            "tensor loss": 'print(f"epoch {epoch}: tensor loss {(far / (number + 1)).item():.3f}")'
            "  # reads tensor loss",
            "scores": "hits = np.concatenate(scores).argmax(1) == "
            + ("np.concatenate(labels)[:, 0]" if self._has_classes else _ARGMAX)
            + '\nprint(f"epoch {epoch}: scores {hits.mean():.3f} of {len(hits)}")  # reads scores',
            "largest gradient": 'print(f"epoch {epoch}: largest gradient {far:.3f}")'
            "  # reads largest gradient",
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

    def _resume_run(self) -> None:
        """Begin where the first run has ended."""
        self._put("""
begun = 0
if os.path.exists("run.pt"):
    stored = torch.load("run.pt")
    model.load_state_dict(stored["model"])
    torch.set_rng_state(stored["drawn"])
    begun = stored["epoch"] + 1
""")
        for name in self._kept_states():
            self._put(f'{name}.load_state_dict(stored["{name}"])', 1)

    def _save_run(self) -> None:
        states = "".join(f', "{name}": {name}.state_dict()' for name in self._kept_states())
        self._put(
            'torch.save({"model": model.state_dict(), "epoch": epoch, "drawn": '
            f'torch.get_rng_state(){states}}}, "run.pt")\nif begun == 0:\n    break',
            1,
        )

    def _kept_states(self) -> list[str]:
        kept = [*self._every]
        kept += ["scheduler"] if self._is["scheduler"] != "none" else []
        return kept + (["scaler"] if "scaler" in self._is["precision"] else [])

    def _end(self) -> None:
        if self._is["stop"] == "patience":
            self._put("model.load_state_dict(kept_best or model.state_dict())")
        has_statistics = self._is["norm"] == "batch" and self._is["loader"] != "collate dict"
        if self._is["ema"] == "swa" and has_statistics and self._way == "run":
            self._put("torch.optim.swa_utils.update_bn(loader, averaged)")
        if self._is["save"] == "end":
            self._put("torch.save(model.state_dict(), 'end.pt')")
        if self._way != "run":
            self._put("ranks.close()")
        self._put("""
weights = {n: p.detach().double().numpy() for n, p in model.named_parameters()}
weights |= {"buffer " + n: b.double().numpy() for n, b in model.named_buffers()}
""")
        more = {"ema": self._is["ema"] != "none", "judge": self._is["several"] == "gan"}
        more["centers"] = self._is["several"] == "centers"
        for name, model in (("ema", "averaged"), ("judge", "judge"), ("centers", "centers")):
            if more[name]:
                self._put(
                    f"for n, p in {model}.named_parameters():\n"
                    f"    weights['{name} ' + n] = p.detach().double().numpy()"
                )
        self._put("np.savez(f\"{os.environ['FUZZ_OUT']}/rank{rank}.npz\", **weights)")
