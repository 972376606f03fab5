"""Lines of a script that make its networks and its loss."""

from tests.fuzz.training.choices import TOKENS, draws_by_part
from tests.fuzz.training.script_text import ScriptText


class ModelLines(ScriptText):
    """Adds networks and the loss."""

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
        out = "5 * 9" if is_["loss"] in TOKENS else "2"
        own = {
            "sparse": "self.table = nn.Embedding(7, 8, sparse=True)",
            "sparse adam": "self.table = nn.Embedding(7, 8, sparse=True)",
            "parametrize": 'nn.utils.parametrize.register_parametrization(self.middle, "weight", '
            "Symmetric())",
            "weight norm": "self.head = nn.utils.parametrizations.weight_norm(self.head)",
            "spectral norm": "self.middle = nn.utils.parametrizations.spectral_norm(self.middle)",
            "learned weight": "self.scale = nn.Parameter(torch.zeros(()))",
        }.get(is_["habit"], "pass")
        if "branch" in is_["habit"]:
            own = "self.extra, self.is_on = nn.Linear(8, 8), True"
        looked_up = (
            "self.back(x) + self.table((x[..., 0].nan_to_num() * 2).long().clamp(-3, 3) + 3)"
        )
        hidden = {
            "checkpointing": "checkpoint(self.back, x, use_reentrant=False)",
            "sparse": looked_up,
            "sparse adam": looked_up,
        }.get(is_["habit"], "self.back(x)")
        more = "h = h + self.extra(h) if self.is_on else h" if "branch" in is_["habit"] else "pass"
        lists = {
            "ragged": "\n        if isinstance(x, list):\n            "
            "return [self(each) for each in x]",
            "ragged joined": "\n        if isinstance(x, list):\n            return list("
            "self(torch.cat(x)).split([len(each) for each in x]))",
        }.get(is_["layout"], "")
        if is_["habit"] == "parametrize":
            self._put("""
class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).T
""")
        self._put(f"""
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.back = nn.Sequential(nn.Linear(6, 8), {inner})
        self.middle = nn.Linear(8, 8)
        self.again = nn.Linear(8, 8)
        self.head = nn.Linear(8, {out})
        {own}

    def forward(self, x):{lists}
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
        if is_["compiled"] == "disabled":
            self._put("model = torch.compile(model, disable=True)")
        if is_["several"] == "centers":
            self._put("centers = nn.Embedding(2, 2)")
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
        if is_["loss"] == "contrastive":
            self._put("""
def contrast(out, b):
    z, label = F.normalize(out.flatten(1)), b.reshape(len(b), -1)[:, 0] > 0
    own = torch.eye(len(z), dtype=torch.bool)
    same = (label[:, None] == label) & ~own
    sure = F.log_softmax((z @ z.T * 5).masked_fill(own, -1e4), 1)
    return -((sure * same).sum(1) / same.sum(1).clamp(min=1)).mean()
""")
        loss = self._loss_text()
        joined = ""
        if self._is_ragged and is_["loss"] != "loop":
            joined = "\n    samples, out, b = len(b), torch.cat(out), torch.cat(b)"
        if self._way == "slices" and is_["loss"] == "sum":
            loss = f"({loss}) * size * is_own"
        self._put(f"""
def loss_of(out, b{", is_own=1" if self._way == "slices" else ""}):
    every = list(model.parameters()){joined}
    return {loss}
""")

    def _loss_text(self) -> str:
        is_ = self._is
        samples = "samples" if self._is_ragged else self._samples.replace("a", "b", 1)
        if is_["task"] == "classes":
            goal, each = "F.one_hot(b, 2).to(out)", 'F.cross_entropy(out, b, reduction="none")'
            first = "F.cross_entropy(out, b)"
            other, soft = "F.multi_margin_loss(out, b)", "F.one_hot(b, 2).to(out) * 0.8 + 0.1"
            more = "b.to(out)"
            far = "(F.softmax(out, 1) - F.one_hot(b, 2).to(out))"
            plain = "F.cross_entropy(out, b"
            second = "out.square().mean()"
            by_hand = "-F.log_softmax(out, 1)[torch.arange(len(b)), b].mean()"
            smooth = "F.cross_entropy(out, b, label_smoothing=0.1)"
        else:
            goal, each = "(b > 0).to(out)", 'F.mse_loss(out, b, reduction="none").mean(-1)'
            first = "F.mse_loss(out[..., :1], b[..., :1])"
            other, soft = "F.l1_loss(out[..., 1:], b[..., 1:])", "F.softmax(b, -1)"
            more = "(b[..., 0] > 0).to(out)"
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
            "tasks": f"0.7 * {first} + 0.3 * {other}",
            "by samples": f'{plain}, reduction="sum") / {samples}',
            "by mask": f"({far}.square() * {goal}).sum() / ({goal}.sum() + 1e-8)",
            "by tokens": "F.cross_entropy(out.reshape(-1, 9), b.reshape(-1), ignore_index=0, "
            'reduction="sum") / (b != 0).sum()',
            "weighted mean": f"((1 + {more}) * {each}).sum() / (1 + {more}).sum()",
            "per sample": f"((1 + {more}) * {each}).mean()",
            "loop": f"sum({plain.replace('out', 'o').replace(' b', ' t')}) for o, t in "
            "zip(out, b)) / len(out)",
            "kl": f'F.kl_div(F.log_softmax(out, -1), {soft}, reduction="batchmean")',
            "bce": f"F.binary_cross_entropy_with_logits(out, {goal}, "
            "pos_weight=torch.tensor([1.0, 2.0]).to(out))",
            "contrastive": "contrast(out, b)",
            "triplet": f"F.triplet_margin_loss(out, {goal}, out.roll(1, 0))",
            "dice": f"1 - (2 * (out.sigmoid() * {goal}).sum() + 1) / (out.sigmoid().sum() + "
            f"{goal}.sum() + 1)",
            "spread": f"{plain}) + 0.1 * "
            "F.relu(1 - (out.var(0, unbiased=False) + 1e-4).sqrt()).mean()",
        }[is_["loss"]]
        self._weight = {
            "sum": "1.0",
            "by class": "torch.tensor([1.0, 3.0])[b].sum().item()",
            "tokens": "(b != 0).sum().item()",
            "masked": f"{kept}.sum().item()",
            "by tokens": "(b != 0).sum().item()",
            "by mask": f"{goal.replace('.to(out)', '')}.sum().item()",
            "weighted mean": f"(1 + {more.replace('.to(out)', '')}).sum().item()",
        }.get(is_["loss"], "")
        return loss
