"""Records in a TensorBoard log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flatlens.arguments import no_type_check
from flatlens.errors import FlatlensError
from flatlens.track.sinks.base import PREFIX, Selection, need


class TensorBoard:
    """Write scalars to a TensorBoard log, which stores them in single precision.

    Args:
        log_dir: folder of the log.
        names: which values of a record, see ``Selection``.
        prefix: put in front of every name.

    Raises:
        FlatlensError: if TensorBoard is not installed, or an argument has the wrong type.

    Example:
        >>> sink = TensorBoard("logs/a")  # doctest: +SKIP
        >>> fl.Tracker(net, x, sinks=[sink])  # doctest: +SKIP
    """

    @no_type_check
    def __init__(
        self,
        log_dir: str | Path,
        *,
        names: str | Sequence[str] = "headline",
        prefix: str = PREFIX,
    ) -> None:
        need("tensorboard", "tensorboard")
        if not isinstance(log_dir, (str, Path)):
            raise FlatlensError(f"log_dir={log_dir!r} is not a path; give TensorBoard('logs')")
        self.log_dir = Path(log_dir)
        self.select = Selection(names, prefix)
        self.writer: Any = None

    def write(self, record: Mapping[str, Any]) -> None:
        """Add one scalar for every selected value."""
        if self.writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(self.log_dir)
        for name, value in self.select(record).items():
            self.writer.add_scalar(name, value, record["step"])
        self.writer.flush()

    def close(self) -> None:
        """Close the log."""
        if self.writer is not None:
            self.writer.close()
