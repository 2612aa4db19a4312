"""Every sink is read back with the reader of the library it writes for."""

import json
import math
import struct
import sys

import pandas as pd
import pytest
import torch
from torch import nn

import flatlens as fl
from flatlens.track import Tracker, every
from flatlens.track.sinks import CSV, MLflow, TensorBoard, WandB, base

pytestmark = pytest.mark.slow

RECORDS = [
    {"step": 0, "sharpness": 0.1 + 0.2, "log_volume": -math.inf, "eq12.lhs": 5e-324},
    {"step": 200, "sharpness": 1 / 3, "log_volume": math.nan, "eq12.lhs": 1e300},
    {"step": 400, "train_loss": 1e-7, "sharpness": 7.0, "log_volume": -2.5},
]


def same(a, b):
    return (math.isnan(a) and math.isnan(b)) or a == b


def written(sink, records=RECORDS):
    for record in records:
        sink.write(record)
    sink.close()


# ------------------------------------------------------------------ CSV


def read_csv(path):
    exact = {} if int(pd.__version__.split(".")[0]) >= 3 else {"float_precision": "round_trip"}
    return pd.read_csv(path, **exact)


def test_csv_reads_back_in_pandas_bit_for_bit(tmp_path):
    written(CSV(tmp_path / "logs" / "a.csv"))
    table = read_csv(tmp_path / "logs" / "a.csv")
    assert list(table) == ["step", "sharpness", "log_volume", "eq12.lhs", "train_loss"]
    for row, record in zip(table.to_dict("records"), RECORDS, strict=True):
        assert all(same(value, record.get(name, math.nan)) for name, value in row.items())
    assert [p.name for p in (tmp_path / "logs").iterdir()] == ["a.csv"]


def test_csv_goes_on_where_a_training_is_resumed(tmp_path):
    written(CSV(tmp_path / "a.csv"))
    written(CSV(tmp_path / "a.csv"), [{"step": 200, "sharpness": 5.0}, {"step": 300}])
    table = read_csv(tmp_path / "a.csv")
    assert list(table.step) == [0, 200, 300]
    assert list(table.sharpness)[:2] == [0.1 + 0.2, 5.0]


@pytest.mark.parametrize("torn", ["1", "120", "120,0.", '"'])
def test_csv_drops_the_line_that_a_killed_run_left_unfinished(tmp_path, torn):
    written(CSV(tmp_path / "a.csv"))
    with (tmp_path / "a.csv").open("a") as file:
        file.write(torn)
    written(CSV(tmp_path / "a.csv"), [{"step": 1200, "sharpness": 5.0}])
    assert list(read_csv(tmp_path / "a.csv").step) == [*(r["step"] for r in RECORDS), 1200]


# ------------------------------------------------------------------ TensorBoard


def test_tensorboard_reads_back(tmp_path):
    pytest.importorskip("tensorboard", reason="needs flatlens[tensorboard]")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    written(TensorBoard(tmp_path))
    log = EventAccumulator(str(tmp_path))
    log.Reload()
    names = {"sharpness", "log_volume", "eq12.lhs", "train_loss"}
    assert set(log.Tags()["scalars"]) == {f"flatlens/{name}" for name in names}
    for tag in log.Tags()["scalars"]:
        name = tag.removeprefix("flatlens/")
        wanted = [(r["step"], r[name]) for r in RECORDS if name in r]
        logged = [(e.step, e.value) for e in log.Scalars(tag)]
        assert [step for step, _ in logged] == [step for step, _ in wanted]
        singles = [torch.tensor(value).item() for _, value in wanted]  # single precision
        assert all(same(a, b) for (_, a), b in zip(logged, singles, strict=True))


# ------------------------------------------------------------------ MLflow


@pytest.fixture
def mlflow(monkeypatch, tmp_path):
    pytest.importorskip("mlflow", reason="needs flatlens[mlflow]")
    pytest.importorskip("sqlalchemy", reason="needs flatlens[mlflow]")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    import mlflow

    mlflow.set_tracking_uri(None)
    yield mlflow
    while mlflow.active_run():
        mlflow.end_run()
    mlflow.set_tracking_uri(None)


def history(client, run):
    """Step -> value of every metric of a run."""
    names = client.get_run(run).data.metrics
    return {n: {m.step: m.value for m in client.get_metric_history(run, n)} for n in names}


LARGEST = sys.float_info.max  # SQL has no infinities


