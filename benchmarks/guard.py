"""Check whether flatlens needs more time or memory than the committed run; exit code 1 if so.

    python benchmarks/guard.py                        # runs the guard plan, then compares
    python benchmarks/guard.py peers.jsonl --margin 0.3

It compares ratios within one run, never times: flatlens over the floor, and flatlens over the
fastest peer of the same cell. Peaks of memory are compared directly, from 16 MiB on. A ratio that
grew by more than the margin (a quarter) fails, and so does a missing ratio. Run it by hand on a
quiet machine, because on a busy one ratios vary by more than the margin.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import cells
from cells import Record

COMMITTED = Path(__file__).with_name("committed.jsonl")
MARGIN = 0.25
SMALL = 16.0  # MiB; below it the peak is torch's and the allocator's


def compared(record: Record) -> dict[str, float]:
    """Return the numbers that must not grow: ratios of time, and the peak."""
    found = {k: v for k, v in cells.ratios(record).items() if not k.endswith("memory")}
    side = record["sides"].get("flatlens", {})
    if "peak_mib" in side:
        found["peak MiB"] = max(side["peak_mib"], SMALL)
    return found


def worse(old: Record, new: Record, margin: float) -> Iterator[tuple[str, float, float | None]]:
    """Return (name, before, now) of everything beyond the margin."""
    now = compared(new)
    for name, before in compared(old).items():
        if name not in now or now[name] > before * (1 + margin):
            yield name, before, now.get(name)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Ratios against the committed ones.")
    parser.add_argument("file", nargs="?", type=Path, help="finished cells of peers.py")
    parser.add_argument("--committed", type=Path, default=COMMITTED)
    parser.add_argument("--margin", type=float, default=MARGIN, help="0.25: a quarter more fails")
    options = parser.parse_args(arguments)
    old = cells.read(options.committed)
    if options.file is None:
        import peers

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "guard.jsonl"
            peers.main(["--plan", "guard", "--json", str(path)])
            new = cells.read(path)
    else:
        new = cells.read(options.file)
    common = [cell for cell in new if cell in old]
    if not common:
        print("no cell is in both files", file=sys.stderr)
        return 2
    failed = 0
    for cell in common:
        found = list(worse(old[cell], new[cell], options.margin))
        failed += bool(found)
        print(f"{'worse' if found else 'ok':6}{cell}")
        for name, before, now in found:
            print(f"      {name}: {before:.2f}, now {'missing' if now is None else f'{now:.2f}'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
