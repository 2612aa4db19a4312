"""Figure 3: normalised MLS and adaptive sharpness of vision models by name, one record each.

A model is a run folder named after it, so a zoo that is started again skips what is done and adds
what is new. A model that cannot be measured (no weights, no memory) is skipped with the reason, in
`skipped.txt` of its folder; the next start tries it again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import re
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from flatlens.capture.inputs import COUPLED
from flatlens.data import images as pictures
from flatlens.errors import FlatlensError
from flatlens.metrics import METRICS, Metric
from flatlens.passes.sketch import sketch
from flatlens.perturb import adaptive_sharpness_sampled, input_sensitivity_ascent
from flatlens.probes import Probe
from flatlens.runs import Run, RunBusyError, read_runs
from flatlens.runs.files import replacing
from flatlens.runs.run import CONFIG, _read_config
from flatlens.training.placement import check_device
from flatlens.training.progress import sweep_bar
from flatlens.training.sweep import Engine, Outcome, _mark, _result, engine_of
from flatlens.training.timm_models import (
    CLASSES,
    build,
    family,
    reachable,
    select,
    size,
    transform,
    weights_file,
)

if TYPE_CHECKING:
    import pandas as pd

QUANTITIES = ("normalized_mls", "adaptive_sharpness", "sharpness", "mls", "input_invariant_mls")
AXES = ("adaptive_sharpness", "normalized_mls")
OUTPUTS = {"sigmoid": torch.sigmoid, "logits": None}
TOLERANCE = 1e-3  # of Lanczos, relative to the squared singular value
CHUNKS = (None, 2, 1)  # images at a time: as it likes; fewer if memory is short or they mix
PAPER = {"perturbations": 50, "antithetic": False}  # Eq. 46 as the authors ran it
SKIPPED, FIGURE = "skipped.txt", "figure3"
SHOWN = ("class", "parameters", *(f"{a}{e}" for a in AXES for e in ("", "_se")), "top1")
# rough costs, for a table: of an image, in forward passes; of memory, in what one pass keeps
FORWARDS, IMAGES_AT_ONCE, SECOND_DERIVATIVE = 100, 5, 4
_ONE_AT_A_TIME = threading.Lock()  # torch has one generator and one number of threads a process


@dataclass(frozen=True)
class Zoo:
    """How models are measured: everything but the model that a record depends on.

    Parameters
    ----------
    images
        Folder of pictures, looked through to any depth. A class number is read from the beginning
        of a name (012_cat.jpg) or of its folder, or from the order of 1000 class folders.
    n
        Number of pictures, chosen by their names.
    source
        "pretrained", "random", or a folder with weights by the model's name.
    outputs
        What is measured: sigmoid of the logits (as in the paper), or the logits.
    directions
        Random output directions per picture.
    perturbations
        Pairs of perturbed weights per picture for the sampled sharpness, Eq. 38; 0 for none.
    rho
        Their size, relative to each weight.
    paper
        Also find both axes as the authors did: Eq. 46 with 50 perturbations per picture, Eq. 47
        with 30 steps of Adam.
    seed
        Of directions, perturbations and random weights.
    threads
        CPU threads of torch in each process.
    device
        Where to compute: cpu, cuda, cuda:1, mps.
    """

    images: str
    n: int = 100
    source: str = "pretrained"
    outputs: str = "sigmoid"
    directions: int = 8
    perturbations: int = 4
    rho: float = 0.1
    paper: bool = False
    seed: int = 0
    threads: int = 1
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.outputs not in OUTPUTS:
            raise FlatlensError(f"outputs={self.outputs!r} is unknown; use sigmoid or logits.")
        if self.directions < 2 or self.perturbations == 1 or self.perturbations < 0:
            raise FlatlensError("Give two directions and two perturbations (or 0) or more.")
        if self.n < 2 or self.threads < 1 or not self.rho > 0:
            raise FlatlensError("Give two images or more, one thread or more, and rho above 0.")

    def identity(self, model: str) -> dict[str, Any]:
        """What decides the record of a model; files by what they hold, not where they are."""
        files, _ = choose(Path(self.images), self.n)
        source = self.source
        if source not in ("pretrained", "random"):
            source = f"file:{_digest([weights_file(Path(source), model)])}"
        settings = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "device"}
        return {"model": model, **settings, "images": _digest(files), "source": source}

    def check(self, engine: str = "local") -> None:
        """Refuses what would fail with every model."""
        _check_source(self.source)
        check_device(self.device, here=engine == "local")  # workers of Dask may have others
        files, labels = choose(Path(self.images), self.n)
        for file in files:
            _picture(file)
        if self.paper and labels is None:
            raise FlatlensError(
                f"Eq. 46 of the paper needs the classes of the images in {self.images}; begin "
                f"their names with a number below {CLASSES} (012_cat.jpg), or leave out --paper."
            )

    def check_folder(self, folder: Path) -> None:
        """Refuses a folder with records of other settings: one figure shows all of a folder."""
        files, _ = choose(Path(self.images), self.n)
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        own = {k: v for k, v in own.items() if k not in ("device", "source", "images")}
        own |= {"images": _digest(files), "source": self.source == "random"}
        for path in sorted(folder.rglob(CONFIG)):
            there = _read_config(path)
            if not own.keys() <= there.keys():
                raise FlatlensError(f"{path.parent} is no run of a zoo; choose another folder.")
            there["source"] = there["source"] == "random"
            for key, value in own.items():  # images near the end: their number changes them, too
                if there[key] != value:
                    raise FlatlensError(
                        f"{path.parent} was made with {_told(key, there[key], value)}; choose "
                        "another folder, or the settings it has."
                    )


def _told(key: str, old: Any, new: Any) -> str:
    if key == "images":
        return "other images"
    if key == "source":
        return f"{'random' if old else 'trained'} weights"
    return f"{key}={old!r}, not {new!r}"


def _check_source(source: str) -> None:
    if source not in ("pretrained", "random") and not Path(source).is_dir():
        raise FlatlensError(f"{source} is not a folder; give one that has weights.")


def _digest(files: Sequence[Path]) -> str:
    """Of what the files hold; those that have not changed are read once."""
    return _hashed(tuple((f, f.stat().st_mtime_ns, f.stat().st_size) for f in files))


@functools.lru_cache(maxsize=4)
def _hashed(files: tuple[tuple[Path, int, int], ...]) -> str:
    parts = (hashlib.sha256(file.read_bytes()).digest() for file, _, _ in files)
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def zoo(
    models: Sequence[str],
    settings: Zoo,
    *,
    out: Path | str,
    engine: str = "local",
    workers: int | None = None,
    address: str | None = None,
    progress: bool | None = None,
) -> pd.DataFrame:
    """Measures every model that matches, one run folder each below `out`; gives `read_runs(out)`.

    `models` are names of timm with wildcards. What is done is skipped; what cannot be measured is
    left out and listed with its reason in `attrs["skipped"]` of the result. The engine "local" uses
    `workers` processes (by default as many as cores and threads allow), "dask" the scheduler at
    `address`, or a cluster of local processes.
    """
    settings.check(engine)
    names = select(models, settings.source)
    folder = Path(out).absolute()
    settings.check_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    todo = [name for name in names if not (folder / name / "done").exists()]
    for name in set(names) - set(todo):
        with contextlib.suppress(RunBusyError):
            Run.open(folder / name, settings.identity(name)).close()  # with the same weights?
    settings = replace(settings, images=str(Path(settings.images).absolute()))
    if settings.source not in ("pretrained", "random"):
        settings = replace(settings, source=str(Path(settings.source).absolute()))
    offline = settings.source == "pretrained" and not reachable()
    skipped: dict[str, str] = {}
    busy: list[str] = []
    with sweep_bar(len(names), len(names) - len(todo), progress) as show:
        if todo:
            with engine_of(engine, workers, address, None, settings.threads, len(todo)) as using:
                for name, outcome in _outcomes(todo, settings, using, folder, offline):
                    if outcome.status == "busy":
                        busy.append(name)
                    elif outcome.status != "done":
                        skipped[name] = outcome.error.strip().splitlines()[-1]
                    show(len(skipped), len(busy))
    frame = read_runs(folder) if any(folder.rglob("records.jsonl")) else _nothing()
    frame.attrs |= {"skipped": skipped, "busy": busy}
    for old in folder.glob(f"{FIGURE}.*"):  # of the records before; the command draws it anew
        old.unlink(missing_ok=True)
    return frame


def _nothing() -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame({"run": [], "model": []})


def kept(frame: pd.DataFrame, max_se: float | None) -> tuple[pd.DataFrame, dict[str, float]]:
    """The models whose relative standard errors of both axes are small enough, and the others.

    Where Lanczos did not converge, an error is not known: it is given as infinite.
    """
    if max_se is not None and not max_se > 0:
        raise FlatlensError(f"max_se={max_se} would drop every model; give a number above 0.")
    if frame.empty:
        return frame, {}
    errors = [frame[f"{axis}_se"] / frame[axis] for axis in AXES]
    worst = np.maximum(*(np.asarray(e, float) for e in errors))
    worst[~converged(frame)] = np.inf
    good = ~np.isposinf(worst) if max_se is None else worst < max_se
    models = frame["model"].to_numpy()[~good].tolist()
    return frame[good], dict(zip(models, worst[~good].tolist(), strict=True))


def converged(frame: pd.DataFrame) -> Any:
    """Whether Lanczos reached its tolerance for every image of a model, as far as records say."""
    if "spectra_converged" not in frame:
        return np.ones(len(frame), dtype=bool)
    return ~frame["spectra_converged"].eq(False).to_numpy(dtype=bool)


# ------------------------------------------------------------------ what a person reads


def listing(models: Sequence[str], source: str, n: int) -> list[list[str]]:
    """Rows of a table: the models that would run, what they are, and about what they take."""
    _check_source(source)
    a = torch.randn(512, 512)
    start = time.perf_counter()
    for _ in range(8):
        a @ a
    speed = 8 * 2 * 512**3 / (time.perf_counter() - start)
    rows = [["model", "class", "parameters", "pixels", "memory", "time"]]
    for name in select(models, source):
        try:
            s = size(name)
        except Exception:  # a model that does not run on shapes alone
            rows.append([name, family(name), *"????"])
            continue
        memory = 8 * s.parameters + IMAGES_AT_ONCE * SECOND_DERIVATIVE * s.bytes
        seconds = n * FORWARDS * s.flops / speed
        shown = [f"{s.parameters:,}", str(s.pixels), f"{memory / 1e9:.1f} GB"]
        spent = f"{seconds / 60:.0f} min" if seconds > 90 else f"{seconds:.0f} s"
        rows.append([name, family(name), *shown, spent])
    return rows


def report(frame: pd.DataFrame, good: pd.DataFrame, dropped: dict[str, float]) -> dict[str, Any]:
    """What was measured, dropped and skipped."""
    shown = [c for c in SHOWN if c in good]
    return {
        "models": {row["model"]: row for row in good[["model", *shown]].to_dict("records")},
        "dropped": dropped,
        "skipped": frame.attrs["skipped"],
        "busy": frame.attrs["busy"],
    }


def text(told: Mapping[str, Any]) -> str:
    """The same as lines."""
    from flatlens.measurement import columns, number

    lines: list[str] = []
    if told["models"]:
        names = list(dict.fromkeys(k for row in told["models"].values() for k in row))
        rows = [
            [v if isinstance(v := row.get(k, ""), str) else number(v) for k in names]
            for row in told["models"].values()
        ]
        lines += columns([names, *rows])
    for name, e in told["dropped"].items():
        why = "Lanczos did not converge" if np.isposinf(e) else f"relative standard error {e:.2f}"
        lines.append(f"dropped {name}: {why}")
    lines += [f"skipped {name}: {reason}" for name, reason in told["skipped"].items()]
    lines += [f"left to another process: {name}" for name in told["busy"]]
    for name, claim in told.get("claims", {}).items():
        lines.append(f"{name}, {claim['says']}: {claim['verdict']} ({claim['found']})")
    lines += [told["figure"]] if "figure" in told else []
    return "\n".join(lines)


# ------------------------------------------------------------------ pictures


def choose(folder: Path, n: int) -> tuple[list[Path], list[int] | None]:
    """The first n pictures in an order that depends on their names alone, and their classes."""
    if not folder.is_dir():
        raise FlatlensError(f"{folder} is not a folder.")
    found = [p for p in folder.rglob("*") if p.suffix.lower() in pictures.SUFFIXES]
    found = [p for p in found if p.is_file() and p.name[0] != "."]
    if n > len(found):
        raise FlatlensError(f"{n} images were asked for, but {folder} has only {len(found)}.")
    places = {p: p.relative_to(folder).as_posix() for p in found}
    found.sort(key=lambda p: hashlib.sha256(places[p].encode()).hexdigest())
    folders = sorted({p.parent.name for p in found})
    order = {name: k for k, name in enumerate(folders)} if len(folders) == 1000 else {}
    labels = [_label(p, order) for p in found[:n]]
    known = [label for label in labels if label is not None]
    return found[:n], known if len(known) == n else None


def _label(file: Path, order: Mapping[str, int]) -> int | None:
    for name in (file.name, file.parent.name):
        number = re.match(r"\d+(?=_|$)", name)
        if number and int(number[0]) < CLASSES:  # not 2024_0.jpg
            return int(number[0])
    return order.get(file.parent.name)


def _picture(file: Path) -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise FlatlensError("Reading images needs Pillow: pip install flatlens[zoo].") from error
    try:
        with Image.open(file) as image:
            return image.convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise FlatlensError(f"Cannot read {file}: it is cut short or no image.") from error


# ------------------------------------------------------------------ one model


def record(model: str, settings: Zoo, chunk: int | None, offline: bool = False) -> dict[str, Any]:
    """Everything that is measured of one model."""
    torch.set_num_threads(settings.threads)
    network = build(model, settings.source, settings.seed, offline).to(settings.device)
    files, labels = choose(Path(settings.images), settings.n)
    prepare, pixels = transform(network)
    x = torch.stack([prepare(_picture(f)) for f in files]).to(settings.device)
    p = sketch(
        network, x, directions=settings.directions, seed=settings.seed, top=1, layers=False,
        tolerance=TOLERANCE, chunk=chunk, output=OUTPUTS[settings.outputs],
    )  # fmt: skip
    facts = {
        "step": 0,
        "class": family(model),
        "parameters": sum(q.numel() for q in network.parameters()),
        "pixels": pixels,
    }
    return facts | quantities_of(network, x, labels, p, settings, chunk)


def quantities_of(
    network: nn.Module,
    x: Tensor,
    labels: Sequence[int] | None,
    p: Probe,
    settings: Zoo,
    chunk: int | None,
) -> dict[str, Any]:
    """What is recorded of one network on some images, from its probe and passes of its own.

    Args:
        network: the network in evaluation mode.
        x: the images as the network reads them.
        labels: their classes, if known; without them neither top-1 nor Eq. 38 is recorded.
        p: a probe of the network on these images.
        settings: what to measure.
        chunk: images at a time; None for as many as fit.
    """
    paths = [q.path for q in p.parameters]
    found: dict[str, Any] = {
        **{f"tensors_{path}": paths.count(path) for path in ("layer", "rule", "slow", "unused")},
        **_means(p),
        "spectra_converged": p.sketch is None or p.sketch.converged,
    }
    if labels is not None:
        y = torch.tensor(labels, device=x.device)
        found["top1"] = _top1(network, x, y, chunk or 4)
        found |= _sampled(network, x, y, settings)
    if settings.paper:
        found |= _as_the_authors(network, x, p, settings, chunk)
    return found


def _means(p: Probe) -> dict[str, float]:
    """Means over the pictures with their standard errors, which contain those of the sketch."""
    found: dict[str, float] = {}
    for name in QUANTITIES:
        metric = METRICS[name]
        assert isinstance(metric, Metric)
        found |= _mean(name, metric.samples(p))
    return found


def _mean(name: str, values: Any) -> dict[str, float]:
    error = np.std(values, ddof=1) / len(values) ** 0.5
    return {name: float(np.mean(values)), f"{name}_se": float(error)}


@torch.no_grad()
def _top1(network: nn.Module, x: Tensor, y: Tensor, chunk: int) -> float:
    """The share of right classes in per cent."""
    parts = zip(x.split(chunk), y.split(chunk), strict=True)
    right = [network(images).argmax(1) == classes for images, classes in parts]
    return float(100 * torch.cat(right).double().mean())


def _sampled(network: nn.Module, x: Tensor, y: Tensor, settings: Zoo) -> dict[str, float]:
    """Eq. 38 with perturbations of its own for each picture, and as the authors sampled it."""
    ways: dict[str, dict[str, Any]] = {}
    if settings.perturbations:
        ways["adaptive_sharpness_sampled"] = {"perturbations": settings.perturbations}
    if settings.paper:
        ways["adaptive_sharpness_paper"] = PAPER
    found: dict[str, float] = {}
    for name, options in ways.items():
        values = [
            adaptive_sharpness_sampled(
                network, x[i : i + 1], y[i : i + 1], rho=settings.rho,
                output=OUTPUTS[settings.outputs], seed=_seed(settings.seed, i), **options,
            ).value
            for i in range(len(x))
        ]  # fmt: skip
        found |= _mean(name, values)
    return found


def _seed(seed: int, i: int) -> int:
    return int(np.random.SeedSequence([seed, i]).generate_state(1)[0])


def _as_the_authors(
    network: nn.Module, x: Tensor, p: Probe, settings: Zoo, chunk: int | None
) -> dict[str, float]:
    """Normalised MLS by the ascent of Eq. 47."""
    ascent = input_sensitivity_ascent(
        network, x, seed=settings.seed, output=OUTPUTS[settings.outputs], chunk=chunk
    )
    assert ascent.samples is not None
    return _mean("normalized_mls_paper", p.input.x_norm**2 * ascent.samples**2)


def out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or one behind it, says that memory ran out."""
    while error is not None:
        text = str(error).lower()
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
            return True
        if "not enough memory" in text or "out of memory" in text or "alloc_cpu" in text:
            return True
        error = error.__cause__ or error.__context__
    return False


