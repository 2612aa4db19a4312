"""The callbacks in real trainings of the real frameworks, on tiny networks."""

import copy
import importlib
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import flatlens as fl
from flatlens.compat import make_torchvision_importable
from flatlens.track import Tracker, every

make_torchvision_importable()

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
]  # frameworks warn of much that is not ours

x = torch.randn(24, 6, generator=torch.Generator().manual_seed(1))
y = torch.randint(3, (24,), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    ("name", "libraries"),
    [("lightning", ["lightning.pytorch", "pytorch_lightning"]), ("transformers", ["transformers"])],
)
def test_an_absent_library_is_named_with_its_extra(monkeypatch, name, libraries):
    for library in [f"flatlens.track.{name}", *libraries]:
        monkeypatch.delitem(sys.modules, library, raising=False)
    for library in libraries:
        monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(fl.FlatlensError, match=rf"pip install 'flatlens\[{name}\]'"):
        importlib.import_module(f"flatlens.track.{name}")


def steps(tracker):
    return [record["step"] for record in tracker.records]


# ------------------------------------------------------------------ Lightning


@pytest.fixture(scope="module")
def lightning():
    return pytest.importorskip("lightning.pytorch", reason="needs flatlens[lightning]")


def module(lightning, dropout=0.0):
    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(
                nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(dropout), nn.Linear(5, 3)
            )
            self.losses = []

        def forward(self, batch):
            return self.net(batch)

        def training_step(self, batch, _index):
            loss = F.cross_entropy(self(batch[0]), batch[1])
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch, _index):
            self.log("error", (self(batch[0]).argmax(1) != batch[1]).float().mean())

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    lightning.seed_everything(0, verbose=False)
    return Module()


def fit(lightning, model, *callbacks, folder=None, validate=False, resume=None, **options):
    """Six batches an epoch."""
    loader = DataLoader(TensorDataset(x, y), batch_size=4)
    silent = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    trainer = lightning.Trainer(
        accelerator="cpu", default_root_dir=folder, callbacks=list(callbacks),
        **{**dict.fromkeys(silent, False), **options},
    )  # fmt: skip
    trainer.fit(model, loader, loader if validate else None, ckpt_path=resume)
    return trainer