# MLflow itself uses what SQLAlchemy has deprecated
quiet = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@quiet
def test_mlflow_reads_back_from_a_local_file_by_default(mlflow, tmp_path):
    first = MLflow()
    written(first, RECORDS[:1])
    second = MLflow(f"sqlite:///{tmp_path}/mlflow.db", run=first.run)  # the same file by its name
    written(second, RECORDS[1:])
    third = MLflow()
    written(third, RECORDS[:1])
    client = mlflow.MlflowClient("sqlite:///mlflow.db")
    runs = [client.get_run(sink.run).info for sink in (first, third)]
    assert {run.status for run in runs} == {"FINISHED"}
    assert runs[0].run_id != runs[1].run_id
    (experiment,) = {run.experiment_id for run in runs}
    assert client.get_experiment(experiment).name == "flatlens"
    logged = history(client, first.run)
    for name in ("sharpness", "log_volume", "eq12.lhs", "train_loss"):
        wanted = {r["step"]: r[name] for r in RECORDS if name in r}
        wanted = {k: -LARGEST if v == -math.inf else v for k, v in wanted.items()}
        values = logged[f"flatlens/{name}"]
        assert values.keys() == wanted.keys()
        assert all(same(values[k], wanted[k]) for k in wanted)


@quiet
def test_mlflow_logs_to_the_active_run_in_the_users_store(mlflow, monkeypatch, tmp_path):
    store = f"sqlite:///{tmp_path}/mine/store.db"
    (tmp_path / "mine").mkdir()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    with mlflow.start_run() as active:
        mlflow.log_metric("val_loss", 0.5, step=7)
        sink = MLflow()
        written(sink)
        assert mlflow.active_run().info.run_id == active.info.run_id == sink.run
        client = mlflow.MlflowClient(store)
        assert client.get_run(sink.run).info.status == "RUNNING"
        mlflow.log_metric("val_loss", 0.4, step=8)
    logged = history(client, active.info.run_id)
    assert logged["val_loss"] == {7: 0.5, 8: 0.4}
    assert logged["flatlens/sharpness"] == {r["step"]: r["sharpness"] for r in RECORDS}
    assert {e.name for e in client.search_experiments()} == {"Default"}
    assert {p.name for p in tmp_path.iterdir()} <= {"mine", "mlruns", "mlartifacts"}
    assert not list(tmp_path.glob("*.db"))


@quiet
def test_mlflow_starts_a_run_in_the_store_of_the_environment(mlflow, monkeypatch, tmp_path):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/store.db")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    sink = MLflow()
    written(sink)
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/store.db")
    run = client.get_run(sink.run).info
    assert (run.status, client.get_experiment(run.experiment_id).name) == ("FINISHED", "mine")
    assert [p.name for p in tmp_path.glob("*.db")] == ["store.db"]


# ------------------------------------------------------------------ Weights & Biases


def framed(data, block=1 << 15, head=7):
    """The messages in a log of wandb: checksum, length and kind (whole, first, middle, last)."""
    at, parts = head, []
    while at + head <= len(data):
        if block - at % block < head:  # too little room for a header: zeros up to the next block
            at += block - at % block
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts.append(data[at + head : at + head + length])
        at += head + length
        if kind in (1, 4):
            yield b"".join(parts)
            parts = []


def offline_history(folder):
    """The logged values in the file of an offline run, as wandb's own messages say them.

    (wandb has no reader in Python any more; what is in the file is what `wandb sync` uploads.)
    """
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    records = [Record.FromString(message) for message in framed(file.read_bytes())]
    histories = [r.history.item for r in records if r.WhichOneof("record_type") == "history"]
    return [{(i.key or i.nested_key[0]): json.loads(i.value_json) for i in h} for h in histories]


@pytest.fixture
def wandb(monkeypatch, tmp_path):
    """A wandb that writes to files here, and no run of another test."""
    wandb = pytest.importorskip("wandb", reason="needs flatlens[wandb]")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    yield wandb
    wandb.teardown()  # its own process writes the files; at the end of ours it is waited for


def values_of(rows, name):
    """Value by step: of our own values by our own step, of others by the step of wandb."""
    axis = "flatlens/step" if name.startswith("flatlens/") else "_step"
    return {row[axis]: row[name] for row in rows if name in row}


SHARPNESS = {r["step"]: r["sharpness"] for r in RECORDS}


def test_wandb_reads_back_offline(wandb, tmp_path):
    written(WandB(project="test"))
    assert wandb.run is None  # a run that the sink started is finished by it
    wandb.teardown()
    rows = offline_history(tmp_path)
    assert [row["flatlens/step"] for row in rows] == [r["step"] for r in RECORDS]
    for row, record in zip(rows, RECORDS, strict=True):
        for name, value in record.items():
            assert same(float(row[f"flatlens/{name}"]), value)


def test_wandb_in_the_users_run_loses_nothing_with_per_step_logging(wandb, tmp_path):
    run = wandb.init()
    sink = WandB()
    for step in range(401):
        if step in SHARPNESS:
            sink.write(next(r for r in RECORDS if r["step"] == step))
        wandb.log({"mine": step}, step=step + 1)  # ahead of ours
        if step % 100 == 0:
            wandb.log({"more": step}, step=step + 1)  # the same row once more
    sink.close()
    assert wandb.run is run  # the user's run is not finished
    wandb.log({"mine": 401}, step=402)
    wandb.finish()
    wandb.teardown()
    rows = offline_history(tmp_path)
    assert values_of(rows, "mine") == {step + 1: step for step in range(402)}
    assert values_of(rows, "more") == {step + 1: step for step in range(0, 401, 100)}
    assert values_of(rows, "flatlens/sharpness") == SHARPNESS


