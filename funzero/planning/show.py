"""A plan as a table and as a chart. `plan` is a `MemoryPlan`, whose module stands on this one."""

import html
from typing import Any

from funzero.core import tree as tree_lib
from funzero.core.spec import MEMORY_KINDS
from funzero.planning.limits import Limits

COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb", "#332288", "#999933", "#882255")
WIDTH, ROW, LEFT = 760, 34, 90


def size(count: float) -> str:
    """`12.3 GB`; decimal units."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000
    return f"{count:.4g} PB"


def bars(plan: Any) -> dict[str, dict[str, int]]:
    """{memory: {purpose: bytes on the first rank at the peak}}, without empty ones."""
    found = {m: dict(plan.state[m]) for m in MEMORY_KINDS}
    found["device"] |= plan.step.device
    found["host"]["sums, lanes and copies"] = plan.step.host
    found["disk"]["sums and second copy"] = plan.step.disk
    return {m: {k: n for k, n in x.items() if n} for m, x in found.items()}


def table(plan: Any) -> str:
    """Rows of purposes, columns of memories, and a line for each volume."""
    found = bars(plan)
    rows: list[tuple[str, ...]] = [(f"first rank of {plan.mesh.describe()}", *MEMORY_KINDS)]
    for name in dict.fromkeys(k for x in found.values() for k in x):
        rows.append((name, *(size(found[m][name]) if name in found[m] else "" for m in MEMORY_KINDS)))
    rows.append(("at most", *(size(n) for n in (plan.device, plan.host, plan.disk))))
    lines = [tree_lib.table(rows), f"the device is fullest in: {plan.step.where}"]
    for memory, each in plan.ranks.items():
        if max(each):
            lines.append(f"state on {memory}, a rank: {size(min(each))} to {size(max(each))}, all {size(sum(each))}")
    sent = ", ".join(f"{k} {size(n)}" for k, n in plan.step.sent.items()) or "nothing"
    lines.append(f"sent by a rank in a step: {sent}")
    if plan.step.read or plan.step.written:
        lines.append(f"disk in a step: {size(plan.step.read)} read, {size(plan.step.written)} written")
    return "\n".join(lines)


def chart(plan: Any, limits: Limits | None = None) -> str:
    """An HTML page with one stacked bar for each memory, and its limit as a line."""
    found = {m: x for m, x in bars(plan).items() if x}
    bound = {}
    if limits is not None:
        bound = {"device": limits.device or limits.host, "host": limits.host, "disk": limits.disk}
    names = list(dict.fromkeys(k for x in found.values() for k in x))
    color = {n: COLORS[i % len(COLORS)] for i, n in enumerate(names)}
    parts = []
    for i, (memory, values) in enumerate(found.items()):
        limit = bound.get(memory)
        most = max(sum(values.values()), limit.available if limit else 0)
        x, y = float(LEFT), i * (ROW + 26) + 10
        parts.append(f'<text x="0" y="{y + 22}">{memory}</text>')
        for name, n in values.items():
            width = WIDTH * n / most
            label = html.escape(f"{name}: {size(n)}")
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW}" fill="{color[name]}"><title>{label}</title></rect>'
            )
            x += width
        parts.append(f'<text x="{LEFT}" y="{y + ROW + 16}" class="s">{size(sum(values.values()))}</text>')
        if limit:
            at = LEFT + WIDTH * limit.available / most
            label = html.escape(f"{size(limit.available)} available: {limit.source}")
            parts.append(f'<path d="M{at:.1f} {y - 6}v{ROW + 12}" class="l"><title>{label}</title></path>')
            parts.append(f'<text x="{LEFT + 110}" y="{y + ROW + 16}" class="s">{label}</text>')
    height = len(found) * (ROW + 26) + 20
    legend = "".join(f'<li><i style="background:{color[n]}"></i>{html.escape(n)}</li>' for n in names)
    return PAGE.format(
        title=html.escape(f"first rank of {plan.mesh.describe()}"),
        width=LEFT + WIDTH + 10,
        height=height,
        bars="".join(parts),
        legend=legend,
        table=html.escape(table(plan)),
    )


PAGE = """<!doctype html><meta charset="utf-8"><title>funzero plan</title>
<style>body{{font:15px sans-serif;margin:2em}}.s{{font-size:12px}}.l{{stroke:#000;stroke-width:2}}
li{{list-style:none;display:inline-block;margin-right:1.5em}}i{{display:inline-block;width:12px;height:12px;margin-right:5px}}
</style><h1>{title}</h1><svg width="{width}" height="{height}">{bars}</svg><ul>{legend}</ul><pre>{table}</pre>
"""
