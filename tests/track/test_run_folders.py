"""A script that is run again never fails on its run folder, and a loaded state finds its own."""

import json
import logging

import pytest
import torch
from torch import nn

import flatlens as fl
from flatlens.track import Run, Tracker, every

x = torch.ones(4, 3)


def track(folder, steps=range(3), state=None, **options):
    """Run a script; returns the tracker's state at its end."""
    with Tracker(nn.Linear(3, 2), x, when=every(1), run=folder, **options) as tracker:
        if state is not None:
            tracker.load_state_dict(state)
        for step in steps:
            tracker(step)
        return tracker.state_dict()


def steps(folder):
    with Run.open(folder) as run:
        return [record["step"] for record in run.records]


def test_a_second_run_is_numbered_and_says_so_in_one_line(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="flatlens"):
        states = [track(tmp_path / "a") for _ in range(3)]
    assert [state["run"] for state in states] == ["a", "a-2", "a-3"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "a-2", "a-3"]
    assert [steps(tmp_path / name) for name in ("a", "a-2", "a-3")] == [[0, 1, 2]] * 3
    assert len(caplog.messages) == 2
    assert str(tmp_path / "a-2") in caplog.messages[0]


def test_a_folder_that_is_open_elsewhere_is_numbered_too(tmp_path):
    with Tracker(nn.Linear(3, 2), x, when=every(1), run=tmp_path / "a") as tracker:
        tracker(0)
        assert track(tmp_path / "a")["run"] == "a-2"


def test_nothing_is_written_before_the_first_record(tmp_path):
    with Tracker(nn.Linear(3, 2), x, when=every(10), run=tmp_path / "a") as tracker:
        tracker(1)
        assert tracker.run is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_loaded_state_goes_on_in_its_own_folder(tmp_path):
    state = [track(tmp_path / "a") for _ in range(2)][1]
    track(tmp_path / "a-2", range(3, 5), exist="resume")  # goes on beyond the checkpoint
    track(tmp_path / "a")
    assert track(tmp_path / "a", range(3, 7), state=state)["run"] == "a-2"
    assert steps(tmp_path / "a-2") == list(range(7))
    assert steps(tmp_path / "a") == steps(tmp_path / "a-3") == [0, 1, 2]


def test_a_state_of_another_family_is_refused_and_cuts_nothing(tmp_path):
    state = track(tmp_path / "a")
    track(tmp_path / "b", range(9))
    with pytest.raises(fl.FlatlensError, match="belongs to the run 'a'"):
        track(tmp_path / "b", state=state)
    assert steps(tmp_path / "b") == list(range(9))


def test_rewinding_without_a_name_refuses_to_guess(tmp_path):
    for _ in range(2):
        track(tmp_path / "a")
    tracker = Tracker(nn.Linear(3, 2), x, run=tmp_path / "a")
    with pytest.raises(fl.FlatlensError, match="to which of a, a-2"):
        tracker.rewind(1)
    tracker.rewind(1, "a-2")
    tracker.close()
    assert (steps(tmp_path / "a"), steps(tmp_path / "a-2")) == ([0, 1, 2], [0, 1])


def test_resume_appends(tmp_path):
    track(tmp_path / "a")
    track(tmp_path / "a", range(3, 5), exist="resume")
    assert steps(tmp_path / "a") == [0, 1, 2, 3, 4]


def test_overwrite_replaces_the_run_and_leaves_other_files(tmp_path):
    track(tmp_path / "a", config={"lr": 0.1})
    with Run.open(tmp_path / "a") as run:
        run.finish()
    (tmp_path / "a" / "notes.txt").write_text("mine")
    track(tmp_path / "a", range(5, 7), exist="overwrite", config={"lr": 0.2})
    assert steps(tmp_path / "a") == [5, 6]
    assert (tmp_path / "a" / "notes.txt").read_text() == "mine"
    with Run.open(tmp_path / "a") as run:
        assert run.config["lr"] == 0.2
        assert not run.done


def test_overwrite_leaves_a_run_that_is_being_written(tmp_path):
    with Tracker(nn.Linear(3, 2), x, when=every(1), run=tmp_path / "a") as tracker:
        tracker(0)
        with pytest.raises(fl.FlatlensError, match="open elsewhere"):
            track(tmp_path / "a", exist="overwrite")
    assert steps(tmp_path / "a") == [0]


def test_overwrite_replaces_a_damaged_run(tmp_path):
    track(tmp_path / "a")
    (tmp_path / "a" / "records.jsonl").write_text("{\n")
    track(tmp_path / "a", exist="overwrite")
    assert steps(tmp_path / "a") == [0, 1, 2]


def test_error_refuses(tmp_path):
    track(tmp_path / "a", exist="error")
    with pytest.raises(fl.FlatlensError, match="has records already"):
        track(tmp_path / "a", exist="error")


def test_the_config_and_the_name_of_the_loss_are_stored(tmp_path):
    options = {"config": {"lr": 0.1, "loss": "mine", "widths": [3, 2]}, "loss": "cross_entropy:0.1"}
    track(tmp_path / "a", **options)
    config = json.loads((tmp_path / "a" / "config.json").read_text())["config"]
    assert config == {**options["config"], "measured_loss": "cross_entropy:0.1"}
    frame = fl.read_runs(tmp_path)
    assert set(frame.lr) == {0.1}
    with pytest.raises(fl.FlatlensError, match=r"made with lr=0\.1, not 0\.2"):
        track(tmp_path / "a", exist="resume", **options | {"config": {"lr": 0.2}})


def test_the_precision_of_the_model_is_stored_and_not_mixed_with_another(tmp_path):
    track(tmp_path / "a", config={"lr": 0.1}, precision="model")
    config = json.loads((tmp_path / "a" / "config.json").read_text())["config"]
    expected = {"lr": 0.1, "measured_loss": "half_squared", "measured_precision": "model"}
    assert config == expected
    with pytest.raises(fl.FlatlensError, match="made with measured_precision='model'"):
        track(tmp_path / "a", exist="resume", config={"lr": 0.1})
    track(tmp_path / "b", config={"lr": 0.1})
    with pytest.raises(fl.FlatlensError, match="measured_precision"):
        track(tmp_path / "b", exist="resume", config={"lr": 0.1}, precision="model")


def test_an_unknown_precision_is_refused_before_the_folder_is_made(tmp_path):
    with pytest.raises(fl.FlatlensError, match="precision='half'"):
        track(tmp_path / "a", precision="half")
    assert not list(tmp_path.iterdir())


def test_loss_in_records_follows_the_loss_of_the_tracker():
    net, inputs, targets = nn.Linear(3, 2), torch.randn(4, 3), torch.tensor([0, 1, 1, 0])
    tracker = Tracker(net, inputs, targets, when=every(1), loss="cross_entropy")
    tracker(0)
    expected = nn.functional.cross_entropy(net(inputs), targets).item()
    assert tracker.records[0]["loss"] == pytest.approx(expected, rel=1e-6)


def test_an_open_run_has_its_config_already(tmp_path):
    with (
        Run.open(tmp_path / "a") as run,
        pytest.raises(fl.FlatlensError, match="config belongs to the open run"),
    ):
        Tracker(nn.Linear(3, 2), x, run=run, config={"lr": 0.1})
