"""How every figure looks: colours that the colour-blind can tell apart, sizes, and what is written where.

Owns looks alone. Colours are those of Okabe and Ito (2008).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib as mpl

BLUE, ORANGE, GREEN, SKY = "#0072B2", "#E69F00", "#009E73", "#56B4E9"
RED, PINK, YELLOW, BLACK = "#D55E00", "#CC79A7", "#F0E442", "#222222"
GREY = "#9A9A9A"
WHEEL = (BLUE, ORANGE, GREEN, PINK, SKY, RED, YELLOW, BLACK)

PHASES = {"rollout": BLUE, "environment": ORANGE, "training": GREEN, "publish": BLACK, "load": PINK}
CAUSES = {
    "queue": GREY,
    "adapter_load": PINK,
    "generate": BLUE,
    "environment": ORANGE,
    "straggler_wait": SKY,
    "buffer_wait": YELLOW,
    "train": GREEN,
    "publish": BLACK,
}
WIDTH_IN = 10.5
DPI = 130

RC: dict[str, Any] = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
}


def colours(names: Sequence[str]) -> dict[str, str]:
    """A colour for each name; beyond eight, evenly spaced on a map that stays ordered in grey."""
    if len(names) <= len(WHEEL):
        return dict(zip(names, WHEEL, strict=False))
    cmap = mpl.colormaps["viridis"]
    return {name: mpl.colors.to_hex(cmap(i / (len(names) - 1))) for i, name in enumerate(names)}