def test_lightning_training_is_bit_identical_and_recorded(lightning, tmp_path):
    from flatlens.track.lightning import TrackerCallback

    plain = module(lightning, dropout=0.5)
    fit(lightning, plain, folder=tmp_path, max_steps=8)
    tracked = module(lightning, dropout=0.5)
    start = copy.deepcopy(tracked)
    tracker = Tracker(tracked, x, y, when=every(3))
    fit(lightning, tracked, TrackerCallback(tracker), folder=tmp_path, max_steps=8)
    assert tracked.losses == plain.losses
    for a, b in zip(tracked.state_dict().values(), plain.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert steps(tracker) == [0, 3, 6]
    assert tracker.records[0]["sharpness"] == fl.measure(start, x, y)["sharpness"]
    # after step k the loss of the k-th batch is known
    assert [r.get("train_loss") for r in tracker.records] == [
        None,
        plain.losses[2],
        plain.losses[5],
    ]


def test_lightning_counts_optimiser_steps_not_batches(lightning, tmp_path):
    from flatlens.track.lightning import TrackerCallback

    model = module(lightning)
    tracker = Tracker(model, x, y, when=every(1))
    callback = TrackerCallback(tracker)
    fit(lightning, model, callback, folder=tmp_path, max_epochs=1, accumulate_grad_batches=2)
    assert steps(tracker) == [0, 1, 2, 3]
    assert len(model.losses) == 6


def test_lightning_resumes_with_its_checkpoint(lightning, tmp_path):
    from lightning.pytorch.callbacks import ModelCheckpoint

    from flatlens.track.lightning import TrackerCallback

    def train(name, epochs, resume=None):
        model = module(lightning)
        saving = ModelCheckpoint(tmp_path / name, "{epoch}", save_top_k=-1, every_n_epochs=1)
        with Tracker(model, x, y, when=every(4), run=tmp_path / name / "run") as tracker:
            fit(
                lightning, model, TrackerCallback(tracker), saving, folder=tmp_path, resume=resume,
                max_epochs=epochs, enable_checkpointing=True,
            )  # fmt: skip
        return (tmp_path / name / "run" / "records.jsonl").read_bytes()

    whole = train("whole", 4)
    assert whole.count(b"\n") == 7  # 0, 4, ..., 24
    train("broken", 3)  # and as if killed in its third epoch: records beyond the checkpoint of two
    assert train("broken", 4, resume=tmp_path / "broken" / "epoch=1.ckpt") == whole


def test_two_lightning_trackers_in_one_training(lightning, tmp_path):
    from flatlens.track.lightning import TrackerCallback

    model = module(lightning)
    names = ("a", "b")
    trackers = [Tracker(model, x, y, when=every(4), run=tmp_path / name) for name in names]
    both = [TrackerCallback(tracker) for tracker in trackers]
    other = TrackerCallback(Tracker(model, x, y, when=every(4)), on="validation")
    trainer = fit(lightning, model, *both, other, folder=tmp_path, max_steps=4)
    assert [steps(tracker) for tracker in trackers] == [[0, 4]] * 2
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    saved = torch.load(tmp_path / "two.ckpt", weights_only=True)["callbacks"]
    assert [len(saved[one.state_key]["records"]) for one in both] == [2, 2]
    for tracker in trackers:
        tracker.close()


class Watched(Tracker):
    """Notes in which modes it was called."""

    def __call__(self, *arguments, **options):
        self.modes = (torch.is_inference_mode_enabled(), torch.is_grad_enabled())
        return super().__call__(*arguments, **options)


def test_lightning_validation_within_training(lightning, tmp_path):
    from flatlens.track.lightning import TrackerCallback

    model = module(lightning)
    tracker = Watched(model, x, y, when=every(1))
    callback = TrackerCallback(tracker, metrics=["error", "absent"], on="validation")
    fit(lightning, model, callback, folder=tmp_path, max_epochs=2, validate=True)
    assert tracker.modes == (False, False)
    assert steps(tracker) == [6, 12]  # not in the sanity check before training
    last = tracker.records[-1]
    assert last["sharpness"] == fl.measure(model, x, y)["sharpness"]
    assert last["error"] == pytest.approx(1 - last["accuracy"] / 100)


def test_lightning_validation_alone_where_inference_mode_is_on(lightning, tmp_path):
    from flatlens.track.lightning import TrackerCallback

    model = module(lightning)
    tracker = Watched(model, x, y, when=every(1))
    trainer = fit(lightning, model, folder=tmp_path, max_epochs=1)
    trainer.callbacks.append(TrackerCallback(tracker, on="validation"))
    trainer.validate(model, DataLoader(TensorDataset(x, y), batch_size=4), verbose=False)
    assert tracker.modes == (True, False)
    assert steps(tracker) == [6]
    assert tracker.records[0]["sharpness"] == fl.measure(model, x, y)["sharpness"]


def test_lightning_hook_of_the_users_own(lightning, tmp_path):
    model = module(lightning)
    tracker = Tracker(model, x, y, when=every(1))
    model.on_validation_epoch_end = lambda: tracker(model.global_step)
    fit(lightning, model, folder=tmp_path, max_epochs=1, validate=True, num_sanity_val_steps=0)
    assert steps(tracker) == [6]


def test_lightning_loggers_get_the_headline(lightning, tmp_path):
    import pandas as pd
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

    from flatlens.track.lightning import TrackerCallback

    pytest.importorskip("tensorboard", reason="needs flatlens[tensorboard]")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    model = module(lightning)
    tracker = Tracker(model, x, y, when=every(3))
    loggers = [CSVLogger(tmp_path, "csv"), TensorBoardLogger(tmp_path, "board")]
    callback = TrackerCallback(tracker)
    trainer = fit(lightning, model, callback, folder=tmp_path, max_steps=8, logger=loggers)
    expected = {r["step"]: r["nmls"] for r in tracker.records}
    table = pd.read_csv(tmp_path / "csv" / "version_0" / "metrics.csv")
    table = table.dropna(subset="flatlens/nmls")
    logged = dict(zip(table.step, table["flatlens/nmls"], strict=True))
    assert logged == pytest.approx(expected)
    assert "flatlens/volume" not in table
    log = EventAccumulator(loggers[1].log_dir)
    log.Reload()
    events = {e.step: e.value for e in log.Scalars("flatlens/nmls")}
    assert events == pytest.approx(expected, rel=1e-6)
    last = trainer.callback_metrics["flatlens/nmls"]
    assert last.item() == pytest.approx(tracker.records[-1]["nmls"], rel=1e-6)


def test_a_lightning_script_can_run_again_and_resume(lightning, tmp_path):
    from lightning.pytorch.callbacks import ModelCheckpoint

    from flatlens.track.lightning import TrackerCallback

    def script(name, epochs=1, resume=None):
        model = module(lightning)
        saving = ModelCheckpoint(tmp_path / name, "last", save_top_k=1)
        with Tracker(model, x, y, when=every(3), run=tmp_path / "run") as tracker:
            fit(
                lightning, model, TrackerCallback(tracker), saving, folder=tmp_path, resume=resume,
                max_epochs=epochs, enable_checkpointing=True,
            )  # fmt: skip
            return tracker.run.folder.name, steps(tracker)

    assert [script(name) for name in "ab"] == [("run", [0, 3, 6]), ("run-2", [0, 3, 6])]
    assert script("c", 2, tmp_path / "b" / "last.ckpt") == ("run-2", [0, 3, 6, 9, 12])


def test_testing_an_earlier_checkpoint_drops_no_records(lightning, tmp_path):
    from lightning.pytorch.callbacks import ModelCheckpoint

    from flatlens.track.lightning import TrackerCallback

    model = module(lightning)
    saving = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1, every_n_epochs=1)
    tracker = Tracker(model, x, y, when=every(3))
    trainer = fit(
        lightning, model, TrackerCallback(tracker), saving, folder=tmp_path, max_epochs=2,
        enable_checkpointing=True,
    )  # fmt: skip
    loader = DataLoader(TensorDataset(x, y), batch_size=4)
    trainer.validate(model, loader, ckpt_path=tmp_path / "epoch=0.ckpt", verbose=False)
    assert steps(tracker) == [0, 3, 6, 9, 12]


