"""`flatlens zoo` as a whole: workers that die, folders of other settings, bad input, dropping."""

import itertools
import math
import warnings

import numpy as np
import pandas as pd
import pytest

from flatlens import FlatlensError, cli, figures
from flatlens.compat import make_torchvision_importable

make_torchvision_importable()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("timm", reason="timm is not installed (pip install 'flatlens[zoo]')")
Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")

from flatlens.capture.inputs import COUPLED  # noqa: E402
from flatlens.runs import Run  # noqa: E402
from flatlens.workers import Engine, Outcome  # noqa: E402
from flatlens.workers.local import LOSSES  # noqa: E402
from flatlens.zoo import measure_model  # noqa: E402
from flatlens.zoo import zoo as zoos  # noqa: E402
from flatlens.zoo.pictures import choose  # noqa: E402
from flatlens.zoo.table import AXES, precise_models  # noqa: E402
from flatlens.zoo.zoo import Zoo, zoo  # noqa: E402

pytestmark = pytest.mark.slow


def pictures(folder, names):
    folder.mkdir()
    for k, name in enumerate(names):
        Image.new("RGB", (8, 8), (k, len(folder.name), 0)).save(folder / name)
    return folder


@pytest.fixture
def images(tmp_path):
    return pictures(tmp_path / "images", [f"{k:03}_a.png" for k in range(4)])


@pytest.fixture
def settings(images):
    return Zoo(str(images), 2, "random")


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def done(out, settings, model, **values):
    """A model that was measured."""
    axes = {f"{a}{e}": v for a in AXES for e, v in (("", 1.0), ("_se", 0.1))}
    with Run.open(out / model, settings.identity(model)) as run:
        run.append({"step": 0, "class": "test", **axes, "spectra_converged": True, **values})
        run.finish()


@pytest.fixture
def nothing_runs(monkeypatch):
    monkeypatch.setattr(zoos, "run_model", None)
    monkeypatch.setattr(zoos, "open_engine", None)


# --- workers that die


class Lost:
    def result(self):
        raise RuntimeError("the pool is broken")


class Fine:
    def result(self):
        return Outcome("done")


@pytest.mark.parametrize("order", list(itertools.permutations(["good", "bad", "other"])))
def test_a_model_beside_one_that_kills_its_process_is_measured(order, settings, tmp_path):
    """Two at a time; where `bad` runs, the pool breaks and all that runs is lost."""
    running, started = {}, []

    class Future:
        def result(self):
            return results[self].result()

    def submit(_, name, *task):
        future = Future()
        running[future] = name
        started.append((name, sorted(running.values())))
        return future

    def wait(futures):
        broken = "bad" in running.values()
        found = {f: Lost() if broken else Fine() for f in (futures if broken else futures[:1])}
        for f in found:
            del running[f]
        results.update(found)
        return list(found)

    results = {}
    engine = Engine(submit, wait, 2, LOSSES)
    found = dict(zoos._outcomes(order, settings, engine, tmp_path, False))
    assert {name: outcome.status for name, outcome in found.items()} == {
        "good": "done",
        "other": "done",
        "bad": "lost",
    }
    assert [beside for name, beside in started if name == "bad"][1:] == [["bad"]] * LOSSES
    assert "was killed" in (tmp_path / "bad" / zoos.SKIPPED).read_text()


# --- one folder, one kind of records


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"outputs": "logits"}, "outputs='sigmoid', not 'logits'"),
        ({"n": 4}, "n=2, not 4"),
        ({"seed": 3}, "seed=0, not 3"),
        ({"source": "pretrained"}, "random weights"),
        ({"images": None}, "other images"),
    ],
)
def test_records_of_other_settings_are_not_mixed(other, says, settings, out, nothing_runs):
    done(out, settings, "test_vit")
    if "images" in other:
        other = {"images": str(pictures(out.parent / "more", ["000_x.png", "001_y.png"]))}
    with pytest.raises(FlatlensError, match=rf"test_vit was made with {says}"):
        zoo(["test_vit2"], Zoo(**{**vars(settings), **other}), out=out)
    assert not (out / "test_vit2").exists()


def test_weights_of_several_origins_share_a_folder(settings, out, tmp_path):
    hub = Zoo(**{**vars(settings), "source": "pretrained"})
    done(out, hub, "test_vit")
    (tmp_path / "test_vit2.pth").write_bytes(b"weights")
    Zoo(**{**vars(settings), "source": str(tmp_path)}).check_folder(out)


def test_a_folder_of_other_runs_is_refused(settings, out, nothing_runs):
    Run.open(out / "mlp", {"lr": 0.1, "model": "mlp"}).close()
    with pytest.raises(FlatlensError, match="mlp is not a run of a zoo"):
        zoo(["test_vit"], settings, out=out)


# --- bad input


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--device", "foo"], "Cannot compute on device 'foo'"),
        (["--device", "cuda:99"], "Cannot compute on device 'cuda:99'"),
        (["--weights", "nofolder"], "nofolder is not a folder"),
        (["--weights", "nofolder", "--list"], "nofolder is not a folder"),
    ],
)
def test_bad_input_is_one_sentence_before_anything_runs(
    words, says, images, out, nothing_runs, capsys
):
    start = ["zoo", "--random", "--images", str(images), "--n", "2", "--out", str(out)]
    assert cli.main([*start, "--models", "test_vit", *words]) == cli.BAD_INPUT
    told = capsys.readouterr()
    assert told.out == ""
    assert len(told.err.splitlines()) == 1
    assert says in told.err
    assert not out.exists()