def run_model(
    model: str, values: Mapping[str, Any], out: str, token: str, chunk: int | None, offline: bool
) -> Outcome:
    """Measures one model, with fewer pictures at a time where memory is short: the task of every
    engine. Files are sent back if the driver's disk is not seen here."""
    settings = Zoo(**values)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_ONE_AT_A_TIME)
        shared = (Path(out) / token).exists()
        place = out if shared else stack.enter_context(tempfile.TemporaryDirectory())
        folder = Path(place) / model
        try:
            with Run.open(folder, settings.identity(model)) as run:
                if not run.done:
                    run.restore()  # nothing, and what a killed process left is cut off
                    start = time.perf_counter()
                    run.append(_record(model, settings, chunk, offline))
                    run.log("timing", {"seconds": time.perf_counter() - start})
                    run.finish()
            (folder / SKIPPED).unlink(missing_ok=True)
        except RunBusyError:
            return Outcome("busy")
        except FlatlensError as error:
            return Outcome("refused", str(error))
        except Exception as error:  # of anyone's model: kept, told at the end
            reason = (str(error).splitlines() or [""])[0]
            told = f"{traceback.format_exc()}\n{type(error).__name__}: {reason}"
            return Outcome("failed", told)
        if shared:
            return Outcome("done")
        files = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "lock"}
        return Outcome("done", files=files)


