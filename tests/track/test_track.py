"""A training does not notice that it is tracked, and what is recorded is what `measure` says."""

import copy
import inspect
import os
import random
import subprocess
import sys
import warnings
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import flatlens as fl
from flatlens.track import Run, Tracker, at, every, log_spaced, on_interpolation, read_runs
from flatlens.track import budget as budget_module
from flatlens.track import tracker as tracker_module
from flatlens.track.quantities import errors_of_part
from flatlens.track.samples import part_of
from flatlens.track.sinks import CSV

# beartype checks types in tests, and draws which item of a list it looks at: not our doing
CHECKED = hasattr(Tracker.to_pandas, "__wrapped__")

x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
y = torch.randint(3, (8,), generator=torch.Generator().manual_seed(2))


def network():
    """Dropout draws random numbers, BatchNorm keeps statistics: what a careless look disturbs."""
    return nn.Sequential(
        nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(0.5), nn.Linear(5, 3)
    )


class Training:
    """A loop that uses every source of random numbers, one step at a time."""

    def __init__(self, optimizer="momentum"):
        torch.manual_seed(0)
        np.random.seed(0)  # noqa: NPY002
        random.seed(0)
        self.model = network()
        makers = {
            "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
            "adam": lambda p: torch.optim.AdamW(p, lr=0.01),
        }
        self.optimizer = makers[optimizer](self.model.parameters())
        self.losses = []

    def step(self, tracker=lambda *_, **__: None, number=0):
        noise = np.random.randn() + random.random()  # noqa: NPY002
        rows = torch.randint(len(x), (4,))
        loss = F.cross_entropy(self.model(x[rows] + 0.01 * noise), y[rows])
        self.optimizer.zero_grad()
        loss.backward()
        tracker(number, train_loss=loss)  # gradients are there, and must stay
        self.optimizer.step()
        self.losses.append(loss.item())

    def everything(self):
        """All that a training is."""
        return {
            "losses": self.losses,
            "weights": self.model.state_dict(),
            "gradients": [p.grad for p in self.model.parameters()],
            "optimizer": self.optimizer.state_dict(),
            "modes": [m.training for m in self.model.modules()],
            "hooks": [(len(m._forward_hooks), len(m._backward_hooks)) for m in self.model],
            "wants": [p.requires_grad for p in self.model.parameters()],
            "torch": torch.get_rng_state(),
            "numpy": np.random.get_state(),  # noqa: NPY002
            "python": random.getstate(),
        }


def identical(a, b):
    """Equal to the last bit, all the way down."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(identical(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(identical, a, b))
    return a == b


def trained(track=lambda model, optimizer: None, optimizer="momentum", steps=12):
    training = Training(optimizer)
    before = random.getstate()
    tracker = track(training.model, training.optimizer) or (lambda *_, **__: None)
    if CHECKED:
        random.setstate(before)
    for number in range(steps):
        training.step(tracker, number)
    return copy.deepcopy(training.everything())


def called(model, _optimizer):
    return Tracker(model, x, y, when=every(3))


def attached(model, optimizer):
    Tracker(model, x, y, when=every(3)).attach(optimizer)


# ------------------------------------------------------------------ nothing is disturbed


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
@pytest.mark.parametrize("track", [called, attached])
def test_training_is_bit_identical(track, optimizer):
    assert identical(trained(track, optimizer), trained(optimizer=optimizer))


class Outlets:
    """Everything that a tracker can be given."""

    class Random:
        """A sink that draws random numbers, as those do that invent a name for a run."""

        def write(self, record):
            torch.randn(3)
            random.random()
            np.random.randn()  # noqa: NPY002

        def close(self):
            pass

    def __init__(self, folder):
        self.folder = Path(folder)

    def __call__(self, model, _optimizer):
        loader = torch.utils.data.DataLoader(  # shuffling draws, too
            torch.utils.data.TensorDataset(x, y), batch_size=4, shuffle=True
        )
        sinks = [CSV(self.folder / "a.csv"), self.Random()]
        return Tracker(model, loader, when=every(3), run=self.folder / "a", sinks=sinks)


@pytest.mark.slow
def test_training_is_bit_identical_with_all_outlets(tmp_path):
    assert identical(trained(Outlets(tmp_path)), trained())


UNCHECKED = """
import sys
import test_track as t

