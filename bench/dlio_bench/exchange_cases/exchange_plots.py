"""The picture of `--case messages`: seconds of a step's exchange against ranks."""

from collections.abc import Mapping, Sequence

from dlio.util.plot_files import picture


def draw(
    seconds: Mapping[str, Sequence[float]], ranks: Sequence[int], title: str, path: str
) -> None:
    """A line an exchange, both axes logarithmic; PNG or SVG by the name's ending.

    Raises UsageError without matplotlib.
    """
    with picture(path) as pyplot:
        _, axes = pyplot.subplots(figsize=(8, 5.5))
        for (name, times), marker in zip(seconds.items(), "os^vDPX*<>", strict=False):
            axes.plot(ranks, times, marker=marker, markersize=4, label=name)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(ranks, [f"{p:,}" for p in ranks])
        axes.set_xlabel("ranks")
        axes.set_ylabel("seconds of a step's exchange, none hidden")
        axes.grid(True, alpha=0.3)
        axes.legend()
        axes.set_title(title, fontsize=9)