def _record(model: str, settings: Zoo, chunk: int | None, offline: bool) -> dict[str, Any]:
    chunks = CHUNKS if chunk is None else [c for c in CHUNKS if c is not None and c <= chunk]
    for at_once in chunks:
        try:
            return record(model, settings, at_once, offline)
        except (RuntimeError, MemoryError, FlatlensError) as error:
            if not out_of_memory(error) and str(error) != COUPLED:
                raise
    raise FlatlensError(f"Memory is too short for {model}, even for one image at a time.")


# ------------------------------------------------------------------ many models


def _outcomes(
    todo: Sequence[str], settings: Zoo, engine: Engine, folder: Path, offline: bool
) -> Iterator[tuple[str, Outcome]]:
    """Each model with what became of it, in the order in which they end.

    A process that dies takes what runs beside it along. So a model that was lost runs once more at
    the end with nothing beside it: what is lost then is its own doing.
    """
    token = _mark(folder)
    waiting, alone, running = list(reversed(todo)), list[str](), dict[Any, str]()
    lost = dict.fromkeys(todo, 0)

    def start(name: str) -> None:
        chunk = 1 if lost[name] > 1 else None  # a process that dies is short of memory
        task = (name, asdict(settings), str(folder), token, chunk, offline)
        running[engine.submit(run_model, *task)] = name

    try:
        while waiting or alone or running:
            while waiting and (engine.window is None or len(running) < engine.window):
                start(waiting.pop())
            if not running:
                start(alone.pop(0))
            done, _ = engine.wait(list(running))
            for future in done:
                name, outcome = running.pop(future), _result(future)
                if outcome.status == "lost" and lost[name] < engine.losses:
                    lost[name] += 1
                    alone.append(name)
                else:
                    yield name, _keep(name, settings, outcome, folder)
    finally:
        (folder / token).unlink(missing_ok=True)


def _keep(name: str, settings: Zoo, outcome: Outcome, folder: Path) -> Outcome:
    """What the driver has to write: files that a worker sent, or why a model was skipped."""
    place = folder / name
    if outcome.status == "lost":
        told = f"{outcome.error}\nThe process that measured {name} was killed (memory too short?)."
        outcome = replace(outcome, error=told)
    if outcome.error:
        with replacing(place / SKIPPED) as temporary:
            temporary.write_text(outcome.error)
    if outcome.files:
        try:
            with Run.open(place, settings.identity(name)) as run:
                names = [] if run.done else sorted(outcome.files, key="done".__eq__)
                for file in names:  # done comes last
                    with replacing(place / file) as temporary:
                        temporary.write_bytes(outcome.files[file])
        except RunBusyError:
            return Outcome("busy")
    return outcome
