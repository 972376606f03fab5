"""Lines of a script that make its optimizers and schedulers, also those of a later stage."""

from typing import Final

from tests.fuzz.training.script_text import ScriptText


class OptimizerLines(ScriptText):
    """Adds optimizers and schedulers."""

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
        if is_["habit"] == "sparse adam":
            parameters = '[p for n, p in model.named_parameters() if "table" not in n]'
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
        if is_["several"] == "centers":
            self._put("optimizer_c = torch.optim.SGD(centers.parameters(), lr=0.5)")
            every.append("optimizer_c")
        if is_["habit"] == "sparse adam":
            self._put("sparse = torch.optim.SparseAdam(model.table.parameters(), lr=0.01)")
            every.append("sparse")
        self._every = every
        if self._way != "run":
            self._put(self._distributed(every))
        scheduler = SCHEDULERS.get(is_["scheduler"])
        if scheduler:
            self._put(f"scheduler = torch.optim.lr_scheduler.{scheduler}")
        if is_["ema"] == "averaged":
            self._put(
                "averaged = torch.optim.swa_utils.AveragedModel(model, "
                "multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))"
            )
        if is_["ema"] == "swa":
            self._put("averaged = torch.optim.swa_utils.AveragedModel(model)")
        if is_["ema"] == "by hand":
            self._put("averaged = copy.deepcopy(model).requires_grad_(False)")
        if is_["precision"] == "scaler":
            self._put('scaler = torch.amp.GradScaler("cpu", init_scale=64.0)')
        if is_["precision"] == "scaler off":
            self._put('scaler = torch.amp.GradScaler("cpu", enabled=False)')
        if is_["files"] == "kept open":
            self._put("log = open('log.txt', 'w')")

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
            self._put(f"ranks.close()\n{self._distributed(['optimizer'])}", 2)
        if self._is["scheduler"] != "none" and "make" in stage:
            self._put(
                f"scheduler = torch.optim.lr_scheduler.{SCHEDULERS[self._is['scheduler']]}", 2
            )


_OPTIMIZERS: Final = {
    "sgd": "torch.optim.SGD(parameters, lr=0.1)",
    "momentum": "torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True)",
    "adam": "torch.optim.Adam(parameters, lr=0.01)",
    "adamw": "torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)",
    "rmsprop": "torch.optim.RMSprop(parameters, lr=0.005)",
    "adagrad": "torch.optim.Adagrad(parameters, lr=0.05)",
    "nadam": "torch.optim.NAdam(parameters, lr=0.01)",
    "radam": "torch.optim.RAdam(parameters, lr=0.02)",
    "adam foreach": "torch.optim.Adam(parameters, lr=0.01, foreach=True)",
    "adamw fused": "torch.optim.AdamW(parameters, lr=0.01, fused=True)",
    "sgd fused": "torch.optim.SGD(parameters, lr=0.05, momentum=0.9, fused=True)",
    "lbfgs": "torch.optim.LBFGS(parameters, lr=0.05, max_iter=2, history_size=2)",
    "lbfgs with a search": "torch.optim.LBFGS(parameters, max_iter=4, "
    'line_search_fn="strong_wolfe")',
}
SCHEDULERS: Final = {
    "step": "StepLR(optimizer, 1, gamma=0.5)",
    "cosine": "CosineAnnealingLR(optimizer, 3)",
    "onecycle": "OneCycleLR(optimizer, 0.1, total_steps=200, cycle_momentum=False)",
    "onecycle by length": "OneCycleLR(optimizer, 0.1, total_steps=3 * max(len(loader), 5) + 2, "
    "cycle_momentum=False)",
    "warm restarts": "CosineAnnealingWarmRestarts(optimizer, 1, T_mult=2)",
    "cyclic": "CyclicLR(optimizer, 0.01, 0.1, step_size_up=3, cycle_momentum=False)",
    "sequential": "SequentialLR(optimizer, [torch.optim.lr_scheduler.LinearLR(optimizer, 0.3, "
    "total_iters=1), torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2)], milestones=[1])",
    "swa": "LRScheduler.__class__ and torch.optim.swa_utils.SWALR(optimizer, 0.02, "
    "anneal_epochs=2)",
    "warmup": "LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 6))",
    "plateau": "ReduceLROnPlateau(optimizer, patience=0, threshold=0.3, factor=0.5)",
    "plateau on train": "ReduceLROnPlateau(optimizer, patience=0, threshold=0.3, factor=0.5)",
}