def test_lightning_under_its_older_name(tmp_path):
    older = pytest.importorskip("pytorch_lightning", reason="needs pytorch_lightning")
    from flatlens.track.lightning import TrackerCallback

    model = module(older)
    tracker = Tracker(model, x, y, when=every(2))
    fit(older, model, TrackerCallback(tracker), folder=tmp_path, max_steps=5)
    assert steps(tracker) == [0, 2, 4]


# ------------------------------------------------------------------ Transformers


@pytest.fixture(scope="module")
def transformers():
    pytest.importorskip("accelerate", reason="needs flatlens[transformers]")
    return pytest.importorskip("transformers", reason="needs flatlens[transformers]")


tokens = torch.randint(20, (24, 7), generator=torch.Generator().manual_seed(3))


def classifier(transformers):
    """A BERT of two tiny layers, with its dropout."""
    transformers.set_seed(0)
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=12, max_position_embeddings=8, num_labels=3,
        attn_implementation="eager",
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def train(transformers, model, folder, *callbacks, resume=None, max_steps=8, **options):
    data = [{"input_ids": t, "labels": label} for t, label in zip(tokens, y, strict=True)]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=max_steps, per_device_train_batch_size=4, use_cpu=True,
        learning_rate=1e-3, lr_scheduler_type="constant", report_to=[], disable_tqdm=True,
        save_steps=4, dataloader_pin_memory=False, **{"logging_strategy": "no", **options},
    )  # fmt: skip
    trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=list(callbacks))
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def test_transformers_training_is_bit_identical_and_recorded(transformers, tmp_path):
    from flatlens.track.transformers import TrackerCallback

    plain = classifier(transformers)
    train(transformers, plain, tmp_path / "plain")
    tracked = classifier(transformers)
    start = copy.deepcopy(tracked)
    probe = {"input_ids": tokens[:6]}
    tracker = Tracker(tracked, probe, y[:6], when=every(3), output="logits")
    train(transformers, tracked, tmp_path / "tracked", TrackerCallback(tracker))
    for a, b in zip(tracked.state_dict().values(), plain.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert steps(tracker) == [0, 3, 6]
    expected = fl.measure(start, probe, y[:6], output="logits")
    assert tracker.records[0]["sharpness"] == expected["sharpness"]
    assert len({r["sharpness"] for r in tracker.records}) == 3


def test_transformers_resumes_with_its_checkpoint(transformers, tmp_path):
    from flatlens.track.transformers import TrackerCallback

    def records(name, max_steps, resume=None):
        model = classifier(transformers)
        options = {"when": every(3), "output": "logits", "run": tmp_path / name / "run"}
        with Tracker(model, {"input_ids": tokens[:6]}, y[:6], **options) as tracker:
            callback = TrackerCallback(tracker)
            folder = tmp_path / name
            train(transformers, model, folder, callback, resume=resume, max_steps=max_steps)
        return (tmp_path / name / "run" / "records.jsonl").read_bytes()

    whole = records("whole", 10)
    assert whole.count(b"\n") == 4
    records("broken", 7)  # its checkpoint is of step 4, its last record of step 6
    resume = str(tmp_path / "broken" / "checkpoint-4")
    assert records("broken", 10, resume) == whole


def test_transformers_records_the_loss_and_logs_the_headline(transformers, tmp_path):
    from flatlens.track.transformers import TrackerCallback

    options = {"logging_strategy": "steps", "logging_steps": 1, "gradient_accumulation_steps": 2}
    plain = train(transformers, classifier(transformers), tmp_path / "plain", **options)
    model = classifier(transformers)
    tracker = Tracker(model, {"input_ids": tokens[:6]}, y[:6], when=every(3), output="logits")
    callback = TrackerCallback(tracker)
    trainer = train(transformers, model, tmp_path / "tracked", callback, **options)
    history = trainer.state.log_history
    losses = {entry["step"]: entry["loss"] for entry in history if "loss" in entry}
    # the Trainer's own log is complete, also at the steps of the tracker
    assert losses == {e["step"]: e["loss"] for e in plain.state.log_history if "loss" in e}
    assert len(losses) == 8
    recorded = {r["step"]: r["train_loss"] for r in tracker.records if "train_loss" in r}
    assert recorded == pytest.approx({step: losses[step] for step in (3, 6)}, abs=1e-4)
    logged = {e["step"]: e["flatlens/nmls"] for e in history if "flatlens/nmls" in e}
    assert logged == {r["step"]: r["nmls"] for r in tracker.records}
    assert not any("flatlens/volume" in entry for entry in history)
    assert "training_step" not in vars(trainer)  # left as it was


def test_a_transformers_script_can_run_again_and_resume(transformers, tmp_path):
    from flatlens.track.transformers import TrackerCallback

    def script(name, max_steps=4, resume=None):
        model = classifier(transformers)
        options = {"when": every(2), "output": "logits", "run": tmp_path / "run"}
        with Tracker(model, {"input_ids": tokens[:6]}, y[:6], **options) as tracker:
            callback = TrackerCallback(tracker)
            train(
                transformers, model, tmp_path / name, callback, resume=resume, max_steps=max_steps
            )
            return tracker.run.folder.name, steps(tracker)

    assert [script(name) for name in "ab"] == [("run", [0, 2, 4]), ("run-2", [0, 2, 4])]
    resume = str(tmp_path / "b" / "checkpoint-4")
    assert script("b", 6, resume) == ("run-2", [0, 2, 4, 6])


@pytest.mark.parametrize("name", ["lightning", "transformers"])
def test_a_callback_names_a_wrong_argument(name, request):
    request.getfixturevalue(name)
    callback = importlib.import_module(f"flatlens.track.{name}").TrackerCallback
    with pytest.raises(fl.FlatlensError, match="tracker is a int"):
        callback(5)
    with pytest.raises(fl.FlatlensError, match="names=5"):
        callback(Tracker(nn.Linear(6, 3), x), log=5)
