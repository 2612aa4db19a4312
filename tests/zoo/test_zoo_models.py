"""`flatlens zoo`: three tiny models end to end, what is skipped, and what the models need."""

import json
import math
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import flatlens as fl
from flatlens import FlatlensError, cli, figures
from flatlens.analysis.model_trend import outliers, rank_correlation, trend
from flatlens.compat import make_torchvision_importable
from flatlens.reproduction.zoo_claims import claims

make_torchvision_importable()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    timm = pytest.importorskip("timm", reason="timm is not installed (pip install 'flatlens[zoo]')")
Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")

from flatlens.training import networks as models  # noqa: E402
from flatlens.training import timm_models  # noqa: E402
from flatlens.workers import engines  # noqa: E402
from flatlens.zoo import measure_model, pictures  # noqa: E402
from flatlens.zoo import zoo as zoos  # noqa: E402
from flatlens.zoo.table import precise_models  # noqa: E402
from flatlens.zoo.zoo import Zoo, zoo  # noqa: E402

pytestmark = pytest.mark.slow

MODELS = ["test_vit", "test_vit3", "test_efficientnet"]  # attention; relative positions; BatchNorm
N = 3


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    draw = np.random.default_rng(0)
    for k in range(N):
        pixels = draw.integers(0, 256, (40, 50, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((200, 180)).save(folder / f"{k:03}_picture.png")
    return folder


@pytest.fixture(scope="module")
def settings(images) -> Zoo:
    return Zoo(str(images), N, "random", directions=2, perturbations=2)


@pytest.fixture(scope="module")
def runs(settings, tmp_path_factory):
    """The smoke zoo, with a model in it that cannot be built."""
    out = tmp_path_factory.mktemp("zoo")
    return out, zoo(MODELS, settings, out=out, workers=1)


# --- one record per model


def test_three_models_are_measured(runs):
    out, frame = runs
    assert frame.attrs["skipped"] == {}
    assert sorted(frame["model"]) == sorted(MODELS)
    for row in frame.to_dict("records"):
        model = timm.create_model(row["model"])
        assert row["parameters"] == sum(p.numel() for p in model.parameters())
        tensors = sum(row[f"tensors_{path}"] for path in ("layer", "rule", "slow"))
        assert tensors == len(list(model.parameters()))
        assert row["tensors_unused"] == 0
        assert 0 <= row["top1"] <= 100
        for name in (*measure_model.QUANTITIES, "adaptive_sharpness_sampled"):
            assert math.isfinite(row[name])
            assert row[f"{name}_se"] > 0
        assert not (out / row["model"] / zoos.SKIPPED).exists()


def test_numbers_are_those_of_a_brute_force_jacobian(runs, settings):
    """Two directions estimate S without bias, so its ratio to the truth is checked loosely; the
    MLS comes from Lanczos and must be right."""
    _, frame = runs
    row = frame.set_index("model").loc["test_vit"]
    torch.manual_seed(settings.seed)
    model = timm.create_model("test_vit").eval()
    prepare, _ = timm_models.transform(model)
    files, labels = pictures.choose(Path(settings.images), N)
    assert sorted(labels) == list(range(N))
    x = torch.stack([prepare(Image.open(f).convert("RGB")) for f in files])
    found = []
    for one in x:
        leaf = one[None].clone().requires_grad_()
        h = model.forward_head(model.forward_features(leaf), pre_logits=True)
        rows = [torch.autograd.grad(v, leaf, retain_graph=True)[0].flatten() for v in h[0]]
        f = torch.sigmoid(model.head(h)).detach()[0]
        head = (f * (1 - f))[:, None].double() * model.head.weight.detach().double()
        R = torch.linalg.qr(torch.stack(rows).double().mT, mode="r").R  # the rows are R^T Q^T
        found.append(float(torch.linalg.matrix_norm(head @ R.mT, 2)))
    squares = x.double().flatten(1).square().sum(1).numpy() * np.square(found)
    assert row["mls"] == pytest.approx(np.mean(found), rel=1e-3)
    assert row["normalized_mls"] == pytest.approx(squares.mean(), rel=2e-3)
    assert row["normalized_mls_se"] == pytest.approx(squares.std(ddof=1) / N**0.5, rel=1e-2)
    with torch.no_grad():
        right = model(x).argmax(1) == torch.tensor(labels)
    assert row["top1"] == pytest.approx(100 * float(right.double().mean()))


def test_order_and_process_do_not_matter(runs, settings, tmp_path):
    out, _ = runs
    for model in reversed(MODELS):
        outcome = zoos.run_model(model, vars(settings), str(tmp_path), "none", None, False)
        assert outcome.status == "done"
        records = (out / model / "records.jsonl").read_bytes()
        assert outcome.files["records.jsonl"] == records  # no token: sent back, as by a far worker


def test_the_engine_dask_gives_the_same_records(runs, settings, tmp_path):
    pytest.importorskip("distributed")
    out, frame = runs
    again = zoo(MODELS, settings, out=tmp_path, engine="dask", workers=1)
    pd.testing.assert_frame_equal(again, frame)
    for model in MODELS:
        records = [folder / model / "records.jsonl" for folder in (out, tmp_path)]
        assert records[0].read_bytes() == records[1].read_bytes()


def test_a_zoo_goes_on_where_it_was(runs, settings, monkeypatch):
    out, frame = runs
    monkeypatch.setattr(zoos, "run_model", None)  # nothing is left to do
    again = zoo(list(reversed(MODELS)), settings, out=out)
    pd.testing.assert_frame_equal(again, frame)
    other = Zoo(settings.images, N, "random", directions=3)
    with pytest.raises(FlatlensError, match=r"was made with directions=2, not 3"):
        zoo(MODELS, other, out=out)


def test_the_estimators_of_the_paper(settings):
    values = {**vars(settings), "paper": True, "perturbations": 0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure_model, "PAPER", {"perturbations": 2, "antithetic": False})
        found = measure_model.record("test_efficientnet", Zoo(**values), None)
    assert "adaptive_sharpness_sampled" not in found
    assert found["adaptive_sharpness_paper_se"] > 0
    assert found["normalized_mls_paper"] > 0


# --- which models, which weights


def test_filters_are_those_of_the_paper():
    names = timm_models.select(["*vit*"], "pretrained")
    assert len(names) > 181  # the paper's, before it dropped those with large errors
    assert not [n for n in names if n.startswith("test_")]
    for name in names:
        cfg = timm.models.get_pretrained_cfg(name)
        assert cfg.num_classes == 1000
        assert max(cfg.input_size[1:]) <= 384
    assert timm_models.select(["test_vit"], "random") == ["test_vit"]  # in full: as it is
    with pytest.raises(FlatlensError, match="do you mean test_vit"):
        timm_models.select(["tst_vit"], "random")
    with pytest.raises(FlatlensError, match="timm has no weights nobody"):
        timm_models.select(["test_vit.nobody"], "pretrained")
    with pytest.raises(FlatlensError, match=r"No model of timm matches \*nothing\*"):
        timm_models.select(["*nothing*"], "random")


def test_classes_of_models():
    names = {
        "vit_base_patch16_224.augreg_in21k": "vit",
        "vit_relpos_small_patch16_224": "vit_relpos",
        "efficientvit_b0": "efficientvit_mit",
        "efficientvit_m0": "efficientvit_msra",
        "mobilevitv2_050": "mobilevitv2",
        "mobilevit_s": "mobilevit",
        "tiny_vit_5m_224": "tiny_vit",
        "maxvit_tiny_tf_224": "maxvit",
        "deit3_small_patch16_224": "deit3",
    }
    assert {name: timm_models.family(name) for name in names} == names


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_local_weights_are_loaded_bit_for_bit(tmp_path, suffix):
    from safetensors.torch import save_file

    torch.manual_seed(7)
    state = {k: torch.randn_like(v) for k, v in timm.create_model("test_vit").state_dict().items()}
    (save_file if suffix == ".safetensors" else torch.save)(state, tmp_path / f"test_vit{suffix}")
    model = timm_models.build("test_vit", str(tmp_path))
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name])
    with pytest.raises(FlatlensError, match="has no weights of test_vit2"):
        timm_models.build("test_vit2", str(tmp_path))
    (tmp_path / "test_vit2.pth").write_bytes(b"no weights at all")
    with pytest.raises(FlatlensError, match=r"Cannot load .*test_vit2.pth of test_vit2"):
        timm_models.build("test_vit2", str(tmp_path))


