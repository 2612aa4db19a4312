"""Records in a CSV file."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flatlens.arguments import no_type_check
from flatlens.errors import FlatlensError


class CSV:
    """Write each record as a line of a CSV file; numbers read back bit for bit.

    The header grows when a record has a new name. In a file that exists already, lines from the
    first new step on are replaced.

    Args:
        path: the file; folders are created as needed.

    Raises:
        FlatlensError: if ``path`` is neither a string nor a path.

    Example:
        >>> import tempfile
        >>> sink = CSV(tempfile.mkdtemp() + "/a.csv")
        >>> sink.write({"step": 0, "sharpness": 2.5})
        >>> sink.path.read_text().splitlines()
        ['step,sharpness', '0,2.5']
    """

    @no_type_check
    def __init__(self, path: str | Path) -> None:
        if not isinstance(path, (str, Path)):
            raise FlatlensError(f"path={path!r} is not a path; give CSV('file.csv')")
        self.path = Path(path)
        self.columns: list[str] | None = None

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one line; a new name rewrites the file under a longer header."""
        if self.columns is None or not record.keys() <= set(self.columns):
            self._begin(record)
        with self.path.open("a", newline="") as file:
            csv.DictWriter(file, self.columns or []).writerow(record)

    def _begin(self, record: Mapping[str, Any]) -> None:
        """Rewrite the lines before ``record`` under a header that has all its names."""
        earlier_lines: list[dict[str, str]] = []
        if self.path.exists():
            with self.path.open(newline="") as file:
                # A line without an end was cut short when its writer was killed.
                complete_lines = [line for line in file if line.endswith("\n")]
            reader = csv.DictReader(complete_lines)
            self.columns = list(reader.fieldnames or [])
            earlier_lines = [line for line in reader if float(line["step"]) < record["step"]]
        self.columns = list(dict.fromkeys([*(self.columns or []), *record]))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_name(f".{self.path.name}.new")
        with temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, self.columns)
            writer.writeheader()
            writer.writerows(earlier_lines)
        temporary.replace(self.path)

    def close(self) -> None:
        """Do nothing: every line is in the file already."""
