"""Test the claims of the paper on the runs of one network, one method per claim.

`claim_results` holds the rule of judgement, `curve_statistics` the numbers of a single run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import numpy as np
import pandas as pd

from flatlens.analysis import run_table
from flatlens.analysis.claim_results import ClaimVerdict, Result, judge
from flatlens.analysis.curve_statistics import (
    SHARPNESS,
    change_once_level,
    late_change,
    logarithm,
    over_steps,
    slowing,
)
from flatlens.analysis.statistics import (
    NOTHING,
    Array,
    Index,
    Interval,
    averaged,
    centred,
    combination,
    correlation,
    fisher,
    jackknife,
    jackknife_correlation,
    median,
    strata,
    wilson,
)
from flatlens.errors import FlatlensError

FEWEST_NETWORKS = 8  # Fewest runs for a correlation over networks.
FEWEST_SEEDS_WITHIN = 8  # Fewest runs of each configuration for correlations within configurations.
SMALL_CHANGE = 0.01  # A change of a logarithm by one percent is no effect.
SMALL_CORRELATION = 0.1
NOTICEABLE = 0.1  # A change of a logarithm that a reader sees in a figure.
WEAK = 0.3  # A correlation below this is weak.
FOLLOWS = 0.5  # Smallest rank correlation over steps at which one curve follows another.
TOLERANCE = 1e-4  # Relative rounding error of an inequality between float32 measurements.
# The columns that a statistic of one run may use; tables of all columns are slow to split by run.
CURVES = (
    "run", "step", "train_loss", SHARPNESS, "log_volume", "mls", "nmls", "local_dimension",
    "_ratio",
)  # fmt: skip
RANK = "rank correlation over steps"
SIZE = "size |rho| of the rank correlation over steps"

S, GAP = SHARPNESS, "generalization_gap"
C, D, BOUND = "eq48_bc.rhs", "eq48_cd.rhs", "eq12.rhs"


def left_out(good: Any) -> str:
    """Return a note on the number of runs that have no finite value, or an empty string."""
    n = int((~good).sum())
    return f"{n} of {len(good)} runs left out: no finite value" if n else ""


def guarded(part: Callable[..., Iterator[Result]]) -> Callable[..., Iterator[Result]]:
    """Turn a FlatlensError of a part into an inconclusive result with its reason."""

    @wraps(part)
    def safe(self: ClaimTests, *names: str, **rule: Any) -> Iterator[Result]:
        try:
            yield from part(self, *names, **rule)
        except FlatlensError as error:
            yield self.result(
                ", ".join(names) or "-", "-", "-", NOTHING, note=f"{error}"[:-1], **rule
            )

    return safe


class ClaimTests:
    """Test one claim on the runs of one network.

    Args:
        claim: name of the claim, which is the name of the method that tests it.
        network: name of the family of runs.
        df: the records of that family.
        variants: columns that follow another definition of a quantity, tested beside it.
    """

    def __init__(
        self, claim: str, network: str, df: pd.DataFrame, variants: Mapping[str, str]
    ) -> None:
        self.claim, self.network, self.df, self.variants = claim, network, df, variants

    def test(self) -> list[Result]:
        """Return the results of all parts of the claim."""
        return list(guarded(type(self).__dict__[self.claim])(self))

    def result(
        self, part: str, scope: str, statistic: str, e: Interval, *, main: bool = True,
        note: str = "", **rule: Any,
    ) -> Result:  # fmt: skip
        """Return the result of one part, with the verdict on its interval."""
        known = not math.isnan(e.low)
        verdict = judge(e, **rule) if known else "inconclusive"
        if not known and not note:
            note = f"too few {'seeds' if e.units < e.n else 'runs'} for an interval"
        sign, bar = rule.get("sign", 1), rule.get("bar", 0.0)
        claimed = f"> {bar:g}" if sign > 0 else f"< {-bar + 0:g}"  # + 0: no minus before a zero
        return Result(
            self.claim, self.network, part, scope, statistic, claimed, e.value, e.low, e.high,
            e.effect, e.n, e.units, verdict, main, note,
        )  # fmt: skip

    def columns(self, *names: str) -> list[tuple[list[str], bool]]:
        """Return the columns as named (True), and again for each recorded variant (False)."""
        choices = [([*names], True)]
        for name, variant in self.variants.items():
            if name in names and variant in self.df:
                choices.append(([variant if n == name else n for n in names], False))
        run_table.require(self.df, [name for columns, _ in choices for name in columns])
        return choices

    # -- D1, D2: the end of training over learning rates or batch sizes

    def D1(self) -> Iterator[Result]:
        """A larger learning rate ends at lower sharpness, log volume, MLS and NMLS."""
        yield from self.slopes("lr", sign=-1)

    def D2(self) -> Iterator[Result]:
        """A smaller batch ends at lower sharpness, log volume, MLS and NMLS."""
        yield from self.slopes("batch_size", sign=1)

    def slopes(self, by: str, sign: int) -> Iterator[Result]:
        """Test the change of a logarithm per doubling: a straight line through the mean per value.

        Where the values share seeds, this is the mean over seeds of one line per seed.
        """
        ends = run_table.ends(self.df)
        last, name = run_table.arm(ends, by), run_table.arm_name(ends, by)
        values = np.sort(last[by].unique())
        u = np.log2(values.astype(float))
        shares = (u - u.mean()) / ((u - u.mean()) ** 2).sum()
        weights = dict(zip(values.tolist(), shares.tolist(), strict=True))
        scope = f"{by} {', '.join(map(str, values))}" + (f" at {name}" if name else "")
        for quantity in (S, "log_volume", "mls", "nmls"):
            for (column,), main in self.columns(quantity):
                y = logarithm(last, column)
                good = np.isfinite(y)
                finite = last.loc[good]
                e = combination(y[good], finite[by].tolist(), weights, run_table.seeds(finite))
                yield self.result(
                    f"{column} with {by}", scope, "change of log per doubling", e,
                    main=main, note=left_out(good), sign=sign, margin=SMALL_CHANGE,
                )  # fmt: skip

    # -- D3 to D6: over the steps of each run

    def D3(self) -> Iterator[Result]:
        """Sharpness, log volume and MLS fall after the loss is near zero."""
        for name in (S, "log_volume", "mls"):
            for (column,), main in self.columns(name):
                change = partial(late_change, column=column)
                rule: dict[str, Any] = {"sign": -1, "margin": SMALL_CHANGE}
                text = (f"late change of {column}", "change of log")
                yield from self.runs(*text, change, main=main, each=True, **rule)

    def D4(self) -> Iterator[Result]:
        """Late, sharpness does not fall noticeably, MLS and NMLS follow it, volume falls slower."""
        run_table.require(self.df, [S])
        change = partial(late_change, column=S)
        yield from self.runs(f"late change of {S}", "change of log", change, bar=-NOTICEABLE)
        for column in ("mls", "nmls"):
            follows = partial(over_steps, x=S, y=column)
            yield from self.runs(f"{column} with {S}", RANK, follows, rank=True, bar=FOLLOWS)
        for (column,), main in self.columns("log_volume"):
            falls = partial(late_change, column=column, start=0.5)
            rule: dict[str, Any] = {"sign": -1, "margin": SMALL_CHANGE}
            text = f"change of {column} in the second half"
            yield from self.runs(text, "change of log", falls, main=main, **rule)
            slower = partial(slowing, column=column)
            text = f"rate of {column}, second half minus before"
            yield from self.runs(text, "log per 1,000 steps", slower, main=main)

    def D5(self) -> Iterator[Result]:
        """Volume goes on falling after sharpness has levelled off."""
        run_table.require(self.df, [S])
        df, scope = self.df, "all configurations"
        if self.network.startswith("vgg") and "batch_size" in df:
            largest = df["batch_size"].max()  # the paper's is 32
            df, scope = df[df["batch_size"] == largest], f"batch size {largest}"
        for (column,), main in self.columns("log_volume"):
            falls = partial(change_once_level, column=column)
            rule: dict[str, Any] = {"sign": -1, "margin": SMALL_CHANGE}
            text = f"change of {column} while {S} is level"
            yield from self.runs(
                text, "change of log", falls, df=df, scope=scope, main=main, **rule
            )

    def D6(self) -> Iterator[Result]:
        """Local dimension falls with the loss, and is then not explained by sharpness."""
        early = partial(over_steps, x="train_loss", y="local_dimension", during="early")
        text = "local_dimension with train_loss, until it is near zero"
        yield from self.runs(text, RANK, early, rank=True, margin=SMALL_CORRELATION)
        late = partial(over_steps, x=S, y="local_dimension", during="late")
        text = f"local_dimension with {S}, afterwards"
        yield from self.runs(
            text, SIZE, lambda run: abs(late(run)), rank=True, sign=-1, bar=-FOLLOWS
        )

    def runs(
        self, part: str, statistic: str, number: Callable[[pd.DataFrame], float], *,
        df: pd.DataFrame | None = None, scope: str = "all configurations", main: bool = True,
        each: bool = False, rank: bool = False, **rule: Any,
    ) -> Iterator[Result]:  # fmt: skip
        """Test the mean over runs of one number per run.

        Args:
            part: name of the part.
            statistic: name of the number.
            number: function that returns the number of one run.
            df: the records to use, by default all.
            scope: name of these records.
            main: whether the part counts for the verdict.
            each: also give a result for every configuration alone.
            rank: the number is a rank correlation; its mean has an interval on Fisher's z.
            rule: further arguments of `judge`.
        """
        df = self.df if df is None else df
        runs = df.drop_duplicates("run")
        curves = df[[c for c in df if c in {*CURVES, *self.variants.values()}]]
        by_run = {name: number(run) for name, run in curves.groupby("run")}
        values = runs["run"].map(by_run).to_numpy(np.float64)
        good = np.isfinite(values)
        keys, seeds = (
            run_table.configurations(runs).to_numpy(),
            np.array(run_table.seeds(runs), object),
        )

        def mean(mine: Any) -> Interval:
            e = averaged(values[mine], keys[mine].tolist(), seeds[mine].tolist())
            return fisher(e) if rank else e

        n = int(good.sum())
        note = f"{n} of {len(runs)} runs have such a phase" if n < len(runs) else ""
        yield self.result(part, scope, statistic, mean(good), main=main, note=note, **rule)
        names = run_table.ordered(df)
        for name in names if each and len(names) > 1 else ():
            if (mine := good & (keys == name)).any():
                yield self.result(part, name, statistic, mean(mine), main=False, **rule)

    # -- T1 to T3: tightness of the bounds

    def T1(self) -> Iterator[Result]:
        """A <= B <= C <= D at every step."""
        chain = np.stack(self.chain())
        good = np.flatnonzero(~np.isnan(chain).any(axis=0))
        chain, df = chain[:, good], self.df.iloc[good]
        if df.empty:
            raise FlatlensError("Eq. 48 is not applicable to any record.")
        with np.errstate(invalid="ignore", divide="ignore"):
            ratios = np.fmin.reduce(chain[1:] / chain[:-1], axis=0)
        broken = ratios < 1 - TOLERANCE
        keys = run_table.configurations(df).tolist()
        units = [unit for units in strata(keys, run_table.seeds(df)) for unit in units]
        share, n = float(np.mean([broken[unit].any() for unit in units])), df["run"].nunique()
        least = float(np.nanmin(ratios))
        e = Interval(share, *wilson(share, len(units)), n, least, len(units))
        row = self.result(
            "records that break it (effect: least ratio of neighbours)", "every record",
            f"share of {'seeds' if len(units) < n else 'runs'} with such a record", e,
            note=f"{broken.sum()} of {len(df)} records break it",
        )  # fmt: skip
        verdict: ClaimVerdict = "not supported" if broken.any() else "supported"
        yield replace(row, claimed="0", verdict=verdict)

    def T2(self) -> Iterator[Result]:
        """The gap from C to D is larger than those from A to B and from B to C."""
        a, b, c, d = self.chain()
        with np.errstate(divide="ignore", invalid="ignore"):
            log_ratio = np.log(np.maximum(d - c, 0)) - np.log(np.maximum(b - a, c - b))
        df = self.df.assign(_ratio=log_ratio)
        yield from self.runs(
            "gap C to D over the larger of the others", "log of ratio, median over steps",
            lambda run: median(run["_ratio"].to_numpy()), df=df,
        )  # fmt: skip

    def chain(self) -> list[Array]:
        """Return A, B, C and D of Eq. 48 in every record."""
        names = ["eq48_ab.lhs", "eq48_ab.rhs", C, D]
        run_table.require(self.df, names)
        return [run_table.numbers(self.df, name) for name in names]

    def T3(self) -> Iterator[Result]:
        """C correlates positively with MLS, D negatively."""
        yield from self.correlates(C, "mls")
        yield from self.correlates(D, "mls", sign=-1)

    # -- C1 to C9: correlations over networks

    def C1(self) -> Iterator[Result]:
        """The bound (12) correlates positively with NMLS."""
        yield from self.correlates(BOUND, "nmls")

    def C2(self) -> Iterator[Result]:
        """NMLS, MLS and the bound correlate positively with the generalisation gap."""
        for name in ("nmls", "mls", BOUND):
            yield from self.correlates(name, GAP)

    def C3(self) -> Iterator[Result]:
        """Log volume correlates with sharpness and with MLS."""
        yield from self.correlates("log_volume", S)
        yield from self.correlates("log_volume", "mls")

    def C4(self) -> Iterator[Result]:
        """Sharpness correlates positively with the generalisation gap."""
        yield from self.correlates(S, GAP)

    def C5(self) -> Iterator[Result]:
        """MLS correlates positively with NMLS."""
        yield from self.correlates("mls", "nmls")

    def C6(self) -> Iterator[Result]:
        """MLS correlates more strongly with sharpness and test loss than log volume does."""
        for name in (S, "test_loss"):
            yield from self.stronger("mls", "log_volume", name)

    def C7(self) -> Iterator[Result]:
        """Local dimension correlates more weakly with sharpness than MLS and log volume do."""
        for name in ("mls", "log_volume"):
            yield from self.stronger(name, "local_dimension", S)

    def C8(self) -> Iterator[Result]:
        """D correlates negatively with MLS."""
        yield from self.correlates(D, "mls", sign=-1)

    def C9(self) -> Iterator[Result]:
        """Relative sharpness correlates weakly or negatively with the generalisation gap."""
        rule = {"sign": -1, "bar": -WEAK, "margin": 0.0}
        yield from self.correlates("relative_flatness", GAP, **rule)

    @guarded
    def correlates(self, x: str, y: str, **rule: Any) -> Iterator[Result]:
        """Test Pearson's r of two quantities at the end of training."""
        rule = {"margin": SMALL_CORRELATION, **rule}
        for columns, main in self.columns(x, y):
            text = (f"{columns[0]} with {columns[1]}", "Pearson r")
            yield from self.networks(*text, correlation, columns, main, **rule)

    @guarded
    def stronger(self, x: str, other: str, y: str) -> Iterator[Result]:
        """Test |r(x, y)| - |r(other, y)|."""

        def difference(a: Array, b: Array, c: Array) -> Array:
            return np.asarray(np.abs(correlation(a, c)) - np.abs(correlation(b, c)))

        for columns, main in self.columns(x, other, y):
            text = f"{columns[0]} more than {columns[1]}, with {columns[2]}"
            yield from self.networks(text, "difference of |r|", difference, columns, main)

    def networks(
        self, part: str, statistic: str, function: Callable[..., Array], columns: list[str],
        main: bool, **rule: Any,
    ) -> Iterator[Result]:  # fmt: skip
        """Test a statistic over the ends of all runs: pooled, and within configurations."""
        last = run_table.ends(self.df)
        values = np.stack([run_table.numbers(last, name) for name in columns])
        good = np.asarray(np.isfinite(values).all(axis=0))
        values, last, note = values[:, good], last.loc[good], left_out(good)
        groups, seeds = run_table.configurations(last).tolist(), run_table.seeds(last)
        if len(groups) < FEWEST_NETWORKS:
            note = f"a correlation needs {FEWEST_NETWORKS} runs, there are {len(groups)}"
            yield self.result(part, "pooled", statistic, NOTHING, main=main, note=note, **rule)
            return
        estimate = jackknife_correlation if function is correlation else _difference
        pooled = estimate(lambda chosen: function(*values[:, chosen]), groups, seeds)
        counts = pd.Series(groups, dtype=object).value_counts()
        if len(counts) < 2 or counts.min() < FEWEST_SEEDS_WITHIN:
            yield self.result(part, "pooled", statistic, pooled, main=main, note=note, **rule)
            return

        def within(chosen: Index) -> Array:
            return function(*centred(values[:, chosen], [groups[row] for row in chosen]))

        inside = estimate(within, groups, seeds)
        sides = [judge(e, **rule) for e in (pooled, inside)]
        if set(sides) == {"supported", "not supported"}:
            note = "; ".join([*([note] if note else []), f"within configurations: {sides[1]}"])
        yield self.result(part, "pooled", statistic, pooled, main=main, note=note, **rule)
        yield self.result(part, "within configurations", statistic, inside, main=False, **rule)


def _difference(*arguments: Any) -> Interval:
    """Return the interval of a difference of two correlations, which lies between -1 and 1."""
    e = jackknife(*arguments)
    return replace(e, low=max(e.low, -1.0), high=min(e.high, 1.0))
