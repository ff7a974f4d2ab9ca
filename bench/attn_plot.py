"""A picture of an attention benchmark's rows: time over length, one panel for each kind of call."""

from collections import defaultdict
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lookahead.errors import InputError

# Lines of one panel: name -> (length, microseconds) in order of length.
Lines = dict[str, list[tuple[int, float]]]


def require(path: Path | None) -> None:
    """Refuse before the work is done rather than after."""
    if path is None:
        return
    if find_spec("matplotlib") is None:
        raise InputError(
            "--plot needs matplotlib, which is not installed: run `pip install matplotlib` or leave "
            "the option out"
        )
    if not path.parent.is_dir():
        raise InputError(f"--plot {path} cannot be written: no such directory {path.parent}")


def panels(rows: Sequence[dict[str, Any]]) -> dict[str, Lines]:
    """Rows of either kind of run, as panels by heads, step and batch."""
    found: dict[str, Lines] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        shape = "AR" if row["rows"] == 1 else f"({row['window']}, {row['ngram']}, {row['guesses']})"
        title = f"{row['heads']}, {shape}, batch {row['batch']}"
        if "us" in row:
            times = {name: spread["median"] for name, spread in row["us"].items()}
            times["limit"] = row["limit_us"]
        else:
            times = {name: 1000 * row[f"{name}_ms"]["median"] for name in ("attend", "dense")}
        for name, time in times.items():
            found[title][name].append((row["length"], time))
    return {
        title: {name: sorted(points) for name, points in lines.items()}
        for title, lines in found.items()
    }


def write(rows: Sequence[dict[str, Any]], path: Path, subtitle: str) -> None:
    """A PNG of all panels, two in a line, both axes logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    all_panels = panels(rows)
    height = -(-len(all_panels) // 2)
    figure, axes = pyplot.subplots(height, 2, figsize=(11, 3.6 * height), squeeze=False)
    for axis in axes.flat[len(all_panels) :]:
        axis.remove()
    for axis, (title, lines) in zip(axes.flat, all_panels.items(), strict=False):
        for name, points in lines.items():
            style = "k--" if name == "limit" else "o-"
            axis.plot(*zip(*points, strict=True), style, label=name)
        axis.set(title=title, xlabel="committed length", ylabel="microseconds")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.grid(alpha=0.3)
        axis.legend()
    figure.suptitle(subtitle)
    figure.tight_layout()
    figure.savefig(path, format="png", dpi=120)
    pyplot.close(figure)
