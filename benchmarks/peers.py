"""Compare flatlens with other packages on the same numbers: time, memory and value of each.

    python benchmarks/peers.py --plan default --json peers.jsonl           # about 30 minutes
    python benchmarks/peers.py --plan default --json peers.jsonl --append  # go on where it stopped
    python benchmarks/peers.py --cases a --models mlp --outputs 10 --samples 100 --threads 1 2
    python benchmarks/tables.py peers.jsonl                                # docs/benchmarks.md

Every side of a cell has its own process, and the others wait while it works. Repeats are taken in
turn, and the peak of memory belongs to that side alone. Each side works at its fastest batch size
(1, 5, 20 or 100 samples), which another process finds beforehand; flatlens uses its default chunks.
A side that is too slow for its share of the time works on fewer samples (`ran`), and its time is
scaled up. A side that fails is a line of text. A side with a wrong value is not ranked. Values are
compared with the loop's, or with those of flatlens if the loop took fewer samples.
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
    """Return the network and the function to time: of (batch) or of (products, seed)."""
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
    """Run a tiny network first, so that loading of libraries at the first call is not timed."""
    tiny = Cell(cell.case, "mlp-8x1", 2, 2, cell.threads)
    _, run = made(tiny, side, 2, 2**30)
    if side in sides.ESTIMATES:
        run(3, 0)
    else:
        run(2)


def tried(cell: Cell, side: str, budget: float) -> Iterator[tuple[int, float]]:
    """Yield batch sizes and their seconds per sample, until larger batches are not faster."""
    torch.set_num_threads(cell.threads)
    most, best = min(cell.samples, LADDER[-1]), math.inf
    ladder = [*(b for b in LADDER if b < most), most]
    for batch in ladder[:1] if side == "loop" else ladder:
        try:
            _, run = made(cell, side, batch)
            spent = core.seconds(partial(run, batch))
            if spent < budget / 20:  # cheap enough for a second, warm call
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
    """Return the fastest batch size that another process finds, and its seconds per sample.

    The process has `TUNING` budgets. The time of a larger batch is not predicted: the next call may
    take at least three times as long as the last one, within a third of the limit.
    """
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
    """One side of a cell in this process; a call returns its time, value and peak of memory."""

    def __init__(
        self, cell: Cell, side: str, ran: int, batch: int, memory: int | None = None
    ) -> None:
        self.model, self.run = made(cell, side, ran, memory)
        self.ran, self.batch, self.calls = ran, batch, 0
        self.generator = torch.Generator().manual_seed(2)

    def __call__(self, *arguments: int) -> Record:
        if self.calls and not arguments:  # all seeds of an estimator use the same network
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
    """Reset VmHWM (Linux), so that importing and building do not count."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def one_line(error: BaseException) -> str:
    """Return the type and first line of an error, without paths of this machine."""
    text = next(iter(str(error).strip().splitlines()), "")
    text = re.sub(r"(/[\w.@+-]+){2,}", "...", text)
    text = re.sub(r"\[enforce fail at [^]]*\] (err == 0\. )?", "", text)
    return f"{type(error).__name__}: {text}"[:160]


# ------------------------------------------------------------------ processes


def share(cell: Cell, side: str, options: argparse.Namespace) -> tuple[int, int]:
    """Return how many samples this side runs, and how many at a time."""
    n = min(cell.samples, MOST)
    if side.startswith("flatlens") or side in sides.ESTIMATES:
        return n, n  # in its own chunks, never scaled down: its cost has a part that is not of n
    batch, spent = tuned(cell, side, options)
    batches = int(options.budget / (options.repeats + 1) / spent / batch)
    ran = min(n, max(batches, 1) * batch)
    return ran, min(batch, ran)


def answer(pipe: Any, work: Callable[[], Iterator[Any]], limit: float) -> None:
    """Send the results one by one, and None at the end."""
    signal.alarm(math.ceil(2 * limit))  # ends this process even if its parent has died
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
    """An error of another process, as one line."""


def serve(pipe: Any, cell: Cell, side: str, memory: int | None, options: Any) -> None:
    """Serve a side in its process: prepare it, then call it for every request."""
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
    """A side in its own process, forked from one that has loaded only torch."""

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
    """The interface of ``Process`` in this process, with whole batches, for tests."""

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
        """Call all sides in turn; repeat 0 is a first call for memory and value."""
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
    """Whether another call would exceed two budgets; a second call is always allowed."""
    spent = [wall for wall in walls if wall is not None]
    total = sum(spent)
    return total > 2 * budget or (len(spent) > 1 and total * (1 + 1 / len(spent)) > 2 * budget)


def measured(cell: Cell, names: Sequence[str], options: argparse.Namespace) -> Record:
    """Measure one cell and return its record for the file."""
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
    """Add flatlens once more, limited to the memory of the peer that needs least."""
    race.enter("flatlens_within", memory)
    race.turns(["flatlens_within"], range(1))
    race.sides["flatlens_within"]["memory_mib"] = memory / 2**20
    compare(race.sides)


def shortened(found: dict[str, Record]) -> None:
    """Shorten a result for the file: means instead of lists, and only S of the whole set."""
    for side in found.values():
        if isinstance(value := side.get("value"), dict):
            value = value["sharpness"]
        if value is not None:
            side["value"] = mean(value, side["ran"])


def compare(found: dict[str, Record]) -> None:
    """Add `difference`, the relative error of each value, and `against`, the side it is compared
    with.

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
    """Return the number of samples that both values cover, or 0; a mean covers all its samples."""
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
    if mine == theirs:  # both 0 or -inf: volumes of deficient rank
        return 0.0
    return abs(theirs / mine - 1) if math.isfinite(theirs) and mine else math.inf


def mean(value: Any, n: int) -> float:
    return sum(value[:n]) / len(value[:n]) if isinstance(value, list) else float(value)


def climb(race: Race, record: Record) -> None:
    """Run estimators with more and more products, until 1 % error or until the time is up."""
    race.turns(["floor", "exact"], range(race.options.repeats + 1))
    if "exact" not in race.workers:  # the error is in the record
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
    """Call an estimator once and add the result to its last rung."""
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
    """Return the commit of this tree, if it is in git."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def processor() -> str:
    """Return the name of the processor, or at least its architecture."""
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
    """Return the cells of a plan or of a product of options, in their order."""
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
    """Format one cell for a terminal: each side with its ratio to the floor, peak and error."""
    lines = []
    for name, side in record["sides"].items():
        if "error" in side:
            lines.append(f"  {name:24} {side['error']}")
        elif side.get("rungs"):
            spent = cells.seconds_to(cells.curve(record, name))
            lines.append(f"  {name:24} {spent:9.3g} s to 1 %, {side['peak_mib']:.0f} MiB")
        else:
            flag = "" if cells.sound(side) else f", WRONG by {side['difference']:.2g}"
            over = cells.ratio(side, record["sides"]["floor"])
            scaled = f", ran {side['ran']}" if side["ran"] < record["cell"]["samples"] else ""
            lines.append(
                f"  {name:24} {cells.seconds(record, name):9.3g} s, {over:.2f} floors, "
                f"{side['peak_mib']:.0f} MiB, batch {side['batch']}{scaled}{flag}"
            )
    return "\n".join(lines)


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