def test_only_what_has_weights_matches_a_wildcard(tmp_path):
    torch.save({}, tmp_path / "levit_128s.pth")
    assert timm_models.select(["*vit*"], str(tmp_path)) == ["levit_128s"]


# --- timm:NAME, a model like any other


def test_a_model_of_timm_is_built_from_the_global_generator():
    options = {"num_classes": 3, "img_size": 32}
    torch.manual_seed(5)
    model = models.build("timm:test_vit", **options)
    torch.manual_seed(5)
    expected = timm.create_model("test_vit", **options).state_dict()
    assert model.training
    assert model.state_dict().keys() == expected.keys()
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name])
    assert model.eval()(torch.zeros(2, 3, 32, 32)).shape == (2, 3)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("timm:tst_vit", r"timm has no model 'tst_vit'; do you mean test_vit or test_vit.*\?"),
        ("timm:", r"timm has no model ''\."),
        ("timm:test_vit.nobody", r"timm has no weights nobody for test_vit\."),
    ],
)
def test_a_model_that_timm_has_not_is_refused_in_one_sentence(name, told):
    with pytest.raises(FlatlensError, match=f"^{told}$"):
        models.build(name)


def test_an_option_that_timm_has_not_is_reported():
    with pytest.raises(TypeError) as caught:
        models.build("timm:test_vit", width=3)
    assert "'timm:test_vit': TypeError: VisionTransformer.__init__()" in caught.value.sentence


