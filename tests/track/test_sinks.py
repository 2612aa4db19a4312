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
from flatlens.track import Tracker, every, sinks
from flatlens.track.sinks import CSV, MLflow, TensorBoard, WandB

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
    assert set(log.Tags()["scalars"]) == {"sharpness", "log_volume", "eq12.lhs", "train_loss"}
    for name in log.Tags()["scalars"]:
        wanted = [(r["step"], r[name]) for r in RECORDS if name in r]
        found = [(e.step, e.value) for e in log.Scalars(name)]
        assert [step for step, _ in found] == [step for step, _ in wanted]
        singles = [torch.tensor(value).item() for _, value in wanted]  # single precision
        assert all(same(a, b) for (_, a), b in zip(found, singles, strict=True))


# ------------------------------------------------------------------ MLflow


@pytest.fixture
def mlflow(monkeypatch, tmp_path):
    pytest.importorskip("mlflow", reason="needs flatlens[mlflow]")
    pytest.importorskip("sqlalchemy", reason="needs flatlens[mlflow]")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow import MlflowClient

    return MlflowClient


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
    client = mlflow("sqlite:///mlflow.db")
    runs = [client.get_run(sink.run).info for sink in (first, third)]
    assert {run.status for run in runs} == {"FINISHED"}
    assert runs[0].run_id != runs[1].run_id
    (experiment,) = {run.experiment_id for run in runs}
    assert client.get_experiment(experiment).name == "flatlens"
    found = history(client, first.run)
    for name in ("sharpness", "log_volume", "eq12.lhs", "train_loss"):
        wanted = {r["step"]: r[name] for r in RECORDS if name in r}
        wanted = {k: -LARGEST if v == -math.inf else v for k, v in wanted.items()}
        assert found[name].keys() == wanted.keys()
        assert all(same(found[name][k], wanted[k]) for k in wanted)


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
    found = [r.history.item for r in records if r.WhichOneof("record_type") == "history"]
    return [{(i.key or i.nested_key[0]): json.loads(i.value_json) for i in row} for row in found]


def test_wandb_reads_back_offline(monkeypatch, tmp_path):
    wandb = pytest.importorskip("wandb", reason="needs flatlens[wandb]")
    monkeypatch.setenv("WANDB_SILENT", "true")
    written(WandB(project="test", mode="offline", dir=str(tmp_path)))
    wandb.teardown()  # its own process writes the file; at the end of ours it is waited for
    rows = offline_history(tmp_path)
    assert [row["_step"] for row in rows] == [r["step"] for r in RECORDS]
    for row, record in zip(rows, RECORDS, strict=True):
        for name, value in record.items():
            if name != "step":
                assert same(float(row[name]), value)


# ------------------------------------------------------------------ all of them


@pytest.mark.parametrize("sink", [TensorBoard, MLflow, WandB])
def test_an_absent_library_is_named_with_its_extra(monkeypatch, sink):
    def absent(name):
        raise ImportError(name)

    monkeypatch.setattr(sinks.importlib, "import_module", absent)
    extra = sink.__name__.lower()
    with pytest.raises(fl.FlatlensError, match=rf"pip install 'flatlens\[{extra}\]'"):
        sink(*(["folder"] if sink is TensorBoard else []))


def test_nothing_is_opened_before_the_first_record(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    made = [CSV("a.csv")]
    for sink, arguments in ((TensorBoard, ["log"]), (MLflow, []), (WandB, [])):
        try:
            made.append(sink(*arguments))
        except fl.FlatlensError:
            continue
    for sink in made:
        sink.close()
    assert list(tmp_path.iterdir()) == []


def test_a_tracker_writes_to_its_sinks(tmp_path):
    x = torch.ones(4, 3)
    with Tracker(nn.Linear(3, 2), x, when=every(2), sinks=[CSV(tmp_path / "a.csv")]) as tracker:
        for step in range(5):
            tracker(step, train_loss=step / 7)
    table = read_csv(tmp_path / "a.csv")
    assert table.to_dict("records") == tracker.records