@pytest.mark.parametrize("explicit", [True, False])
def test_wandb_loses_nothing_where_the_user_logs_less_often(wandb, tmp_path, explicit):
    """The user counts epochs: wandb drops a row whose step is below its counter."""
    wandb.init()
    sink = WandB()
    records = [{"step": step, "sharpness": step / 7} for step in range(0, 60, 5)]
    for epoch in range(3):
        for record in records[4 * epoch : 4 * epoch + 4]:
            sink.write(record)
        wandb.log({"epoch_loss": epoch / 3}, **({"step": epoch} if explicit else {}))
    sink.close()
    wandb.finish()
    wandb.teardown()
    rows = offline_history(tmp_path)
    assert [row["epoch_loss"] for row in rows if "epoch_loss" in row] == [0, 1 / 3, 2 / 3]
    expected = {r["step"]: r["sharpness"] for r in records}
    assert values_of(rows, "flatlens/sharpness") == expected


def test_wandb_live_writes_rows_of_its_own_at_once(wandb, tmp_path):
    with wandb.init():
        sink = WandB(live=True)
        for record in RECORDS:
            sink.write(record)
            assert not sink._waiting
        wandb.log({"mine": 1.0})
    wandb.teardown()
    rows = offline_history(tmp_path)
    assert values_of(rows, "flatlens/sharpness") == SHARPNESS
    assert values_of(rows, "mine") == {3: 1.0}


def test_wandb_has_an_own_step_metric(wandb, tmp_path):
    from wandb.proto.wandb_internal_pb2 import Record

    written(WandB())
    wandb.teardown()
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    records = [Record.FromString(message) for message in framed(file.read_bytes())]
    metrics = [r.metric for r in records if r.WhichOneof("record_type") == "metric"]
    assert "flatlens/step" in {m.name for m in metrics}
    assert {m.step_metric for m in metrics if m.glob_name == "flatlens/*"} == {"flatlens/step"}


def test_wandb_disabled_is_quiet(wandb):
    with wandb.init(mode="disabled"):
        written(WandB())


# ------------------------------------------------------------------ all of them


@pytest.mark.parametrize("sink", [TensorBoard, MLflow, WandB])
def test_an_absent_library_is_named_with_its_extra(monkeypatch, sink):
    def absent(name):
        raise ImportError(name)

    monkeypatch.setattr(base.importlib, "import_module", absent)
    extra = sink.__name__.lower()
    with pytest.raises(fl.FlatlensError, match=rf"pip install 'flatlens\[{extra}\]'"):
        sink(*(["folder"] if sink is TensorBoard else []))


def test_nothing_is_opened_before_the_first_record(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    opened = [CSV("a.csv")]
    for sink, arguments in ((TensorBoard, ["log"]), (MLflow, []), (WandB, [])):
        try:
            opened.append(sink(*arguments))
        except fl.FlatlensError:
            continue
    for sink in opened:
        sink.close()
    assert list(tmp_path.iterdir()) == []


def test_a_tracker_writes_to_its_sinks(tmp_path):
    x = torch.ones(4, 3)
    with Tracker(nn.Linear(3, 2), x, when=every(2), sinks=[CSV(tmp_path / "a.csv")]) as tracker:
        for step in range(5):
            tracker(step, train_loss=step / 7)
    table = read_csv(tmp_path / "a.csv")
    assert table.to_dict("records") == tracker.records


def test_loggers_get_the_headline_and_files_get_everything(tmp_path):
    lines = []

    class Log(TensorBoard):
        def write(self, record):
            lines.append(self.select(record))

    net, inputs = nn.Linear(3, 2), torch.ones(4, 3)
    sinks = [CSV(tmp_path / "a.csv"), Log(tmp_path / "log")]
    with Tracker(net, inputs, torch.zeros(4, 2), when=every(1), sinks=sinks) as tracker:
        tracker(0, train_loss=0.5)
    names = {"sharpness", "mls", "nmls", "log_volume", "local_dimension", "normalized_mls"}
    sides = {f"{name}.{side}" for name in ("eq11", "eq12") for side in ("lhs", "rhs")}
    assert lines[0].keys() == {
        f"flatlens/{name}" for name in names | sides | {"train_loss", "loss"}
    }
    assert set(read_csv(tmp_path / "a.csv")) == tracker.records[0].keys()
    assert {"volume", "adaptive_sharpness"} < tracker.records[0].keys()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"names": 5}, "names=5"), ({"names": "some"}, "names='some'"), ({"names": [1]}, "names="),
        ({"prefix": 5}, "prefix=5"),
    ],
)  # fmt: skip
def test_a_wrong_selection_is_refused(tmp_path, options, message):
    with pytest.raises(fl.FlatlensError, match=message):
        TensorBoard(tmp_path, **options)
