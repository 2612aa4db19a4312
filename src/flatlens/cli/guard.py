"""Turn every error of a command into one sentence and an exit code."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from flatlens.cli.exit_codes import BAD_INPUT, FAILED, INTERRUPTED
from flatlens.errors import FlatlensError

TRACEBACK = "FLATLENS_TRACEBACK"  # environment variable: show the traceback of unexpected errors
LONGEST = 600  # characters of a message that are shown
# the extra that installs a module
EXTRAS = {
    "loky": "sweep",
    "dask": "dask",
    "distributed": "dask",
    "timm": "zoo",
    "torchvision": "zoo",
    "PIL": "images",
    "plotly": "report",
    "lightning": "lightning",
    "transformers": "transformers",
    "tensorboard": "tensorboard",
    "mlflow": "mlflow",
    "wandb": "wandb",
}


def guarded(command: Callable[[Sequence[str] | None], object], argv: Sequence[str] | None) -> int:
    """Call ``command(argv)`` and turn whatever it raises into one sentence and an exit code."""
    pressed = threading.Event()
    with _noting_interrupts(pressed):
        try:
            _check_words(sys.argv[1:] if argv is None else argv)
            _print_any_name()
            code = command(argv)
            if sys.stdout is not None:
                sys.stdout.flush()  # raises here, not at exit, if the reader has gone
        except KeyboardInterrupt:
            return INTERRUPTED
        except SystemExit as error:
            return _exited(error)
        except Exception as error:
            # a library may turn the KeyboardInterrupt of its import into another error
            return INTERRUPTED if pressed.is_set() else _explain(error)
    return code if isinstance(code, int) else 0


@contextlib.contextmanager
def _noting_interrupts(pressed: threading.Event) -> Iterator[None]:
    """Remember that Ctrl-C was pressed, besides raising KeyboardInterrupt.

    No work has begun before torch is imported, so Ctrl-C then ends the process at once. An
    exception in the middle of that import would be lost or abort the process with a message.
    """
    main_thread = threading.current_thread() is threading.main_thread()
    if not main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    def press(*_: Any) -> None:
        pressed.set()
        if not _torch_is_imported():
            os._exit(INTERRUPTED)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, press)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _torch_is_imported() -> bool:
    spec = getattr(sys.modules.get("torch"), "__spec__", None)
    return spec is not None and not getattr(spec, "_initializing", False)


def _check_words(argv: Sequence[str]) -> None:
    for word in argv:
        if "\0" in word:
            raise FlatlensError(f"The argument {word!r} contains a NUL character; remove it.")


def _print_any_name() -> None:
    """Print names that are not valid UTF-8 with escapes instead of failing."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _exited(error: SystemExit) -> int:
    """Explain a SystemExit. rich raises one when the reader has gone; all others are a user's."""
    if isinstance(error.__context__, BrokenPipeError):
        return FAILED
    return refuse(
        f"The code of the model ended the program with sys.exit({error.code!r}); remove that call"
    )


def _explain(error: Exception) -> int:
    from cyclopts import CycloptsError

    if isinstance(error, FlatlensError | CycloptsError):
        return refuse(str(error))
    if isinstance(error, BrokenPipeError):  # the reader (`| head`) has gone
        _drop_output()
        return FAILED
    if message := vars(error).get("sentence"):  # raised by the factory of a model
        return refuse(message)
    if isinstance(error, ModuleNotFoundError) and (extra := _extra(error)):
        return refuse(f"This needs the package {error.name}: pip install 'flatlens[{extra}]'")
    if isinstance(error, UnicodeError):
        return refuse(f"A name or text is not valid UTF-8 ({error}); rename it")
    if isinstance(error, ValueError) and "embedded null" in str(error):
        return refuse("A path contains a NUL character; remove it")
    if isinstance(error, MemoryError):
        return refuse("There is not enough memory; use fewer samples or a smaller network", FAILED)
    if isinstance(error, OSError):
        name = f" {error.filename!s}" if error.filename else ""
        return refuse(f"Cannot use{name}: {error.strerror or error}")
    return _unexpected(error)


def _extra(error: ModuleNotFoundError) -> str | None:
    return EXTRAS.get((error.name or "").partition(".")[0])


def _unexpected(error: Exception) -> int:
    """Describe an unexpected error; an environment variable shows the traceback."""
    if os.environ.get(TRACEBACK):
        traceback.print_exception(error)
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    message = f"{type(error).__name__}: {error}"[:LONGEST].rstrip(".")
    return refuse(f"{message}{where}; set {TRACEBACK}=1 to see the traceback", FAILED)


def _drop_output() -> None:
    """Discard the rest of standard output, so that the exit does not fail on it."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def refuse(reason: str, code: int = BAD_INPUT) -> int:
    """Print one sentence on standard error and return the exit code."""
    # a path that is not valid UTF-8 is shown with escapes
    text = reason.encode(errors="backslashreplace").decode()
    sentence = " ".join(text.split()).rstrip(".")
    if len(sentence) > 2 * LONGEST:  # a name of thousands of letters
        sentence = f"{sentence[:LONGEST]} ... {sentence[-LONGEST:]}"
    stop = "" if sentence.endswith("?") else "."
    try:
        print(f"flatlens: {sentence}{stop}", file=sys.stderr, flush=True)
    except OSError:  # nobody reads standard error either
        with contextlib.suppress(OSError, ValueError, AttributeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    return code