assert not t.CHECKED
for track in (t.called, t.attached, t.Outlets(sys.argv[1])):
    assert t.identical(t.trained(track), t.trained())
"""


@pytest.mark.slow
def test_training_is_bit_identical_without_the_checks_of_types(tmp_path):
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(Path(fl.__file__).parents[1])])
    done = subprocess.run(
        [sys.executable, "-c", UNCHECKED, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_the_comparison_sees_a_careless_look():
    """Each of these is a mistake that a tracker could make."""

    def evaluates(model, _optimizer):
        return lambda *_, **__: model.eval()

    def looks_in_training_mode(model, _optimizer):
        return lambda *_, **__: model(x)

    def draws(_model, _optimizer):
        return lambda *_, **__: random.random()

    def clears(_model, optimizer):
        return lambda *_, **__: optimizer.zero_grad()

    for careless in (evaluates, looks_in_training_mode, draws, clears):
        assert not identical(trained(careless), trained())


# ------------------------------------------------------------------ what is recorded


def test_a_record_is_what_measure_says():
    model = network()
    tracker = Tracker(model, x, y, when=every(2), weight_norm="frobenius")
    assert tracker(1, train_loss=0.5) is None
    m = tracker(2, train_loss=torch.tensor(0.5), accuracy_of_batch=np.float32(25))
    expected = fl.measure(model, x, y, weight_norm="frobenius").to_dict()
    assert tracker.records == [
        {"step": 2, "train_loss": 0.5, "accuracy_of_batch": 25.0, **expected}
    ]
    assert m.to_dict() == expected
    assert {type(v) for v in list(tracker.records[0].values())[1:]} == {float}
    assert tracker.to_pandas().sharpness[0] == m["sharpness"]


def test_fewer_quantities():
    tracker = Tracker(network(), x, when=every(1), quantities=["nmls"])
    tracker(0)
    assert [name for name in tracker.records[0] if "." not in name] == ["step", "nmls"]


def test_records_of_run_sinks_and_memory_agree(tmp_path):
    written = []

    class Memory:
        def write(self, record):
            written.append(record)

        def close(self):
            written.append("closed")

    with Tracker(network(), x, y, when=every(1), run=tmp_path / "a", sinks=[Memory()]) as tracker:
        for step in range(3):
            tracker(step, train_loss=step / 3)
    assert written == [*tracker.records, "closed"]
    with Run.open(tmp_path / "a") as run:  # closed with the tracker
        assert run.records == tracker.records
    table = read_runs(tmp_path)
    assert list(table.train_loss) == [0, 1 / 3, 2 / 3]
    assert list(table.sharpness) == [r["sharpness"] for r in tracker.records]


def test_a_run_that_was_handed_over_stays_open(tmp_path):
    with Run.open(tmp_path / "a", {"lr": 0.1}) as run:
        with Tracker(network(), x, when=every(1), run=run) as tracker:
            tracker(0)
        run.append({"step": 1})
        assert [r["step"] for r in run.records] == [0, 1]


def test_scalars_are_read_only_when_due():
    """Reading a tensor of a GPU makes the CPU wait for it."""
    read = []

    class Scalar:
        def __float__(self):
            read.append(True)
            return 0.5

    tracker = Tracker(network(), x, when=every(3))
    for step in range(7):
        tracker(step, train_loss=Scalar())
    assert len(read) == len(tracker.records) == 3


def test_the_probe_data_are_a_copy():
    model, mine = network(), x.clone()
    tracker = Tracker(model, mine, y, when=every(1))
    mine.zero_()
    assert tracker(0)["sharpness"] == fl.measure(model, x, y)["sharpness"]


@pytest.mark.parametrize(
    "data",
    [
        lambda: [(x[:5], y[:5]), (x[5:], y[5:])],
        lambda: ((x[k : k + 4], y[k : k + 4]) for k in (0, 4)),
        lambda: torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 3),
    ],
    ids=["list", "generator", "loader"],
)
def test_batches_are_kept_for_every_measurement(data):
    model = network()
    tracker = Tracker(model, data(), when=every(1))
    first, second = tracker(0), tracker(1)
    assert first.to_dict() == second.to_dict()
    assert first["sharpness"] == pytest.approx(fl.measure(model, x, y)["sharpness"], rel=1e-6)
    assert first["accuracy"] == fl.measure(model, x, y)["accuracy"]


def test_numpy_and_named_inputs():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, pixels):
            return self.layer(pixels)

    model = Named()
    expected = fl.measure(model, {"pixels": x}, y).to_dict()
    tracker = Tracker(model, {"pixels": x}, y.numpy(), when=every(1))
    assert tracker(0).to_dict() == expected


def test_the_probe_data_follow_the_model():
    model = network()
    tracker = Tracker(model, {"input": x}, y)
    model.to("meta")
    inputs, targets = tracker.samples.on(torch.device("meta"))
    assert inputs["input"].device.type == targets.device.type == "meta"


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_inside_any_grad_mode(mode):
    model = network()
    expected = fl.measure(model, x, y).to_dict()
    with mode():
        tracker = Tracker(model, x + 0, y, when=every(1))  # x + 0 is of this mode
        assert tracker(0).to_dict() == expected
        assert torch.is_inference_mode_enabled() == (mode is torch.inference_mode)
        assert torch.is_grad_enabled() == (mode is torch.enable_grad)
    assert tracker(1).to_dict() == expected


# ------------------------------------------------------------------ attached to an optimiser


def somebody_elses_script(model, optimizer, steps):
    """Nobody wants to edit this."""
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def test_attach_counts_the_steps_of_the_optimiser():
    model = nn.Linear(6, 3)
    tracker = Tracker(model, x, y, when=at([0, 2, 5, 6]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = tracker.attach(optimizer)
    states = {0: copy.deepcopy(model)}
    for step in range(1, 6):
        somebody_elses_script(model, optimizer, 1)
        states[step] = copy.deepcopy(model)
    handle.remove()
    somebody_elses_script(model, optimizer, 3)
    assert [r["step"] for r in tracker.records] == [0, 2, 5]
    for record in tracker.records:  # each is of the weights after that many steps
        assert record["sharpness"] == fl.measure(states[record["step"]], x, y)["sharpness"]
        assert record["loss"] == fl.measure(states[record["step"]], x, y)["loss"]
    losses = [r["loss"] for r in tracker.records]
    assert all(a > b for a, b in pairwise(losses))


# ------------------------------------------------------------------ going on after a break


def resumable(tmp_path, name, when, steps, stop=None, state=None):
    """A loop with its own checkpoints; returns what to go on from at step ``stop``."""
    training = Training()
    tracker = Tracker(training.model, x, y, when=when, run=tmp_path / name)
    begin, saved = 0, None
    if state is not None:
        begin = state["step"]
        training.model.load_state_dict(state["model"])
        training.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["torch"])
        np.random.set_state(state["numpy"])  # noqa: NPY002
        random.setstate(state["python"])
        tracker.load_state_dict(state["tracker"])
    for step in range(begin, steps):
        if step == stop:
            saved = copy.deepcopy(
                {
                    "step": step,
                    "model": training.model.state_dict(),
                    "tracker": tracker.state_dict(),
                    **{k: v for k, v in training.everything().items() if k != "step"},
                }
            )
        training.step(tracker, step)
    tracker.close()
    return saved


@pytest.mark.slow
@pytest.mark.parametrize("stop", [1, 4, 6, 9])
def test_a_broken_training_ends_with_the_same_records(tmp_path, stop):
    when = [every(3), on_interpolation(0.9)]
    resumable(tmp_path, "whole", when, 12)
    state = resumable(tmp_path, "broken", when, 11, stop=stop)  # goes on beyond its checkpoint
    resumable(tmp_path, "broken", when, 12, state=state)
    records = [(tmp_path / name / "records.jsonl").read_bytes() for name in ("whole", "broken")]
    assert records[0] == records[1]
    with Run.open(tmp_path / "whole") as run:
        fitted = [r["step"] for r in run.records if r["step"] % 3]
    assert len(fitted) <= 1


def test_a_folder_with_records_is_not_mixed_with_new_ones(tmp_path):
    def run():
        options = {"run": tmp_path / "a", "exist": "resume"}
        with Tracker(network(), x, when=every(1), **options) as tracker:
            for step in range(3):
                tracker(step)

    run()
    with pytest.raises(fl.FlatlensError, match="records up to step 2 and this is step 0"):
        run()
    assert len(read_runs(tmp_path)) == 3


def test_the_same_step_twice_is_one_record_and_an_earlier_one_is_refused():
    tracker = Tracker(network(), x, when=every(1))
    assert tracker(4) is not None
    assert tracker(4) is None
    with pytest.raises(fl.FlatlensError, match="step 3 comes after step 4"):
        tracker(3)
    assert len(tracker.records) == 1


def test_state_without_a_run_brings_the_records():
    tracker = Tracker(network(), x, when=every(1))
    for step in range(3):
        tracker(step)
    state = copy.deepcopy(tracker.state_dict())
    other = Tracker(network(), x, when=every(1))
    other.load_state_dict(state)
    assert other.records == tracker.records
    assert other(2) is None
    assert other(3) is not None
    tracker.rewind(1)
    assert [r["step"] for r in tracker.records] == [0, 1]


def test_state_of_another_folder_is_refused(tmp_path):
    tracker = Tracker(network(), x, when=every(1))
    tracker(0)
    other = Tracker(network(), x, run=tmp_path / "a")
    with pytest.raises(fl.FlatlensError, match=r"1 record, but .* has 0"):
        other.load_state_dict(tracker.state_dict())


# ------------------------------------------------------------------ what is refused


def test_a_scalar_with_the_name_of_a_quantity_is_refused(tmp_path):
    tracker = Tracker(network(), x, y, when=every(1), run=tmp_path / "a")
    for name in ("sharpness", "loss", "eq12.lhs"):
        with pytest.raises(fl.FlatlensError, match=f"{name!r} has the name"):
            tracker(0, **{name: 1.0})
    assert tracker.records == []


@pytest.mark.parametrize("value", ["high", None, torch.ones(2), np.ones(3), [1.0]], ids=repr)
def test_a_scalar_that_is_no_number_is_refused(value):
    tracker = Tracker(network(), x, when=every(1))
    with pytest.raises(fl.FlatlensError, match="scalar train_loss is a"):
        tracker(0, train_loss=value)


@pytest.mark.parametrize("name", ["step", "run"])
def test_a_scalar_with_the_name_of_a_column_is_refused(name):
    tracker = Tracker(network(), x, when=every(1))
    with pytest.raises(fl.FlatlensError, match=f"{name!r} has the name of a column"):
        tracker(0, **{name: 7.0})
    assert tracker.records == []


WRONG_KINDS = """
import flatlens as fl, test_track as t
from flatlens.track.sinks import CSV

