"""How arms of an experiment are compared: seed by seed, because at one seed they share prompts and
random bits.

A paired t test on the differences (Welch's test would need independent arms). p values are
Holm-adjusted within a group of claims, intervals are not. From the 95 % interval of the mean
difference A − B and MARGIN, .02 (two points of accuracy), the verdict on "A is above B" is

    holds         p < .05 and A above B
    does not      the interval ends below MARGIN: any gain is too small to matter
    cannot tell   else, and always with fewer than 3 pairs

Needs: numpy; scipy (pip install scipy).
"""

import math
from typing import NamedTuple

import numpy as np

MARGIN, LEVEL = 0.02, 0.05


class Difference(NamedTuple):
    mean: float  # of A − B
    half: float  # of its 95 % interval; NaN with fewer than 3 pairs
    p: float  # two-sided; NaN with fewer than 3 pairs


def compare(a, b):
    """Values of two arms, in the order of the seeds → the Difference of a and b."""
    d = np.asarray(a, float) - np.asarray(b, float)
    if len(d) < 3:
        return Difference(d.mean() if len(d) else math.nan, math.nan, math.nan)
    if np.all(d == d[0]):
        return Difference(d[0], 0.0, float(d[0] == 0))
    try:
        from scipy import stats
    except ImportError:
        raise SystemExit("a paired t test needs scipy: pip install scipy") from None
    result = stats.ttest_1samp(d, 0.0)
    low, high = result.confidence_interval(1 - LEVEL)
    return Difference(d.mean(), (high - low) / 2, result.pvalue)


def holm(ps):
    """Holm's p: in ascending order, each p times the number still left, never decreasing; NaN is
    left out."""
    adjusted, most = list(ps), 0.0
    order = sorted((i for i, p in enumerate(ps) if not math.isnan(p)), key=lambda i: ps[i])
    for place, i in enumerate(order):
        most = max(most, min(1.0, ps[i] * (len(order) - place)))
        adjusted[i] = most
    return adjusted


def verdict(difference):
    """On "A is above B"; difference.p is the adjusted one."""
    if math.isnan(difference.half):
        return "cannot tell"
    if difference.p < LEVEL and difference.mean > 0:
        return "holds"
    return "does not" if difference.mean + difference.half < MARGIN else "cannot tell"


def mean_and_sd(values):
    """The text "0.330±0.014"; a dash where there are too few."""
    mean = np.mean(values) if len(values) else math.nan
    sd = np.std(values, ddof=1) if len(values) > 1 else math.nan
    return "±".join("–" if math.isnan(v) else f"{v:.3f}" for v in (mean, sd))
