"""Other packages on the same numbers: time, memory and value of each, beside flatlens.

    python benchmarks/peers.py --plan default --json peers.jsonl           # about 30 minutes
    python benchmarks/peers.py --plan default --json peers.jsonl --append  # go on where it stopped
    python benchmarks/peers.py --cases a --models mlp --outputs 10 --samples 100 --threads 1 2
    python benchmarks/tables.py peers.jsonl                                # docs/benchmarks.md

Every side of a cell has a process of its own, and all of them wait while one works: repeats are
taken in turn, and the peak of memory is that side's alone. Each works at its fastest batch size
(1, 5, 20 or 100 samples; flatlens in its default chunks), found beforehand in another process.
A side that is too slow for its share of the time works on fewer samples, and its time is scaled
up (`ran` says how many). One that fails is a line of text; one that is wrong is not ranked: values
are compared with the loop's, or with those of flatlens where the loop took fewer samples.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import itertools
import math
import multiprocessing
import os
import platform
import re
import resource
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import assemblies
import cells
import core
import sides
import torch
from cells import Cell, Record

LADDER = (1, 5, 20, 100)  # samples at a time
TUNING = 3  # budgets to find the fastest of them
MOST = 1000  # samples that are run; more are scaled
RUNGS = (3, 12, 48, 192)  # products of an estimator; Hutch++ wants thirds
REFERENCES = ("loop", "jacrev", "jacrev+autograd")
SEEDS, FEWEST = 20, 5  # where time is short
LIBRARIES = (
    *("torch", "backpack-for-pytorch", "opacus", "nngeometry", "asdfghjkl"),
    *("curvlinops-for-pytorch", "hessian-eigenthings", "PyHessian"),
)

# ------------------------------------------------------------------ one side


def made(
    cell: Cell, side: str, n: int, memory: int | None = None
) -> tuple[Any, Callable[..., Any]]:
    """The network and what is timed on it: a function of (batch) or of (products, seed)."""
    torch.manual_seed(0)
    model, x = sides.network(cell.model, cell.outputs).eval(), sides.images(cell.model, n)
    if side in sides.ESTIMATES:
        estimate = sides.ESTIMATES[side](model, x)
        return model, lambda products, seed: estimate(products, seed)
    if side == "flatlens_within":
        run = sides.flatlens_within(model, memory or 0)
    else:
        in_set = cell.case in assemblies.EXTENTS
        run = (assemblies.whole_sides(cell.case) if in_set else sides.EXACT)[side](model)
    return model, lambda batch: run(x, batch)


def warmed(cell: Cell, side: str) -> None:
    """A tiny network first: what torch or a library loads at its first call is not the side's."""
    tiny = Cell(cell.case, "mlp-8x1", 2, 2, cell.threads)
    _, run = made(tiny, side, 2, 2**30)
    if side in sides.ESTIMATES:
        run(3, 0)
    else:
        run(2)


def tried(cell: Cell, side: str, budget: float) -> Iterator[tuple[int, float]]:
    """Batch sizes and seconds per sample, until larger ones do not pay."""
    torch.set_num_threads(cell.threads)
    most, best = min(cell.samples, LADDER[-1]), math.inf
    ladder = [*(b for b in LADDER if b < most), most]
    for batch in ladder[:1] if side == "loop" else ladder:
        try:
            _, run = made(cell, side, batch)
            spent = core.seconds(partial(run, batch))
            if spent < budget / 20:  # cheap enough for a look that is warm
                spent = min(spent, core.seconds(partial(run, batch)))
        except (RuntimeError, MemoryError):
            if best < math.inf:
                return
            raise
        yield batch, spent / batch
        if spent / batch > 1.2 * best or (spent > budget and spent / batch > best):
            return
        best = min(best, spent / batch)


def tuned(cell: Cell, side: str, options: argparse.Namespace) -> tuple[int, float]:
    """The fastest batch size, and seconds per sample at it, of those that another process got
    through in `TUNING` budgets. How a call grows with its batch is not guessed beforehand: the
    next one has at least three times as long as the last, within a third of the limit."""
    pipe, far = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(
        target=answer, args=(far, partial(tried, cell, side, options.budget), options.limit)
    )
    process.start()
    far.close()
    start, found, wait = time.perf_counter(), [], options.limit
    until = lambda seconds: start + seconds - time.perf_counter()  # noqa: E731
    try:
        while (reply := received(pipe, wait)) is not None:
            found.append(reply)
            longer = min(3 * math.prod(reply), until(options.limit / 3))
            wait = max(until(TUNING * options.budget), longer, 0.0)
    except (TimeoutError, MemoryError, FailedError):
        if not found:
            raise
    finally:
        process.kill()
        process.join()
    return min(found, key=lambda reply: reply[1])