makers = {
    "every(1.5) has no steps": lambda: fl.every(1.5),
    "log_spaced(0.5) has no steps": lambda: fl.log_spaced(0.5),
    "when=5 is not a schedule": lambda: fl.Tracker(t.network(), t.x, when=5),
    "when=[5] is not a schedule": lambda: fl.Tracker(t.network(), t.x, when=[5]),
    "is not a list of sinks": lambda: fl.Tracker(t.network(), t.x, sinks=CSV("a.csv")),
    "sinks=['a.csv'] is not a list of sinks": lambda: fl.Tracker(t.network(), t.x, sinks=["a.csv"]),
    "sinks=5 is not a list of sinks": lambda: fl.Tracker(t.network(), t.x, sinks=5),
}
for told, make in makers.items():
    try:
        make()
    except fl.FlatlensError as error:
        assert told in str(error), error
    else:
        raise AssertionError(told)
"""


@pytest.mark.slow
def test_wrong_kinds_are_one_sentence_without_the_checks_of_types():
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(fl.__file__).parents[1])])
    done = subprocess.run(
        [sys.executable, "-c", WRONG_KINDS],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "options", [{"chunks": 3}, {"max_overhead": 10.0}, {"max_overhead": 0.0}], ids=repr
)
def test_wrong_options_are_refused_at_once(options):
    with pytest.raises(fl.FlatlensError, match=next(iter(options))):
        Tracker(network(), x, **options)


def test_a_first_measurement_that_cannot_be_is_refused():
    tracker = Tracker(network(), torch.full((4, 6), torch.nan), when=every(1))
    with pytest.raises(fl.FlatlensError, match="not finite"):
        tracker(0)


def test_a_training_that_diverges_is_not_ended(tmp_path):
    model = network()
    tracker = Tracker(model, x, y, when=every(1), run=tmp_path / "a")
    tracker(0, train_loss=1.0)
    with torch.no_grad():
        model[0].weight.fill_(torch.inf)
    with pytest.warns(UserWarning, match=r"not measured, see tracker.skipped: .* not finite"):
        assert tracker(1, train_loss=torch.tensor(torch.nan)) is None
    record = tracker.records[1]
    assert list(record) == ["step", "train_loss"]
    assert np.isnan(record["train_loss"])
    assert tracker.skipped[0]["step"] == 1
    assert "not finite" in tracker.skipped[0]["why"]
    assert '"step": 1' in (tmp_path / "a" / "skipped.jsonl").read_text()


class Away:
    """A sink whose server cannot be reached from some step on."""

    def __init__(self, since):
        self.since, self.steps = since, []

    def write(self, record):
        if record["step"] >= self.since:
            raise ConnectionError("no route to host")
        self.steps.append(record["step"])

    def close(self):
        raise ConnectionError("still no route")


def test_a_sink_that_fails_later_does_not_end_the_training(tmp_path):
    sink = Away(since=1)
    tracker = Tracker(network(), x, when=every(1), run=tmp_path / "a", sinks=[sink])
    tracker(0)
    with pytest.warns(UserWarning, match="Away did not take a record: no route"):
        tracker(1)
    assert (sink.steps, len(tracker.records)) == ([0], 2)
    with pytest.raises(ConnectionError):
        tracker.close()
    Run.open(tmp_path / "a").close()  # the run was closed all the same


def test_a_sink_that_never_works_is_said_at_once():
    tracker = Tracker(network(), x, when=every(1), sinks=[Away(since=0)])
    with pytest.raises(ConnectionError):
        tracker(0)


# ------------------------------------------------------------------ schedules


def due(schedule, steps):
    return [step for step in range(steps) if schedule(step)]


@pytest.mark.parametrize("per_decade", [1, 2, 3, 5, 7, 10, 50])
def test_log_spaced_is_the_rounded_grid(per_decade):
    grid = {round(10 ** (k / per_decade)) for k in range(5 * per_decade)}
    assert due(log_spaced(per_decade), 20_000) == sorted(s for s in grid | {0} if s < 20_000)


def test_every_and_at():
    assert due(every(7), 30) == [0, 7, 14, 21, 28]
    assert due(at({4, 2}), 30) == due(at(range(2, 6, 2)), 30) == [2, 4]
    for wrong in (every, log_spaced):
        with pytest.raises(fl.FlatlensError, match="1 or more"):
            wrong(0)


def test_several_schedules_and_any_function():
    tracker = Tracker(network(), x, when=[every(4), at([5]), lambda step: step == 6])
    for step in range(9):
        tracker(step)
    assert [r["step"] for r in tracker.records] == [0, 4, 5, 6, 8]


def test_on_interpolation_is_once():
    tracker = Tracker(network(), x, when=on_interpolation(0.1))
    for step, loss in enumerate([1, 0.5, torch.nan, torch.tensor(0.09), 0.2, 0.01]):
        tracker(step, train_loss=loss)
    assert [r["step"] for r in tracker.records] == [3]


def test_on_interpolation_needs_its_scalar():
    tracker = Tracker(network(), x, when=on_interpolation(0.1, "error"))
    with pytest.raises(fl.FlatlensError, match="looks at error"):
        tracker(0, train_loss=1.0)


# ------------------------------------------------------------------ the limit on its time


class Clock:
    """Time that passes only as it is told to."""

    now, samples = 0.0, 8

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock, real = Clock(), tracker_module.measure

    def measure(model, x, y, *, quantities, **options):
        m = real(model, x, y, quantities="default", **options)
        seconds = 10 if "hessian_trace" in quantities else 1
        clock.now += seconds * m.probe.n / clock.samples
        return m

    measure.__signature__ = inspect.signature(real)
    monkeypatch.setattr(budget_module, "time", clock)
    monkeypatch.setattr(tracker_module, "measure", measure)
    return clock


@pytest.mark.slow
def test_measuring_stays_within_its_share_of_the_time(clock, tmp_path):
    tracker = Tracker(network(), x, when=every(2), run=tmp_path / "a", max_overhead=0.1)
    measured = 0
    with warnings.catch_warnings(record=True, action="always") as warned:
        for step in range(200):
            clock.now += 0.25
            measured += tracker(step) is not None
            assert measured <= 1 + 0.1 * clock.now
    told = "not measured: over max_overhead=0.1, see tracker.skipped"
    assert [str(w.message) for w in warned] == [told]
    steps = {r["step"] for r in tracker.records} | {s["step"] for s in tracker.skipped}
    assert steps == set(range(0, 200, 2))  # every step that was due is in one of them
    assert measured == len(tracker.records) >= 0.1 * clock.now - 2
    assert {s["why"] for s in tracker.skipped} == {"not measured: over max_overhead"}
    assert not any("time" in name for r in tracker.records for name in r)
    logged = (tmp_path / "a" / "skipped.jsonl").read_text().count("\n")
    assert logged == len(tracker.skipped)


@pytest.mark.slow
def test_dear_quantities_are_left_out_first(clock):
    tracker = Tracker(network(), x, y, when=every(1), quantities="all", max_overhead=0.2)
    with warnings.catch_warnings(record=True, action="always") as warned:
        for step in range(100):
            clock.now += 1
            tracker(step)
    why = [s["why"].split(":")[0] for s in tracker.skipped]
    assert {"fewer quantities", "not measured"} == set(why)
    assert len(warned) == 2
    assert [r["step"] for r in tracker.records] == [0, *range(1, 100, 5)]


many = torch.randn(40, 6, generator=torch.Generator().manual_seed(3))


@pytest.mark.slow
def test_fewer_samples_keep_the_schedule(clock):
    clock.samples = len(many)
    model = network().eval()
    tracker = Tracker(model, many, when=every(4), max_overhead=0.1)
    with warnings.catch_warnings(record=True, action="always") as warned:
        for step in range(40):
            clock.now += 1
            tracker(step)
    first, *others = tracker.records
    assert [r["step"] for r in tracker.records] == list(range(0, 40, 4))  # none is left out
    assert (first["samples"], {r["samples"] for r in others}) == (40, {10})
    assert [s["step"] for s in tracker.skipped] == list(range(4, 40, 4))
    assert [str(w.message)[:34] for w in warned] == ["fewer samples: over max_overhead=0"]
    assert len({r["sharpness"] for r in others}) == 1  # always the same samples
    # the numbers are those of ten of the forty, with their standard error
    whole, (rows, _) = fl.measure(model, many), part_of(torch.arange(40), None)
    assert len(set(rows.tolist())) == 10
    for name in ("sharpness", "nmls", "mls", "local_dimension"):
        of_ten = whole.samples[name][rows]
        assert others[0][name] == pytest.approx(of_ten.mean(), rel=1e-5)
        error = (np.var(of_ten, ddof=1) / 10 * (1 - 10 / 40)) ** 0.5
        assert others[0][f"{name}_se"] == pytest.approx(error, rel=1e-4)
        assert f"{name}_se" not in first


def test_the_standard_error_is_how_far_a_part_is_from_all():
    model, pairs = nn.Linear(6, 3), list(combinations(range(5), 2))
    parts = [fl.measure(model, x[list(pair)]) for pair in pairs]  # every choice of two of five
    errors = [errors_of_part(m, 5)["sharpness_se"] for m in parts]
    assert np.mean(np.square(errors)) == pytest.approx(np.var([m["sharpness"] for m in parts]))


def test_all_samples_come_back_when_only_the_first_measurement_was_slow(clock):
    clock.samples = len(many)
    tracker = Tracker(network(), many, when=every(20), max_overhead=0.1)
    tracker(0)
    tracker.budget.spent[0] = 60.0  # it warmed up
    clock.now += 20
    with pytest.warns(UserWarning, match="fewer samples"):
        tracker(20)
    clock.now += 20
    tracker(40)
    assert [r["samples"] for r in tracker.records] == [40, 10, 40]


def test_few_samples_are_not_made_fewer():
    levels = [
        level.is_part
        for n in (39, 40)
        for level in Tracker(nn.Linear(6, 2), many[:n], max_overhead=0.1).budget.levels
    ]
    assert levels == [False, False, True]


def test_a_part_has_the_targets_of_its_samples():
    inputs, targets = torch.arange(50), 10 * torch.arange(50)
    data = {
        "one batch": (inputs, targets),
        "by name": ({"a": inputs, "b": -inputs, "c": None}, targets.tolist()),
        "batches": ([inputs[:30], inputs[30:]], targets),
        "batches with targets": ([(inputs[:30], targets[:30]), (inputs[30:], targets[30:])], None),
    }
    for name, (x_all, y_all) in data.items():
        x_part, y_part = part_of(x_all, y_all)
        if name == "batches with targets":
            x_part, y_part = (torch.cat(part) for part in zip(*x_part, strict=True))
        elif name == "batches":
            x_part = torch.cat(x_part)
        elif name == "by name":
            assert torch.equal(x_part["b"], -x_part["a"])
            x_part = x_part["a"]
        assert torch.equal(y_part, 10 * x_part), name
        assert len(x_part.unique()) == 13


def test_a_part_without_volume_has_no_error_of_its_logarithm():
    m = fl.measure(nn.Sequential(nn.Linear(6, 1), nn.Linear(1, 3)), many[:10])
    assert m["log_volume"] == -np.inf
    assert np.isnan(errors_of_part(m, 40)["log_volume_se"])


def test_processes_that_share_a_measurement_take_no_limit():
    with pytest.raises(fl.FlatlensError, match="max_overhead"):
        Tracker(network(), x, max_overhead=0.1, distributed=True)


def test_without_a_limit_every_due_step_is_measured(clock):
    tracker = Tracker(network(), x, when=every(1))
    for step in range(5):
        tracker(step)
    assert [r["step"] for r in tracker.records] == [0, 1, 2, 3, 4]
    assert tracker.skipped == []
    assert "samples" not in tracker.records[0]


@pytest.mark.slow
def test_nothing_warns():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Tracker(network(), x, y, when=every(1))(0)
