"""All numbers of a run, computed from its trace alone, the same for both worlds.

`definitions.py` holds every metric with its formula; `steps.py` splits a step's latency into its causes;
`spans.py` joins commands with the events that ended them; `timelines.py` serves pictures.
"""

from traces.metrics.definitions import alone_rates, compute, quantile
from traces.metrics.run import Run, Source
from traces.metrics.steps import CAUSES, StepRow
from traces.metrics.timelines import KINDS, Interval, intervals, series

__all__ = [
    "CAUSES",
    "KINDS",
    "Interval",
    "Run",
    "Source",
    "StepRow",
    "alone_rates",
    "compute",
    "intervals",
    "quantile",
    "series",
]
