"""Global geometry against scikit-dimension and against loops written from the definitions."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import flatlens as fl
from flatlens.geometry.clouds import (
    Cloud,
    effective_rank,
    intrinsic_dimension,
    participation_ratio,
)
from flatlens.geometry.plots import representation_plot

PLACES = ["input", "0", "2", "output"]


def net_and_samples(n=60):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    return net, torch.randn(n, 5).double(), torch.arange(n) % 3


def points(n=80, D=6, seed=0):
    return torch.randn(n, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.slow
def test_scikit_dimension_agrees():
    skdim = pytest.importorskip("skdim")
    X = points(200, 5) * torch.tensor([3.0, 2.0, 1.0, 0.5, 0.1]) + 7
    cloud = Cloud.of(X)
    theirs = skdim.id.TwoNN(discard_fraction=0.1).fit(X.numpy()).dimension_
    assert intrinsic_dimension(cloud) == pytest.approx(theirs, rel=1e-8)
    theirs = skdim.id.lPCA(ver="participation_ratio").fit(X.numpy()).dimension_
    assert participation_ratio(cloud) == pytest.approx(theirs, rel=1e-10)


def test_effective_rank_is_that_of_the_singular_values():
    X = points() + 3
    s = torch.linalg.svdvals(X).numpy()
    p = s / s.sum()
    assert effective_rank(Cloud.of(X)) == pytest.approx(math.exp(-(p * np.log(p)).sum()), rel=1e-9)


def test_leaving_samples_out_is_the_cloud_of_the_others():
    X, out = points() + 2, np.array([0, 5, 79])
    stay = np.delete(np.arange(80), out)
    fewer, direct = Cloud.of(X).without(out), Cloud.of(X[stay])
    np.testing.assert_allclose(fewer.centred, direct.centred, atol=1e-11)
    np.testing.assert_allclose(fewer.along_mean, direct.along_mean, atol=1e-11)
    assert fewer.mean_square == pytest.approx(direct.mean_square, rel=1e-12)


def test_points_that_coincide_are_left_out_of_the_dimension():
    X = points(60, 3)
    assert math.isfinite(intrinsic_dimension(Cloud.of(torch.cat([X, X[:10]]))))
    assert math.isnan(intrinsic_dimension(Cloud.of(torch.ones(9, 2))))


def collapse_by_loops(H, y, W, f):
    """NC1 to NC4 from the definitions, one sample and one class at a time."""
    C, D = int(y.max()) + 1, H.shape[1]
    means = [H[y == c].mean(0) for c in range(C)]
    centre = sum(means) / C
    within, between = torch.zeros(D, D).double(), torch.zeros(D, D).double()
    for h, c in zip(H, y, strict=True):
        within += torch.outer(h - means[c], h - means[c]) / len(H)
    for mean in means:
        between += torch.outer(mean - centre, mean - centre) / C
    nc1 = float((within @ torch.linalg.pinv(between, rtol=1e-10)).trace()) / C
    M = torch.stack([mean - centre for mean in means])
    angles = [
        abs(float(M[a] @ M[b] / M[a].norm() / M[b].norm()) + 1 / (C - 1))
        for a in range(C)
        for b in range(C)
        if a != b
    ]
    norms = M.norm(dim=1).numpy()
    nc3 = float((W / W.norm() - M / M.norm()).square().sum())
    nearest = torch.tensor([min(range(C), key=lambda c: float((h - means[c]).norm())) for h in H])
    nc4 = float((nearest != f.argmax(1)).double().mean())
    accuracy = float((nearest == y).double().mean())
    return [nc1, np.mean(angles), norms.std() / norms.mean(), nc3, nc4, accuracy]


def test_neural_collapse_from_the_definitions():
    net, x, y = net_and_samples()
    table = fl.representations(net, x, y, errors=False).set_index("layer")
    with torch.no_grad():
        H, f = net[1](net[0](x)), net(x)
        want = collapse_by_loops(H, y, net[2].weight, f)
    columns = ["nc1", "nc2", "nc2_norms", "nc3", "nc4", "class_mean_accuracy"]
    np.testing.assert_allclose(table.loc["2", columns].astype(float), want, rtol=1e-9)
    assert table["nc3"].drop("2").isna().all()  # it is about the classifier alone
    assert list(fl.representations(net, x, y, errors=False)["layer"]) == PLACES


def test_one_hot_rows_are_labels_and_values_are_not():
    net, x, y = net_and_samples()
    by_index = fl.representations(net, x, y, errors=False)
    by_row = fl.representations(net, x, nn.functional.one_hot(y).double(), errors=False)
    assert by_index.equals(by_row)
    with pytest.raises(fl.FlatlensError, match="no classes"):
        fl.representations(net, x, torch.randn(60, 3))


def test_collapsed_features_have_collapsed_numbers():
    torch.manual_seed(0)
    net = nn.Linear(3, 3, bias=False).double()
    y = torch.arange(30) % 3
    simplex = torch.eye(3).double() - 1 / 3
    net.weight.data.copy_(simplex)
    x = simplex[y] + 1e-9 * torch.randn(30, 3).double()
    row = fl.representations(net, x, y, errors=False).set_index("layer").loc["weight"]
    assert row[["nc1", "nc2", "nc2_norms", "nc3", "nc4"]].astype(float).abs().max() < 1e-8
    assert row["class_mean_accuracy"] == 1.0


@pytest.mark.slow
def test_standard_errors_are_the_spread_over_samples():
    net, _, _ = net_and_samples()
    names = ["participation_ratio", "effective_rank", "nc1"]
    tables = []
    for seed in range(24):
        x = points(120, 5, seed)
        y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
        tables.append(fl.representations(net, x, y, layers=["2"]).iloc[0])
    for name in names:
        spread = np.std([t[name] for t in tables], ddof=1)
        told = np.mean([t[f"{name}_se"] for t in tables])
        assert 0.5 < told / spread < 2


def test_memory_and_chunks_change_nothing():
    net, x, y = net_and_samples()
    table = fl.representations(net, x, y)
    for options in ({"memory": 4000}, {"chunk": 7}):
        other = fl.representations(net, x, y, **options)
        numbers = [c for c in table.columns if table[c].dtype.kind == "f"]
        np.testing.assert_allclose(other[numbers], table[numbers], rtol=1e-9)


def test_local_quantities_stand_beside():
    net, x, y = net_and_samples()
    m = fl.measure(net, x, y)
    table = fl.representations(net, x, y, measurement=m, errors=False).set_index("layer")
    assert table.loc["input", "sensitivity"] == m["mls"]
    assert table.loc["2", "local_dimension"] == m.rows[1]["local_dimension"]
    assert math.isnan(table.loc["output", "sensitivity"])


def test_too_few_samples_are_noted():
    net, x, y = net_and_samples(8)
    notes = fl.representations(net, x, y)["note"]
    assert notes.str.contains("limited by n").any()
    assert notes.str.contains("class has 2 samples").all()


def test_tokens_and_convolutions_are_flattened():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2)).double()
    table = fl.representations(net, torch.randn(12, 1, 4, 4).double(), errors=False)
    assert list(table["features"]) == [16, 16, 8, 2]


def test_the_model_is_left_as_it_was():
    net, x, y = net_and_samples()
    net.train()
    fl.representations(net, x, y, n=20)
    assert net.training
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": ["nothing"]}, "choose from input, 0, 2, output"),
        ({"layers": "input"}, "is not a list"),
        ({"groups": 1}, "groups"),
        ({"measurement": 3}, "measurement"),
        ({"y": torch.zeros(3).long()}, "3 entries"),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused(options, message):
    net, x, _ = net_and_samples()
    with pytest.raises(fl.FlatlensError, match=message):
        fl.representations(net, x, **options)


def test_tables_are_drawn_over_training():
    net, x, y = net_and_samples()
    table = fl.representations(net, x, y)
    ax = representation_plot({0: table, 100: table}, "nc1")
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["0", "100"]
    with pytest.raises(fl.FlatlensError, match="no column"):
        representation_plot(table, "nothing")


def test_one_sample_has_no_standard_errors():
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    table = fl.representations(net, torch.randn(1, 3), torch.tensor([1]))
    assert list(table["effective_rank"]) == pytest.approx([1.0] * 4)
    assert table["effective_rank_se"].isna().all()
