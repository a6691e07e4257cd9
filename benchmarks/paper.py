"""Draws measured curves beside those of FlashRecovery (arXiv 2509.03047).

The paper's figures are of thousands of Ascend devices and whole recoveries; ours are of simulated workers on
one machine and of frun's own phases. What may be compared is how each grows with the number of devices.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TABLE_B = ((32, 97.0), (960, 101.0), (80, 90.0), (800, 111.0), (960, 98.0), (2880, 120.5),
           (2880, 139.5), (4800, 147.5))  # fmt: skip
"""Devices, total seconds of a recovery."""
FIGURE_C_SERIAL = ((1000, 11.0), (2000, 16.0), (4000, 167.0), (8000, 429.0), (10000, 777.0))
"""Devices, seconds to establish the TCP store one after the other; read from the figure, about 2 s off."""
FIGURE_C_PARALLEL = ((1000, 8.4), (2000, 10.3), (4000, 11.2), (8000, 12.1), (10000, 9.9))
TABLE_D_COLLECT = ((1000, 8.0), (4000, 31.0), (8000, 60.0), (16000, 176.0), (18000, 249.0))
"""Devices, seconds to update the rank table by collecting and sending it."""
TABLE_D_FILE = ((1000, 0.1), (4000, 0.1), (8000, 0.5), (16000, 0.5), (18000, 0.5))


def draw_scale(sizes: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw what `benchmarks.scale` found. Needs matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5))
    left.scatter(
        *zip(*TABLE_B, strict=True),
        marker="x",
        color="gray",
        label="paper, Table B: whole recovery",
    )
    for kind in ("worker", "host", "all"):
        points = [
            (size["ranks"], fault["started"])
            for size in sizes
            for fault in size["faults"]
            if fault["kind"] == kind
        ]
        if points:
            left.plot(
                *zip(*points, strict=True),
                marker="o",
                label=f"frun, {kind}: all started (workers simulated)",
            )
    left.set_title("From the fault to the complete world")
    right.plot(
        *zip(*TABLE_D_COLLECT, strict=True),
        color="gray",
        linestyle=":",
        marker="x",
        label="paper, D: collected",
    )
    right.plot(
        *zip(*TABLE_D_FILE, strict=True), color="gray", marker="x", label="paper, D: shared file"
    )
    for mark, words in (("decided", "in etcd"), ("known", "known to every host")):
        points = [(s["ranks"], s["faults"][0][mark]) for s in sizes if s["faults"]]
        right.plot(*zip(*points, strict=True), marker="o", label=f"frun, rank table {words}")
    right.set_title("Rank table")
    for axes in (left, right):
        axes.set(xscale="log", yscale="log", xlabel="devices", ylabel="seconds")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def draw_store(lines: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw what `benchmarks.store` found. Needs matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5))
    for drawn, words in ((FIGURE_C_SERIAL, "serial"), (FIGURE_C_PARALLEL, "parallel")):
        axes.plot(*zip(*drawn, strict=True), color="gray", marker="x",
                  linestyle=":" if words == "serial" else "-", label=f"paper, C: {words}")  # fmt: skip
    for kind, words in (("tcp", "one TCPStore (libuv)"), ("frun", "frun's group store")):
        points = [
            (x["clients"], x["total_busy"]) for x in lines if x["store"] == kind and not x["again"]
        ]
        axes.plot(*zip(*points, strict=True), marker="o", label=f"{words}: busiest server")
    axes.set(
        xscale="log", yscale="log", xlabel="clients", ylabel="seconds", title="Setting the store up"
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
