"""``flatlens zoo`` on folders that ``flatlens train`` wrote."""

import json

import pytest

import flatlens as fl
from flatlens import cli
from flatlens.report.sources import read

TINY = """train --model-options.widths [64,4,10] --steps 2 --measure end --samples 3 --train-size 20
--evaluate 10 --quantities sharpness --quiet""".split()  # noqa: SIM905


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    for seed in "01":
        assert cli.main([*TINY, "--seed", seed, "--out", str(folder / f"runs/{seed}")]) == 0
    return folder


@pytest.mark.slow
def test_trained_runs_are_measured_on_their_test_images(runs, capsys):
    words = ["zoo", "--models", str(runs / "runs"), "--n", "5", "--out", str(runs / "zoo")]
    assert cli.main([*words, "--perturbations", "0", "--json", "--quiet"]) == 0
    frame = fl.read_runs(runs / "zoo")
    assert frame["model"].tolist() == ["runs/0", "runs/1"]
    assert frame["class"].tolist() == ["mlp", "mlp"]
    assert (frame["adaptive_sharpness"] > 0).all()
    assert (runs / "zoo/figure3.pdf").is_file()
    written = (runs / "zoo/runs/0/records.jsonl").read_bytes()
    assert cli.main([*words, "--perturbations", "0", "--quiet"]) == 0
    assert (runs / "zoo/runs/0/records.jsonl").read_bytes() == written
    source = read(runs / "zoo")
    assert source.zoo is not None
    assert source.frames == {}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["{runs}/runs", "vit_tiny_patch16_224"], "give one or the other"),
        (["{runs}/runs", "--images", "."], "measured on their own test images; drop --images"),
        (["{runs}/empty"], "has no run with a checkpoint.safetensors"),
        (["{runs}/runs", "--n", "100000"], "has only"),
        (["{runs}/stranger"], "names the model 'os:getcwd', which is code"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(runs, capsys, words, says):
    (runs / "empty").mkdir(exist_ok=True)
    if not (runs / "stranger").exists():
        (runs / "stranger").mkdir()
        for name in ("records.jsonl", "checkpoint.safetensors"):
            (runs / "stranger" / name).write_bytes((runs / "runs/0" / name).read_bytes())
        content = json.loads((runs / "runs/0/config.json").read_text())
        content["config"] |= {"model": "os:getcwd", "model_options": {}}
        (runs / "stranger/config.json").write_text(json.dumps(content))
    filled = [word.format(runs=runs) for word in words]
    out = runs / "refused"
    assert cli.main(["zoo", "--models", *filled, "--out", str(out)]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert says in output.err