def test_a_model_of_timm_is_measured(tmp_path, capsys):
    x = np.random.default_rng(0).normal(size=(2, 3, 160, 160)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x, y=np.arange(2))
    torch.manual_seed(5)
    model = timm.create_model("test_vit")
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    words = ["measure", "timm:test_vit", "--data", f"npz:{tmp_path}/data.npz", "--json"]
    words += ["--checkpoint", f"{tmp_path}/weights.pt", "--method", "sketch", "--directions", "2"]
    assert cli.main(words) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["N"] == 1000
    m = fl.measure(model, torch.from_numpy(x), method="sketch", directions=2)
    assert told["quantities"]["sharpness"] == pytest.approx(m["sharpness"], rel=1e-6)


def test_a_model_of_timm_is_trained(tmp_path, capsys):
    draw = np.random.default_rng(0)
    np.savez(tmp_path / "data.npz", x=draw.normal(size=(8, 3, 32, 32)), y=np.arange(8) % 2)
    words = ["train", "--model", "timm:test_vit", "--data", f"npz:{tmp_path}/data.npz"]
    words += ["--model-options.num_classes", "2", "--model-options.img_size", "32"]
    words += ["--steps", "2", "--samples", "2", "--quantities", "sharpness", "--measure", "end"]
    assert cli.main([*words, "--out", str(tmp_path / "run"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sharpness"] > 0


# --- what goes wrong


def test_without_a_network_each_model_gives_one_line(images, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(zoos, "reachable", lambda: False)
    monkeypatch.setattr(engines, "local_engine", _here)
    words = ["zoo", "--images", str(images), "--n", "2", "--out", str(tmp_path), "--models"]
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert cli.main([*words, "test_vit", "test_vit2"]) == cli.FAILED
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        f"skipped {name}: Cannot load pretrained weights of {name}: there is no network, and the "
        "hub's cache does not have them."
        for name in ("test_vit", "test_vit2")
    ]
    assert "no network" in (tmp_path / "test_vit" / zoos.SKIPPED).read_text()


class _Now:
    """A future that has happened."""

    def __init__(self, value):
        self.value = value

    def result(self):
        return self.value


def _here(workers):
    """An engine of this very process."""
    from contextlib import nullcontext

    from flatlens.workers import Engine

    return nullcontext(Engine(lambda f, *task: _Now(f(*task)), lambda futures: futures, 1, 0))


def test_a_failing_model_stops_nobody(settings, tmp_path, monkeypatch):
    whole = measure_model.record

    def record(model, settings, chunk, offline=False):
        if model == "test_vit2":
            raise IndexError("this model is broken")
        return whole(model, settings, chunk, offline)

    monkeypatch.setattr(measure_model, "record", record)
    monkeypatch.setattr(engines, "local_engine", _here)
    frame = zoo(["test_vit2", "test_efficientnet"], settings, out=tmp_path)
    assert list(frame["model"]) == ["test_efficientnet"]
    assert frame.attrs["skipped"] == {"test_vit2": "IndexError: this model is broken"}
    assert "Traceback" in (tmp_path / "test_vit2" / zoos.SKIPPED).read_text()


@pytest.mark.parametrize("fits", [1, 0])
def test_out_of_memory_takes_fewer_images_at_a_time(settings, tmp_path, monkeypatch, fits):
    tried = []

    def record(model, settings, chunk, offline=False):
        tried.append(chunk)
        if chunk is None or chunk > fits:
            try:
                raise RuntimeError("DefaultCPUAllocator: not enough memory: you tried ...")
            except RuntimeError as error:
                raise FlatlensError("the model fails on 5 samples of this input") from error
        return {"step": 0}

    monkeypatch.setattr(measure_model, "record", record)
    outcome = zoos.run_model("test_vit", vars(settings), str(tmp_path), "none", None, False)
    assert tried == [None, 2, 1]
    assert outcome.status == ("done" if fits else "refused")
    assert fits or "Memory is too short for test_vit, even for one image" in outcome.error


def test_bad_images_are_reported_before_anything_runs(tmp_path):
    with pytest.raises(FlatlensError, match="is not a folder"):
        zoo(["test_vit"], Zoo(str(tmp_path / "none"), 2, "random"), out=tmp_path)
    with pytest.raises(FlatlensError, match=r"2 images were asked for, but .* has only 0"):
        zoo(["test_vit"], Zoo(str(tmp_path), 2, "random"), out=tmp_path / "runs")
    for k in range(2):
        (tmp_path / f"{k}_torn.png").write_bytes(b"\x89PNG")
    with pytest.raises(FlatlensError, match=r"Cannot read .*_torn.png"):
        zoo(["test_vit"], Zoo(str(tmp_path), 2, "random"), out=tmp_path / "runs")


def test_pictures_without_class_numbers_have_no_labels(tmp_path):
    for name in ("a.png", "b.png"):
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    assert pictures.choose(tmp_path, 2)[1] is None
    (tmp_path / "7").mkdir()
    for name in ("a.png", "b.png"):
        (tmp_path / name).rename(tmp_path / "7" / name)
    assert pictures.choose(tmp_path, 2)[1] == [7, 7]


@pytest.mark.parametrize(
    "wrong",
    [{"outputs": "softmax"}, {"directions": 1}, {"perturbations": 1}, {"n": 1}, {"rho": 0.0}],
)
def test_settings_are_checked(wrong):
    with pytest.raises(FlatlensError):
        Zoo(images="x", **wrong)


# --- the command and the figure


def test_the_command(runs, settings, capsys):
    out, _ = runs
    words = ["zoo", "--random", "--images", settings.images, "--n", str(N), "--out", str(out)]
    words += ["--directions", "2", "--perturbations", "2", "--models", *MODELS]
    assert cli.main([*words, "--max-se", "100", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert sorted(told["models"]) == sorted(MODELS)
    assert (out / "figure3.png").exists()
    assert told["figure"] == str(out / "figure3.pdf")
    assert told["notes"] == ["There is no correlation, because 3 models are too few; it needs 8."]
    assert "claims" not in told
    assert cli.main([*words, "--max-se", "1e-9"]) == 0
    *lines, note = capsys.readouterr().out.splitlines()
    assert all(line.startswith("dropped test_") for line in lines)
    assert len(lines) == len(MODELS)
    assert note.startswith("There is no figure, because no model is left")
    assert cli.main(["zoo", "--models", "test_vit"]) == cli.BAD_INPUT
    assert "--images" in capsys.readouterr().err


def test_the_list(capsys):
    assert cli.main(["zoo", "--random", "--list", "--models", "test_vit", "efficientvit_b0"]) == 0
    head, *lines = (line.split() for line in capsys.readouterr().out.splitlines())
    assert head == ["model", "class", "parameters", "pixels", "memory", "time"]
    assert lines[0][:4] == ["test_vit", "test", "371,240", "160"]
    assert len(lines) == 2


def test_standard_errors_decide_who_is_kept():
    frame = pd.DataFrame({
        "model": ["a", "b", "c"],
        "normalized_mls": [1.0, 1.0, 1.0],
        "normalized_mls_se": [0.1, 0.2, 0.1],
        "adaptive_sharpness": [2.0, 2.0, 2.0],
        "adaptive_sharpness_se": [0.2, 0.2, 0.4],
    })  # fmt: skip
    good, dropped = precise_models(frame, 0.15)
    assert list(good["model"]) == ["a"]
    assert dropped == pytest.approx({"b": 0.2, "c": 0.2})


def test_the_figure_names_what_lies_off_the_trend():
    draw = np.random.default_rng(0)
    a = draw.normal(size=60)
    b = 2 * a + 0.1 * draw.normal(size=60)
    classes = np.array([f"c{k % 10}" for k in range(60)])
    b[classes == "c3"] += 3
    slope, _ = trend(a, b)
    assert slope == pytest.approx(2, abs=0.2)
    assert [name for name, _, _ in outliers(a, b, classes)] == ["c3"]
    frame = pd.DataFrame({
        "model": range(60), "class": classes, "adaptive_sharpness": 10**a,
        "normalized_mls": 10**b, "normalized_mls_se": 0.1 * 10**b,
    })  # fmt: skip
    figure = figures.zoo(frame)
    assert "c3" in [t.get_text() for t in figure.axes[0].texts]
    assert "60 models of 10 classes" in figure.legends[0].get_title().get_text()
    with pytest.raises(FlatlensError, match="3 models or more"):
        figures.zoo(frame[:2])


def test_the_claims_on_figure_3_are_judged():
    k = np.linspace(0, 1, 60)
    classes = np.array([f"c{i % 10}" for i in range(60)], dtype="<U12")
    classes[[5, 10]], classes[[50, 55]] = "mobilevit", "fastvit"
    off = 0.5 * np.isin(classes, ["mobilevit"]) - 0.5 * np.isin(classes, ["fastvit"])

    def judged(b, names=classes):
        columns = {"class": names, "adaptive_sharpness": 10**k, "normalized_mls": 10**b}
        return claims(pd.DataFrame({"model": range(60), **columns}))

    found = judged(k + off)
    assert found["V1"]["verdict"] == found["V2"]["verdict"] == "supported"
    assert found["V2"]["found"] == "2 of 2 MobileViT upper left, 2 of 2 FastViT lower right"
    turned = judged(-k - off)
    assert turned["V1"]["verdict"] == turned["V2"]["verdict"] == "not supported"
    assert judged(k + off, ["c0"] * 60)["V2"]["verdict"] == "inconclusive"  # none of either
    assert judged(np.cos(40 * k))["V1"]["verdict"] == "inconclusive"


def test_variants_of_one_class_are_not_independent():
    """Ten copies of each of four points: over models the interval is narrow, over classes wide."""
    a = np.repeat([1.0, 2.0, 3.0, 4.0], 10)
    b = np.repeat([1.0, 3.0, 2.0, 4.0], 10)
    names = np.repeat(list("wxyz"), 10)
    over, models = rank_correlation(a, b, names), rank_correlation(a, b)
    assert over.value == models.value == pytest.approx(0.8)
    assert over.high - over.low > 2 * (models.high - models.low)


# --- what models of the zoo need of a probe


def test_a_sketch_without_layers_looks_at_the_input_alone():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(6, 50), nn.Tanh(), nn.Linear(50, 40), nn.Tanh(), nn.Linear(40, 30)
    )
    net, x = net.double(), torch.randn(3, 6).double()
    whole = fl.probe(net, x)
    options = {"directions": 4, "tolerance": 1e-10, "top": 1}
    p, q = fl.sketch(net, x, layers=False, **options), fl.sketch(net, x, **options)
    assert p.sketch is not None
    assert fl.mls(p) == pytest.approx(fl.mls(whole), rel=1e-8)
    for metric in (fl.sharpness, fl.adaptive_sharpness, fl.input_invariant_mls):
        assert metric(p) == metric(q)
    assert p.sketch.errors["sharpness"] == q.sketch.errors["sharpness"]
    assert math.isnan(fl.nmls(p))
    assert math.isnan(fl.local_dimension(p))
    assert {b.verdict for b in fl.bounds(p) if b.name == "eq12"} == {"not applicable"}


class Standardised(nn.Conv2d):
    """timm's StdConv2d: the weight is normalised by batch_norm, which sees no data."""

    def forward(self, x):
        flat = self.weight.reshape(1, self.out_channels, -1)
        weight = F.batch_norm(flat, None, None, training=True, momentum=0.0, eps=1e-6)
        return F.conv2d(x, weight.reshape_as(self.weight), self.bias)


class Tokens(nn.Module):
    def forward(self, x):
        return x.flatten(2).transpose(1, 2).contiguous().sin().flatten(1)


def shares(net, x):
    """S of each sample by plain backward passes."""
    found = []
    for one in x:
        f = net(one[None])[0]
        grads = [torch.autograd.grad(v, list(net.parameters()), retain_graph=True) for v in f]
        found.append(sum(float(g.square().sum()) for row in grads for g in row))
    return found


def test_a_standardised_weight_is_no_batch_norm_of_samples():
    torch.manual_seed(0)
    net = nn.Sequential(Standardised(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 4)).double()
    x = torch.randn(3, 2, 6, 6).double()
    p = fl.probe(net, x)
    assert fl.sharpness.samples(p) == pytest.approx(shares(net, x), rel=1e-10)


def test_attention_biases_are_not_taken_from_a_cache():
    """LeViT in evaluation mode keeps what it looked up, here without a derivative."""
    torch.manual_seed(0)
    attention = timm.models.levit.Attention(dim=6, key_dim=4, num_heads=2, resolution=(2, 2))
    net = nn.Sequential(attention, nn.Flatten(), nn.Linear(24, 3)).double().eval()
    torch.nn.init.normal_(attention.attention_biases)
    torch.nn.init.ones_(attention.proj.ln.bn.weight)
    x = torch.randn(3, 4, 6).double()
    true = []
    for one in x:
        attention.attention_bias_cache = {}
        true += shares(net, one[None])
    timm_models.uncached(net)
    for _ in range(2):
        with torch.no_grad():
            net(x)
    p = fl.probe(net, x)
    assert {q.name: q.path for q in p.parameters}["0.attention_biases"] == "slow"
    assert all(next(q.grad for q in p.parameters if "biases" in q.name) > 0)
    assert fl.sharpness.samples(p) == pytest.approx(true, rel=1e-9)


class ClassToken(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 4))
        self.last = nn.Linear(12, 3)

    def forward(self, x):
        return self.last(torch.cat([self.token.expand(len(x), -1, -1), x], 1).sin().flatten(1))


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_class_token_has_its_rule_in_a_last_chunk_of_one_sample(n):
    torch.manual_seed(0)
    net, x = ClassToken().double(), torch.randn(n, 2, 4).double()
    p = fl.probe(net, x, chunk=2)
    assert {q.name: q.path for q in p.parameters}["token"] == "rule"
    assert fl.sharpness.samples(p) == pytest.approx(shares(net, x), rel=1e-10)


class Formula(nn.BatchNorm2d):
    def forward(self, x):
        mean, var, weight, bias = (
            t[:, None, None] for t in (self.running_mean, self.running_var, self.weight, self.bias)
        )
        return (x - mean) / (var + self.eps).sqrt() * weight + bias


@pytest.fixture
def normed():
    """A network with batch norm as torch has it, and the same with its formula."""
    torch.manual_seed(0)
    norm = Formula(5).double().eval()
    for t in (norm.running_mean, norm.running_var, norm.weight.data):
        t.uniform_(0.5, 2)
    plain = nn.BatchNorm2d(5).double().eval()
    plain.load_state_dict(norm.state_dict())
    first, last = nn.Conv2d(3, 5, 3).double(), nn.Linear(20, 4).double()
    nets = [nn.Sequential(first, nn.Tanh(), n, Tokens(), last) for n in (plain, norm)]
    return *nets, torch.randn(2, 3, 4, 4).double()


def test_batch_norm_of_one_sample_whose_gradient_comes_with_channels_last(normed):
    """torch 2.13's own backward pass is wrong there (LeViT); brute force takes the formula."""
    net, formula, x = normed
    true = shares(formula, x)
    for n in (1, 2):
        p = fl.probe(net, x[:n])
        assert fl.sharpness.samples(p) == pytest.approx(true[:n], rel=1e-10)
        s = fl.sketch(net, x[:n], directions=3, tolerance=1e-9)
        assert fl.mls(s) == pytest.approx(fl.mls(p), rel=1e-7)


def test_the_hessian_of_that_batch_norm(normed):
    net, formula, x = normed
    x, y = x[:1], torch.ones(1, 4).double()
    weights = list(formula.parameters())
    loss = 0.5 * (formula(x) - y).square().sum()
    first = torch.autograd.grad(loss, weights, create_graph=True)
    true = 0.0
    for p, g in zip(weights, first, strict=True):
        for k, slope in enumerate(g.flatten()):
            (second,) = torch.autograd.grad(slope, p, retain_graph=True, materialize_grads=True)
            true += float(second.flatten()[k])
    found = fl.perturb.hessian_trace(net, x, y, directions=10**6)  # column by column
    assert found.value == pytest.approx(true, rel=1e-10)
