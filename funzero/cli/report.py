"""What the command line shows: a progress display, a loss curve and an honest table of who won."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import numpy as np

try:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.axes import Axes
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar
    from rich.table import Column, Table
except ImportError as error:
    raise ImportError(
        f"funzero.cli.report: expected the packages rich and matplotlib, found no {error.name!r}; "
        "run `pip install funzero[cli]`"
    ) from error

LINES_WITHOUT_TERMINAL = 10


def bits_per_byte(loss: float) -> float:
    """Bits per byte of a mean cross entropy in nats per byte."""
    return loss / math.log(2)


class Progress:
    """A bar with step, loss, bits per byte, tokens/s, gradient norm and ETA; use as a context manager.

    steps: total number of steps. start: how many of them an earlier run has done. Without a terminal it prints a line
    about every tenth of the run instead.
    """

    def __init__(self, steps: int, console: Console | None = None, start: int = 0) -> None:
        if steps < 1:
            raise ValueError(f"Progress: expected steps >= 1, found {steps}; pass the total number of steps")
        self.steps, self.start = steps, start
        self.console = console if console is not None else Console()
        self._shown = start * LINES_WITHOUT_TERMINAL // steps
        self._first = True
        self._bar: Bar | None = None

    def __enter__(self) -> Progress:
        self._began = time.perf_counter()
        if self.console.is_terminal:
            # The bar has what width the figures leave: the other way round, 80 columns cut the figures.
            bar = BarColumn(bar_width=None, table_column=Column(ratio=1))
            figures = [TextColumn("{task.description}", table_column=Column(no_wrap=True)), TextColumn("ETA")]
            eta = TimeRemainingColumn(compact=True)
            self._bar = Bar(bar, MofNCompleteColumn(), *figures, eta, console=self.console, expand=True)
            self._bar.start()
            self._task = self._bar.add_task("starting", total=self.steps, completed=self.start)
        return self

    def update(self, step: int, *, loss: float, tokens_per_s: float, grad_norm: float) -> None:
        """Show the state after `step` finished steps (1 to `steps`). loss: nats per byte."""
        text = (
            f"loss {loss:.3f} {bits_per_byte(loss):.3f} bits/byte {tokens_per_s / 1e3:,.1f}k tokens/s "
            f"grad norm {grad_norm:.2f}"
        )
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description=text)
            return
        tenth = step * LINES_WITHOUT_TERMINAL // self.steps
        if tenth > self._shown or self._first or step == self.steps:
            self._shown, self._first = tenth, False
            remaining = (time.perf_counter() - self._began) / max(step - self.start, 1) * (self.steps - step)
            line = f"step {step:>{len(str(self.steps))}}/{self.steps}  {text}  ETA {clock(remaining)}"
            # A log file has no width: wrapped or styled lines could no longer be searched.
            self.console.print(line, soft_wrap=True, highlight=False, markup=False)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def loss_curve(
    metrics_jsonl_path: str | Path, png_path: str | Path, title: str, references: Mapping[str, float]
) -> None:
    """Draw training and held-out bits per byte against the step as a PNG.

    metrics_jsonl_path: one JSON object a line with "step" and "loss" (nats per byte) and/or "heldout_bits".
    references: bits per byte of what to compare with, by name; each becomes a dashed line.
    """
    steps, bits, heldout_steps, heldout_bits = _read_metrics(Path(metrics_jsonl_path))
    smooth = _smooth(bits)
    figure, axes = pyplot.subplots(figsize=(9, 5), dpi=150, layout="constrained")
    try:
        axes.plot(steps, bits, color="#9db8d6", linewidth=0.6, alpha=0.8, label="training, each step")
        axes.plot(steps, smooth, color="#1f5a9c", linewidth=2.0, label="training, smoothed")
        if len(heldout_steps):
            # Over the lines and not clipped, or the last point would be cut in half by the frame.
            axes.plot(
                heldout_steps, heldout_bits, "o-", color="#c8501e", markersize=5, linewidth=1.2, zorder=5,
                clip_on=False, label=f"held-out ({heldout_bits[-1]:.2f} at the end)",
            )  # fmt: skip
        levels = np.array(list(references.values()), dtype=float)
        low = min(float(part.min()) for part in (smooth, heldout_bits, levels) if len(part))
        # The first steps fall from 8 bits; shown whole they press everything of interest into a thin band.
        high = max(float(np.percentile(smooth, 90)), *levels, *heldout_bits[-1:], low + 0.5)
        margin = 0.15 * (high - low)
        axes.set_ylim(low - margin, high + 2 * margin)
        axes.set_xlim(0, max(float(steps[-1]), *heldout_steps))
        _draw_references(axes, references)
        axes.set(title=title, xlabel="step", ylabel="bits per byte")
        axes.grid(axis="y", color="#e6e6e6", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="upper right", frameon=False)
        figure.savefig(png_path)
    finally:
        # pyplot keeps every figure that is not closed.
        pyplot.close(figure)


def verdict_table(own: float, baselines: Mapping[str, float], name: str = "this model") -> Table:
    """A table of bits per held-out byte, best first, whose caption says what the model beat and what beat it."""
    if not math.isfinite(own):
        raise ValueError(
            f"verdict_table: expected finite bits per byte for {name}, found {own}; look for the first step whose "
            "loss is not finite and lower the learning rate"
        )
    table = Table(title="Bits per held-out byte (lower is better)", caption=_verdict(own, baselines, name))
    table.add_column("rank", justify="right")
    table.add_column("model")
    table.add_column("bits/byte", justify="right")
    table.add_column("against the model", justify="right")
    ranked = sorted([(own, 0, name), *((bits, 1, other) for other, bits in baselines.items())])
    for rank, (bits, is_other, label) in enumerate(ranked, start=1):
        gap = f"{bits - own:+.3f}" if is_other else ""
        table.add_row(str(rank), label, f"{bits:.3f}", gap, style=None if is_other else "bold")
    return table


def _verdict(own: float, baselines: Mapping[str, float], name: str) -> str:
    # Compared as displayed: a lead that the table rounds away is called a tie.
    shown = round(own, 3)
    beaten = [other for other, bits in baselines.items() if round(bits, 3) > shown]
    better = [other for other, bits in baselines.items() if round(bits, 3) < shown]
    equal = [other for other, bits in baselines.items() if round(bits, 3) == shown]
    if not baselines:
        return f"{name} was compared with nothing"
    said = [
        f"{verb} {', '.join(others)}"
        for verb, others in (("beats", beaten), ("ties with", equal), ("loses to", better))
        if others
    ]
    return f"{name} " + "; ".join(said)


def _read_metrics(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    records = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    training = [(r["step"], bits_per_byte(r["loss"])) for r in records if "loss" in r]
    heldout = [(r["step"], r["heldout_bits"]) for r in records if "heldout_bits" in r]
    if not training:
        raise ValueError(
            f'loss_curve: expected records with "step" and "loss" in {str(path)!r}, found none among '
            f"{len(records)} records; train for at least one logged step first"
        )
    drawn, scored = np.array(training, dtype=float), np.array(heldout, dtype=float).reshape(-1, 2)
    return drawn[:, 0], drawn[:, 1], scored[:, 0], scored[:, 1]


def _smooth(values: np.ndarray) -> np.ndarray:
    """Centred moving average over about a fortieth of the run; windows are cut at both ends. [n] -> [n]."""
    half = len(values) // 80
    sums = np.concatenate([[0.0], np.cumsum(values)])
    at = np.arange(len(values))
    first, end = np.maximum(at - half, 0), np.minimum(at + half + 1, len(values))
    smooth: np.ndarray = (sums[end] - sums[first]) / (end - first)
    return smooth


def _draw_references(axes: Axes, references: Mapping[str, float]) -> None:
    for name, level in references.items():
        axes.axhline(level, color="#555555", linewidth=1.0, linestyle=(0, (5, 3)), zorder=1)
        axes.annotate(
            f"{name} {level:.2f}", (0, level), xycoords=("axes fraction", "data"), xytext=(6, 3),
            textcoords="offset points", fontsize=9, color="#333333",
        )  # fmt: skip


def clock(seconds: float) -> str:
    """A duration as 1:05, or 1:00:05 from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"
