"""`flatlens reproduce panel`: trained, measured from snapshots, drawn and drawn again."""

import pandas as pd
import pytest

from flatlens.errors import FlatlensError
from flatlens.figures.panel import panel as draw_panel
from flatlens.report import report
from flatlens.reproduction.archive import read_records
from flatlens.reproduction.experiments import reproduce
from flatlens.training.snapshot_panel import snapshot_panel


@pytest.mark.slow
def test_panel_is_trained_and_drawn_again_from_its_records(tmp_path):
    done = reproduce(["panel"], out=tmp_path, scale="smoke", progress=False, workers=1)
    assert not done.problems
    folder = tmp_path / "panel"
    frames = read_records(folder / "records.jsonl.gz")
    assert set(frames) == {"panel_mlp", "panel_vgg"}
    df = frames["panel_mlp"]
    assert list(df["step"]) == [0, 20, 40]
    assert (df["lambda_max"] > 0).all()
    assert df["stability_limit"].iloc[0] == pytest.approx(2 * 1.9 / 0.1)
    assert {"nc1@input", "participation_ratio@output"} <= set(df.columns)
    again = reproduce(["panel"], out=tmp_path / "again", source=folder / "records.jsonl.gz")
    assert (tmp_path / "again" / "panel" / "panel_vgg.png").is_file()
    assert not again.problems
    page = report(folder, tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Which kind of compression happens when" in page
    assert "participation ratio" in page


def test_a_run_without_snapshots_is_refused(tmp_path):
    with pytest.raises(FlatlensError, match="no snapshots"):
        snapshot_panel(tmp_path)


def test_records_without_the_panel_are_refused():
    with pytest.raises(FlatlensError, match="no column"):
        draw_panel(pd.DataFrame({"step": [0], "train_loss": [1.0]}))