def test_a_device_of_dask_workers_need_not_be_here(settings):
    Zoo(**{**vars(settings), "device": "cuda:99"}).check("dask")
    with pytest.raises(FlatlensError, match="on device 'foo'"):
        Zoo(**{**vars(settings), "device": "foo"}).check("dask")


def test_numbers_that_are_no_classes_are_no_labels(tmp_path):
    names = ["2024_0.png", "1000_1.png"]
    assert choose(pictures(tmp_path / "dates", names), 2)[1] is None
    assert choose(pictures(tmp_path / "999_cat", names), 2)[1] == [999, 999]


def test_the_sharpness_of_the_paper_needs_classes(tmp_path, out, nothing_runs):
    folder = pictures(tmp_path / "photos", ["a.png", "b.png"])
    with pytest.raises(FlatlensError, match=r"Eq. 46 of the paper needs the classes .*photos"):
        zoo(["test_vit"], Zoo(str(folder), 2, "random", paper=True), out=out)


@pytest.mark.parametrize("max_se", [0.0, -1.0, math.nan])
def test_a_limit_that_drops_everything_is_refused(max_se):
    with pytest.raises(FlatlensError, match="give a number above 0"):
        precise_models(pd.DataFrame({"model": []}), max_se)


# --- what is dropped


def test_a_model_that_did_not_converge_is_dropped_and_reported(settings, out, capsys, nothing_runs):
    models = ["test_vit", "test_vit2", "test_vit3", "test_efficientnet"]
    for k, model in enumerate(models):
        done(out, settings, model, adaptive_sharpness=1.0 + k / 10, spectra_converged=k != 1)
    words = ["zoo", "--random", "--images", settings.images, "--n", "2", "--out", str(out)]
    words += ["--models", *models]
    assert cli.main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "dropped test_vit2: Lanczos did not converge" in lines
    assert not [line for line in lines if line.startswith("test_vit2")]
    assert (out / "figure3.pdf").exists()
    assert (out / "figure3.png").exists()
    assert cli.main([*words, "--max-se", "0.01"]) == 0
    assert not list(out.glob("figure3.*"))  # of models that are dropped now
    assert cli.main([*words, "--max-se", "0"]) == cli.BAD_INPUT


def test_one_model_is_drawn_and_the_missing_correlation_explained(
    settings, out, capsys, nothing_runs
):
    done(out, settings, "test_vit")
    words = ["zoo", "--random", "--images", settings.images, "--n", "2", "--out", str(out)]
    assert cli.main([*words, "--models", "test_vit"]) == 0
    assert "no correlation, because 1 model is too few; it needs 8." in capsys.readouterr().out
    assert (out / "figure3.pdf").exists()


def test_eight_models_have_a_correlation(settings, out, capsys, nothing_runs):
    for k in range(8):
        done(out, settings, f"m{k}", adaptive_sharpness=1.0 + k, adaptive_sharpness_se=0.01)
    done(out, settings, "test_vit")
    words = ["zoo", "--random", "--images", settings.images, "--n", "2", "--out", str(out)]
    assert cli.main([*words, "--models", "test_vit"]) == 0
    assert "no correlation" not in capsys.readouterr().out


def test_a_user_s_figure_is_neither_deleted_nor_replaced(settings, out, capsys, nothing_runs):
    done(out, settings, "test_vit")
    words = ["zoo", "--random", "--images", settings.images, "--n", "2", "--out", str(out)]
    (out / "figure3.svg").write_text("mine")
    assert cli.main([*words, "--models", "test_vit"]) == 0
    assert cli.main([*words, "--models", "test_vit"]) == 0  # replaces its own figure
    assert (out / "figure3.svg").read_text() == "mine"
    (out / "figure3.png").write_bytes(b"mine")
    capsys.readouterr()
    assert cli.main([*words, "--models", "test_vit"]) == 2
    assert "figure3.png was not written by flatlens zoo" in capsys.readouterr().err
    zoo(["test_vit"], settings, out=out)
    assert (out / "figure3.png").read_bytes() == b"mine"
    assert not (out / "figure3.pdf").exists()


def test_a_skipped_model_gives_no_advice_that_a_zoo_cannot_follow():
    message = 'Lanczos needs a derivative that this network lacks (x); use method="exact"'
    assert zoos._without_advice(message) == (
        "Lanczos needs a derivative that this network lacks (x)."
    )


def test_the_figure_leaves_out_what_did_not_converge():
    k = np.arange(1.0, 7)
    frame = pd.DataFrame({
        "model": k, "class": list("aabbcc"), "adaptive_sharpness": k, "normalized_mls": k,
        "spectra_converged": [True, True, False, True, None, True],
    })  # fmt: skip
    figure = figures.zoo(frame)
    title = figure.legends[0].get_title().get_text()
    assert "5 models of 3 classes" in title
    assert "1 left out, not converged" in title
    assert list(
        precise_models(frame.assign(adaptive_sharpness_se=0, normalized_mls_se=0), None)[1]
    ) == [3.0]
    with pytest.raises(FlatlensError, match="3 models or more"):
        figures.zoo(frame.assign(spectra_converged=False))


def test_images_that_change_one_another_are_measured_one_at_a_time(settings, monkeypatch):
    tried = []

    def record(model, settings, chunk, offline=False):
        tried.append(chunk)
        if chunk != 1:
            raise FlatlensError(COUPLED)
        return {"step": 0}

    monkeypatch.setattr(measure_model, "record", record)
    assert measure_model.record_with_memory("gcvit", settings, None, True) == {"step": 0}
    assert tried == [None, 2, 1]