class Timed:
    """One side of a cell in this process; a call gives its time, value and peak of memory."""

    def __init__(
        self, cell: Cell, side: str, ran: int, batch: int, memory: int | None = None
    ) -> None:
        self.model, self.run = made(cell, side, ran, memory)
        self.ran, self.batch, self.calls = ran, batch, 0
        self.generator = torch.Generator().manual_seed(2)

    def __call__(self, *arguments: int) -> Record:
        if self.calls and not arguments:  # an estimator's seeds are all of one network
            core.nudge(self.model, self.generator)
        self.calls += 1
        forget_peak()
        before, cpu = core.resident_kib("VmRSS"), time.process_time()
        start = time.perf_counter()
        value = self.run(*(arguments or (self.batch,)))
        wall, cpu = time.perf_counter() - start, time.process_time() - cpu
        peak = (core.resident_kib("VmHWM") - before) / 1024
        return {"wall": wall, "cpu": cpu, "peak_mib": max(peak, 0.0), "value": value}


def forget_peak() -> None:
    """Linux: VmHWM starts anew, so that importing and building do not count."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def one_line(error: BaseException) -> str:
    """Kind and first line of an error, without paths of this machine."""
    text = next(iter(str(error).strip().splitlines()), "")
    text = re.sub(r"(/[\w.@+-]+){2,}", "...", text)
    text = re.sub(r"\[enforce fail at [^]]*\] (err == 0\. )?", "", text)
    return f"{type(error).__name__}: {text}"[:160]


# ------------------------------------------------------------------ processes


def share(cell: Cell, side: str, options: argparse.Namespace) -> tuple[int, int]:
    """How many samples this side runs, and how many at a time."""
    n = min(cell.samples, MOST)
    if side.startswith("flatlens") or side in sides.ESTIMATES:
        return n, n  # in its own chunks, never scaled down: its cost has a part that is not of n
    batch, spent = tuned(cell, side, options)
    batches = int(options.budget / (options.repeats + 1) / spent / batch)
    ran = min(n, max(batches, 1) * batch)
    return ran, min(batch, ran)


def answer(pipe: Any, work: Callable[[], Iterator[Any]], limit: float) -> None:
    """Sends what there is, one by one, and None at the end."""
    signal.alarm(math.ceil(2 * limit))  # ends this process even if its parent is gone
    try:
        for found in work():
            pipe.send(found)
        pipe.send(None)
    except Exception as error:
        pipe.send({"error": one_line(error)})


def received(pipe: Any, limit: float) -> Any:
    """The reply of a process, or a RuntimeError that says why there is none."""
    if not pipe.poll(limit):
        raise TimeoutError(f"not done after {limit:g} s")
    try:
        reply = pipe.recv()
    except EOFError:
        raise MemoryError("the process was killed, most likely for its memory") from None
    if isinstance(reply, dict) and "error" in reply:
        raise FailedError(reply["error"])
    return reply


class FailedError(Exception):
    """An error of another process, already one line."""


def serve(pipe: Any, cell: Cell, side: str, memory: int | None, options: Any) -> None:
    """The life of a side's process: get ready, then a call for every request."""
    warnings.simplefilter("ignore")
    limit = int(options.memory * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    torch.set_num_threads(1)  # a process with a pool of threads cannot be forked
    try:
        warmed(cell, side)
        ran, batch = share(cell, side, options)
        torch.set_num_threads(cell.threads)
        timed = Timed(cell, side, ran, batch, memory)
        pipe.send({"ran": ran, "batch": batch})
        while (request := pipe.recv()) is not None:
            gc.collect()
            pipe.send(timed(*request))
    except FailedError as error:
        pipe.send({"error": str(error)})
    except Exception as error:
        pipe.send({"error": one_line(error)})


class Process:
    """A side in a process of its own, forked from one that has loaded torch and nothing else."""

    def __init__(
        self, cell: Cell, side: str, options: argparse.Namespace, memory: int | None = None
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["assemblies"])
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # where the server looks for it
        self.limit = options.limit
        self.pipe, far = multiprocessing.Pipe()
        arguments = (far, cell, side, memory, options)
        self.process = context.Process(target=serve, args=arguments)
        self.process.start()
        far.close()
        try:
            self.ready = received(self.pipe, 3 * options.limit)
        except BaseException:
            self.close()
            raise

    def __call__(self, *arguments: int) -> Record:
        self.pipe.send(arguments)
        reply: Record = received(self.pipe, self.limit)
        return reply

    def close(self) -> None:
        self.process.kill()
        self.process.join()


class Here:
    """The same interface in this process, whole batches: for tests and a first look."""

    def __init__(
        self, cell: Cell, side: str, options: argparse.Namespace, memory: int | None = None
    ) -> None:
        self.ready = {"ran": cell.samples, "batch": cell.samples}
        warmed(cell, side)
        self.timed = Timed(cell, side, cell.samples, cell.samples, memory)

    def __call__(self, *arguments: int) -> Record:
        return self.timed(*arguments)

    def close(self) -> None:
        pass


# ------------------------------------------------------------------ one cell


class Race:
    """The sides of one cell, called in turn."""

    def __init__(self, cell: Cell, options: argparse.Namespace) -> None:
        self.cell, self.options = cell, options
        self.workers: dict[str, Any] = {}
        self.sides: dict[str, Record] = {}

    def enter(self, name: str, memory: int | None = None) -> None:
        of_exact = {"exact": "flatlens"}.get(name, name)
        start = Here if self.options.here else Process
        try:
            worker = start(self.cell, of_exact, self.options, memory)
        except Exception as error:
            self.fail(name, error)
        else:
            self.workers[name] = worker
            empty: Record = {"wall": [], "cpu": [], "peak_mib": 0.0}
            self.sides[name] = {**worker.ready, **empty}

    def fail(self, name: str, error: BaseException) -> None:
        text = str(error) if isinstance(error, FailedError) else one_line(error)
        self.sides[name] = {"error": text}
        if name in self.workers:
            self.workers.pop(name).close()

    def call(self, name: str, *arguments: int) -> Record | None:
        try:
            reply: Record = self.workers[name](*arguments)
        except Exception as error:
            self.fail(name, error)
            return None
        return reply

    def turns(self, names: Sequence[str], repeats: range) -> None:
        """Repeat 0 is a first call for memory and value; the order rotates."""
        for repeat in repeats:
            start = repeat % len(names)
            for name in (*names[start:], *names[:start]):
                if name not in self.workers:
                    continue
                side = self.sides[name]
                reply = None if enough(side["wall"], self.options.budget) else self.call(name)
                if name not in self.workers:
                    continue
                side["wall"].append(reply and reply["wall"])
                side["cpu"].append(reply and reply["cpu"])
                if repeat == 0 and reply:
                    side["peak_mib"], side["value"] = reply["peak_mib"], reply["value"]

    def close(self) -> None:
        for name in list(self.workers):
            self.workers.pop(name).close()


def enough(walls: Sequence[float | None], budget: float) -> bool:
    """Another call would not fit into two budgets. A second one may, for the first one is cold."""
    spent = [wall for wall in walls if wall is not None]
    total = sum(spent)
    return total > 2 * budget or (len(spent) > 1 and total * (1 + 1 / len(spent)) > 2 * budget)


def measured(cell: Cell, names: Sequence[str], options: argparse.Namespace) -> Record:
    """One cell: the record that goes into the file."""
    race = Race(cell, options)
    record: Record = {"cell": cells.as_json(cell), "facts": facts(options), "sides": race.sides}
    try:
        for name in names:
            race.enter(name)
        if cell.case == "b":
            climb(race, record)
        else:
            race.turns(names, range(1))
            compare(race.sides)
            least = cells.thriftiest(record)
            if cell.case == "a" and least and "flatlens" in names:
                within(race, int(max(race.sides[least]["peak_mib"], 1.0) * 2**20))
            race.turns(list(race.sides), range(1, options.repeats + 1))
            shortened(race.sides)
    finally:
        race.close()
    return record


def within(race: Race, memory: int) -> None:
    """flatlens joins once more, held to the memory of the thriftiest peer."""
    race.enter("flatlens_within", memory)
    race.turns(["flatlens_within"], range(1))
    race.sides["flatlens_within"]["memory_mib"] = memory / 2**20
    compare(race.sides)


def shortened(found: dict[str, Record]) -> None:
    """Means in place of lists, S alone of the whole set: what a file should keep."""
    for side in found.values():
        if isinstance(value := side.get("value"), dict):
            value = value["sharpness"]
        if value is not None:
            side["value"] = mean(value, side["ran"])


def compare(found: dict[str, Record]) -> None:
    """Adds `difference` of each value, over the same samples, and `against`: whose it is from.

    That is the first of `REFERENCES` that ran (plain autograd, right by definition) where the
    samples are the same. Other values are compared with those of flatlens, which knows every
    sample's. `against` is None for the reference, and for flatlens where there is none.
    """
    have = {name: side for name, side in found.items() if side.get("value") is not None}
    reference = next((name for name in REFERENCES if name in have), None)
    for name, side in have.items():
        side["against"] = None
        for other in (reference, "flatlens"):
            if reference != name != other and other in have and (n := common(side, have[other])):
                equal = side["ran"] == have[other]["ran"]
                side["difference"] = difference(side["value"], have[other]["value"], n, equal)
                side["against"] = other
                break


def common(one: Record, other: Record) -> int:
    """Samples that both values can be taken over, 0 if there are none: a mean has all it ran."""
    n = min(one["ran"], other["ran"])
    means = [side["ran"] for side in (one, other) if not per_sample(side["value"])]
    return n if all(ran == n for ran in means) else 0


def per_sample(value: Any) -> bool:
    return isinstance(next(iter(value.values())) if isinstance(value, dict) else value, list)


def difference(value: Any, reference: Any, n: int, equal: bool = True) -> float:
    """The largest relative difference; lists are per sample.

    A bound is no mean over samples: it is compared where both took equal samples. It has a proven
    upper end of each norm here and an eigenvalue or an iteration's value there, which may differ by
    a hundred times more.
    """
    if isinstance(reference, dict):
        keys = [k for k in reference if k in value and (equal or not k.startswith("eq"))]
        return max(
            difference(value[k], reference[k], n) / (100 if k.startswith("eq") else 1) for k in keys
        )
    mine, theirs = mean(reference, n), mean(value, n)
    if mine == theirs:  # 0 or -inf, volumes where a rank is missing
        return 0.0
    return abs(theirs / mine - 1) if math.isfinite(theirs) and mine else math.inf


def mean(value: Any, n: int) -> float:
    return sum(value[:n]) / len(value[:n]) if isinstance(value, list) else float(value)


def climb(race: Race, record: Record) -> None:
    """Estimators with more and more products, for all seeds, until 1 % or until time is up."""
    race.turns(["floor", "exact"], range(race.options.repeats + 1))
    if "exact" not in race.workers:  # its error is in the record
        return
    record["truth"] = mean(race.sides["exact"].pop("value"), race.cell.samples)
    climbing = {name: race.options.seeds for name in race.workers if name in sides.ESTIMATES}
    for products, following in itertools.zip_longest(RUNGS, RUNGS[1:]):
        for name in climbing:
            rung: Record = {"products": products, "values": [], "wall": [], "cpu": []}
            race.sides[name].setdefault("rungs", []).append(rung)
        for seed in range(race.options.seeds):
            for name, seeds in climbing.items():
                if seed < seeds and name in race.workers:
                    estimated(race, name, products, seed)
        climbing = {
            name: seeds
            for name in climbing
            if name in race.workers
            and following
            and (seeds := affordable(record, name, following, race.options))
        }


def estimated(race: Race, name: str, products: int, seed: int) -> None:
    """One call of an estimator, added to its last rung."""
    reply = race.call(name, products, seed)
    if reply is None:
        return
    side = race.sides[name]
    side["rungs"][-1]["values"].append(reply["value"])
    for clock in ("wall", "cpu"):
        side["rungs"][-1][clock].append(reply[clock])
    side["peak_mib"] = max(side["peak_mib"], reply["peak_mib"])


def affordable(record: Record, name: str, products: int, options: argparse.Namespace) -> int:
    """Seeds that fit into two budgets with so many products; 0 if few, or if it is there."""
    before, error, spent = cells.curve(record, name)[-1]
    if error <= cells.WITHIN:
        return 0
    seeds = int(2 * options.budget / (spent * products / before))
    return min(seeds, options.seeds) if seeds >= FEWEST else 0


# ------------------------------------------------------------------ command line


def facts(options: argparse.Namespace) -> dict[str, Any]:
    versions = {}
    for library in LIBRARIES:
        try:
            versions[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            versions[library] = "absent"
    return {
        "versions": versions,
        "python": platform.python_version(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
        "repeats": options.repeats,
        "budget": options.budget,
    }


def commit() -> str:
    """Of this tree, where git knows it."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def processor() -> str:
    """The name of the processor, or at least its architecture."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.machine()
    found = re.search(r"model name\s*: (.*)", text)
    return found[1].strip() if found else platform.machine()


def sides_of(cell: Cell, wanted: Sequence[str] | None) -> list[str]:
    every = {
        "a": list(sides.EXACT),
        "b": ["floor", "exact", *sides.ESTIMATES],
        **{case: list(assemblies.whole_sides(case)) for case in assemblies.EXTENTS},
    }[cell.case]
    always = ("floor", "exact")
    return [s for s in every if wanted is None or s in wanted or s in always]


def chosen(options: argparse.Namespace) -> list[Cell]:
    """The cells of a plan or of a product of options, in their order."""
    if options.plan:
        plan = cells.PLANS[options.plan]
        return [cell for cell in plan if options.cases is None or cell.case in options.cases]
    cases = options.cases or ["a"]
    sizes = (cases, options.models, options.outputs, options.samples, options.threads)
    return [Cell(*choice) for choice in itertools.product(*sizes)]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="flatlens beside other packages.")
    parser.add_argument("--plan", choices=list(cells.PLANS), help="a list of cells: see README.md")
    parser.add_argument(
        "--cases", nargs="+", choices=["a", "b", *assemblies.EXTENTS],
        help="a without a plan; all of the plan otherwise",
    )  # fmt: skip
    parser.add_argument("--models", nargs="+", default=["mlp"], help="|".join(sides.NETWORKS))
    parser.add_argument("--outputs", nargs="+", type=int, default=[10])
    parser.add_argument("--samples", nargs="+", type=int, default=[100])
    parser.add_argument("--threads", nargs="+", type=int, default=[1])
    parser.add_argument("--sides", nargs="+", help="only these (floor is always there)")
    parser.add_argument("--repeats", type=int, default=3, help="after the first call")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="of estimators")
    parser.add_argument("--budget", type=float, default=3.0, help="seconds of a side in a cell")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of any one call")
    parser.add_argument("--memory", type=float, default=10.0, help="GiB that a side may take")
    parser.add_argument("--json", type=Path, metavar="FILE", help="finished cells, one a line")
    parser.add_argument("--append", action="store_true", help="go on with FILE, skip what is there")
    parser.add_argument("--here", action="store_true", help="no processes, no limits: a first look")
    options = parser.parse_args(arguments)
    if options.json and options.json.exists() and not options.append:
        parser.error(f"{options.json} exists; --append goes on with it")
    if options.plan == "growth" and options.sides is None:
        options.sides = list(cells.GROWTH_SIDES)
    return options


def line(record: Record) -> str:
    """One cell in a terminal: a side and its ratio to the floor, its peak, what went wrong."""
    told = []
    for name, side in record["sides"].items():
        if "error" in side:
            told.append(f"  {name:24} {side['error']}")
        elif side.get("rungs"):
            spent = cells.seconds_to(cells.curve(record, name))
            told.append(f"  {name:24} {spent:9.3g} s to 1 %, {side['peak_mib']:.0f} MiB")
        else:
            flag = "" if cells.sound(side) else f", WRONG by {side['difference']:.2g}"
            over = cells.ratio(side, record["sides"]["floor"])
            scaled = f", ran {side['ran']}" if side["ran"] < record["cell"]["samples"] else ""
            told.append(
                f"  {name:24} {cells.seconds(record, name):9.3g} s, {over:.2f} floors, "
                f"{side['peak_mib']:.0f} MiB, batch {side['batch']}{scaled}{flag}"
            )
    return "\n".join(told)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    done = cells.read(options.json) if options.json else {}
    todo = [cell for cell in chosen(options) if cell not in done]
    began = time.perf_counter()
    for count, cell in enumerate(todo, 1):
        start = time.perf_counter()
        record = measured(cell, sides_of(cell, options.sides), options)
        record["spent"] = time.perf_counter() - start
        if options.json:
            cells.append(options.json, record)
        print(f"{count}/{len(todo)} {cell} ({record['spent']:.0f} s)\n{line(record)}", flush=True)
    print(f"{len(todo)} cells in {(time.perf_counter() - began) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
