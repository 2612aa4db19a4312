"""What figures show: the data of their lines, points and texts, not their pixels."""

import re

import numpy as np
import pandas as pd
import pytest
from made_up_runs import CONFIGURATIONS, STEPS, table
from matplotlib.colors import to_hex

from flatlens.analysis import run_table
from flatlens.errors import FlatlensError
from flatlens.figures import correlations, save, style, tightness, trends
from flatlens.figures.correlations import QUANTITIES

PAPER_ORDER = [
    "training loss",
    "NMLS",
    "sharpness (√S)",
    "log volume",
    "MLS",
    "local dimension",
]


def level(scale, name):
    """A curve that ends at a level of its learning rate and batch, plus the run's own number."""

    def make(lr, batch, t, z):
        return scale * (2 + np.log2(lr / 0.05) + batch / 32 + t + 0.1 * z(name))

    return make


COLUMNS = {
    "nmls": level(2.0, "a"),
    "sharpness": level(9.0, "b"),
    "log_volume": lambda *run: -level(3.0, "c")(*run),
    "log_volume_top3": lambda *run: -level(1.0, "d")(*run),
    "mls": level(1.0, "e"),
    "local_dimension": level(1.5, "f"),
}


@pytest.fixture(scope="module")
def df():
    return table(seeds=3, **COLUMNS)


def lines(ax):
    """Lines by label: x and y; dots and the like have no label."""
    return {line.get_label(): line.get_data() for line in ax.get_lines() if label(line)}


def label(line):
    return not line.get_label().startswith("_")


def dots(ax):
    return [(line.get_xdata(), line.get_ydata()) for line in ax.get_lines() if not label(line)]


# ------------------------------------------------------------------ trends


def test_trends_have_the_papers_panels_in_its_order(df):
    axes = trends(df).axes
    assert [ax.get_title() for ax in axes] == PAPER_ORDER
    scales = [ax.get_yscale() for ax in axes]
    assert scales == ["log", "linear", "linear", "linear", "linear", "log"]
    assert {ax.get_xscale() for ax in axes} == {"linear"}
    assert [ax.get_xlabel() for ax in axes] == ["", "", "", *3 * ["SGD steps"]]


@pytest.mark.parametrize(
    ("by", "labels", "fixed"),
    [
        (
            "lr",
            ["learning rate 0.05", "learning rate 0.1", "learning rate 0.2"],
            "batch_size == 20",
        ),
        ("batch_size", ["batch size 8", "batch size 20", "batch size 32"], "lr == 0.1"),
    ],
)
def test_trends_draw_means_over_seeds(df, by, labels, fixed):
    axes = trends(df, by).axes
    part = df.query(fixed)
    for ax, column in ((axes[1], "nmls"), (axes[3], "log_volume"), (axes[4], "mls")):
        found = lines(ax)
        assert list(found) == labels
        for (x, y), value in zip(found.values(), sorted(part[by].unique()), strict=True):
            expected = part[part[by] == value].groupby("step")[column].mean()
            assert np.array_equal(x, STEPS)
            assert y == pytest.approx(expected.to_numpy())


@pytest.mark.slow
def test_trends_draw_the_root_of_the_sharpness_and_logarithmic_means(df):
    axes = trends(df).axes
    part = df.query("lr == 0.2").assign(root=lambda d: d["sharpness"] ** 0.5)
    root = part.groupby("step")["root"].mean()
    assert lines(axes[2])["learning rate 0.2"][1] == pytest.approx(root.to_numpy())
    geometric = np.exp(np.log(part["local_dimension"]).groupby(part["step"]).mean())
    assert lines(axes[5])["learning rate 0.2"][1] == pytest.approx(geometric.to_numpy())


def test_trends_band_is_one_standard_deviation(df):
    ax = trends(df).axes[4]
    spread = df.query("lr == 0.05").groupby("step")["mls"].agg(["mean", "std"])
    vertices = ax.collections[0].get_paths()[0].vertices
    at_end = vertices[vertices[:, 0] == STEPS[-1], 1]
    mean, std = spread.iloc[-1]
    assert (at_end.min(), at_end.max()) == (pytest.approx(mean - std), pytest.approx(mean + std))


@pytest.mark.slow
def test_trends_mark_where_the_loss_is_near_zero(df):
    figure = trends(df)
    for ax in figure.axes:
        assert [float(x[0]) for x, _ in dots(ax)] == [4_000.0] * 3
    at = STEPS.tolist().index(4_000)
    ax = figure.axes[1]
    assert [y[0] for _, y in dots(ax)] == [y[at] for _, y in lines(ax).values()]


def test_trends_mark_nothing_that_was_not_reached(df):
    figure = trends(df.assign(train_loss=0.1 - df["step"] / 1e6))
    assert not any(dots(ax) for ax in figure.axes)


def test_trends_with_the_authors_volume(df):
    ax = trends(df, volume="log_volume_top3").axes[3]
    expected = df.query("lr == 0.1 and batch_size == 20").groupby("step")["log_volume_top3"].mean()
    assert ax.get_title() == "log volume (top 3)"
    assert lines(ax)["learning rate 0.1"][1] == pytest.approx(expected.to_numpy())


def test_trends_over_steps_that_all_runs_have(df):
    late = (df["run"] == "mlp/0.05-20-0") & (df["step"] > 5_000)
    x, _ = lines(trends(df[~late]).axes[1])["learning rate 0.05"]
    assert x[-1] == 5_000


def test_trends_of_one_seed_have_no_band(df):
    ax = trends(df[df["seed"] == 0]).axes[1]
    assert len(lines(ax)) == 3
    assert not ax.collections


def test_trends_on_a_log_axis_keep_step_zero(df):
    ax = trends(df, log_steps=True).axes[0]
    assert ax.get_xscale() == "symlog"
    assert lines(ax)["learning rate 0.1"][0][0] == 0
    assert ax.get_xticks().tolist() == [0, 1_000, 10_000]


@pytest.mark.slow
def test_trends_survive_a_volume_of_zero(df):
    df = df.assign(log_volume=np.where(df["step"] < 500, -np.inf, df["log_volume"]))
    figure = trends(df)
    _, y = lines(figure.axes[3])["learning rate 0.1"]
    assert y[0] == -np.inf
    assert np.isfinite(y[2:]).all()
    assert [text.get_text() for text in figure.axes[3].texts] == ["no line: volume 0"]
    figure.draw_without_rendering()


def test_trends_of_any_setting():
    df = table(seeds=2, configurations=((0.1, 20),), **COLUMNS)
    sam = df.assign(optimizer="sam", run="sam/" + df["run"])
    both = pd.concat([df.assign(optimizer="sgd"), sam])
    assert list(lines(trends(both, "optimizer").axes[0])) == ["optimizer sam", "optimizer sgd"]


REFUSED = {
    "no column nmls": lambda df: trends(df.drop(columns="nmls")),
    "no column speed": lambda df: trends(df, "speed"),
    "differ in lr and in nothing": lambda df: trends(df[df["lr"] == 0.1]),
    "runs of mlp on digits, vgg on digits; choose one": lambda df: trends(
        pd.concat([df, df.assign(model="vgg", run="v/" + df["run"])])
    ),
    "is empty": lambda df: trends(df[:0]),
    "no column eq48_ab.lhs": lambda df: tightness(df),
    "no column speed, mass": lambda df: correlations(df, ["mls", "speed", "mass"]),
    "at least two quantities": lambda df: correlations(df, ["mls"]),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_figures_refuse(df, reason):
    with pytest.raises(FlatlensError, match=re.escape(reason)):
        REFUSED[reason](df)


# ------------------------------------------------------------------ tightness

SIDES = {
    "eq48_ab.lhs": 1.0,
    "eq48_ab.rhs": 1.6,
    "eq48_bc.rhs": 1.7,
    "eq48_cd.rhs": 6.0,
    "eq11.lhs": 1.0,
    "eq11.rhs": 6.0,
    "eq11_bias.rhs": 5.5,
    "eq12.lhs": 5.0,
    "eq12.rhs": 30.0,
    "eq12_bias.rhs": 25.0,
    "eq12_untied.rhs": 26.0,
}


def chain(seeds=3, configurations=CONFIGURATIONS):
    columns = {
        name: lambda lr, batch, t, z, v=v, name=name: v * lr * np.exp(t + 0.02 * z(name))
        for name, v in SIDES.items()
    }
    return table(seeds=seeds, configurations=configurations, **columns)


def test_tightness_draws_the_chain_of_one_configuration():
    df = chain()
    figure = tightness(df)
    assert figure.get_suptitle() == "lr 0.1, batch size 20"
    first = lines(figure.axes[0])
    assert list(first) == ["A = MLS", "B", "C", "D = Eq. 11"]
    part = df.query("lr == 0.1 and batch_size == 20")
    for (x, y), name in zip(first.values(), SIDES, strict=False):
        expected = np.exp(np.log(part[name]).groupby(part["step"]).mean())
        assert np.array_equal(x, STEPS)
        assert y == pytest.approx(expected.to_numpy())


def test_tightness_has_the_tighter_bounds_beside_it():
    figure = tightness(chain())
    assert list(lines(figure.axes[1])) == ["MLS", "C", "Eq. 11, bias", "Eq. 11"]
    assert list(lines(figure.axes[2])) == ["NMLS", "Eq. 12, bias", "untied", "Eq. 12"]
    ends = [y[-1] for _, y in lines(figure.axes[2]).values()]
    assert ends[0] < ends[1] < ends[2] < ends[3]
    assert [ax.get_yscale() for ax in figure.axes] == ["log"] * 3


def test_tightness_gives_one_colour_to_one_idea():
    axes = tightness(chain()).axes
    colours = [
        {line.get_label(): to_hex(line.get_color()) for line in ax.get_lines()} for ax in axes
    ]
    assert colours[0]["C"] == colours[1]["C"]
    assert colours[0]["D = Eq. 11"] == colours[1]["Eq. 11"] == colours[2]["Eq. 12"]
    for panel in colours:
        assert len(set(panel.values())) == len(panel)


def test_tightness_prefers_the_configuration_with_most_runs():
    df = pd.concat([chain(), chain(seeds=5, configurations=((0.2, 20),))])
    df = df.drop_duplicates(["run", "step"], keep="last")
    assert tightness(df).get_suptitle() == "lr 0.2, batch size 20"


def test_tightness_leaves_out_what_is_infinite_or_missing():
    df = chain().assign(**{"eq12_untied.rhs": np.inf}).drop(columns="eq11_bias.rhs")
    axes = tightness(df).axes
    assert list(lines(axes[1])) == ["MLS", "C", "Eq. 11"]
    assert list(lines(axes[2])) == ["NMLS", "Eq. 12, bias", "Eq. 12"]


# ------------------------------------------------------------------ correlations


@pytest.fixture(scope="module")
def networks():
    def quantity(k):
        return lambda lr, batch, t, z: 10 + lr * k + z("common") + 0.3 * k * z(f"own {k}") + 0 * t

    names = ["sharpness" if name == "sqrt_sharpness" else name for name in QUANTITIES]
    columns = {name: quantity(k) for k, name in enumerate(names)}
    return table(seeds=6, steps=STEPS[-2:], **columns)


@pytest.mark.slow
def test_correlations_show_the_papers_nine(networks):
    figure = correlations(networks)
    assert len(figure.axes) == 81
    titles = [figure.axes[10 * k].texts[0].get_text().replace("\n", " ") for k in range(9)]
    assert titles == [
        "local dimension",
        "sharpness √S",
        "log volume",
        "MLS",
        "NMLS",
        "gen. gap (points)",
        "D",
        "bound (12)",
        "relative sharpness",
    ]


def test_correlations_scatter_the_ends_by_configuration(networks):
    figure = correlations(networks, ["mls", "nmls", "sqrt_sharpness"])
    last = run_table.ends(run_table.prepared(networks))
    for row, column, i, j in (("nmls", "mls", 1, 0), ("sqrt_sharpness", "nmls", 2, 1)):
        ax = figure.axes[3 * i + j]
        points = {line.get_label(): line.get_data() for line in ax.get_lines()}
        assert len(points) == 5
        part = last.query("lr == 0.1 and batch_size == 8")
        x, y = points["lr 0.1, batch size 8"]
        assert x.tolist() == part[column].tolist()
        assert y.tolist() == part[row].tolist()
    colours = {to_hex(line.get_color()) for line in figure.axes[3].get_lines()}
    assert len(colours) == 5


def test_correlations_write_both_coefficients(networks):
    figure = correlations(networks, ["mls", "nmls", "sqrt_sharpness"])
    last = run_table.ends(run_table.prepared(networks))
    texts = [text.get_text() for text in figure.axes[1].texts]
    for kind, at, letter in (("pearson", 0, "r"), ("spearman", 2, "ρ")):
        value = (
            last["mls"].corr(last["nmls"], method="pearson")
            if kind == "pearson"
            else (last["mls"].rank().corr(last["nmls"].rank()))
        )
        assert texts[at] == f"{letter} {value:.2f}".replace("0.", ".").replace("-", "−")
        low, high = (float(v.replace("−", "-")) for v in re.findall(r"−?\d?\.\d+", texts[at + 1]))
        assert low < value < high


@pytest.mark.slow
def test_correlations_say_what_was_not_recorded(networks):
    figure = correlations(networks.drop(columns="relative_flatness"))
    assert len(figure.axes) == 64
    title = figure.legends[0].get_title().get_text()
    assert title.startswith("30 networks")
    assert title.endswith("not recorded or infinite: relative sharpness")


def test_correlations_leave_out_what_is_not_finite(networks):
    df = networks.copy()
    df.loc[df["run"] == "mlp/0.1-8-0", "mls"] = -np.inf
    ax = correlations(df, ["mls", "nmls"]).axes[2]
    assert sum(len(line.get_xdata()) for line in ax.get_lines()) == 29


@pytest.mark.slow
def test_correlations_of_a_quantity_that_is_never_finite(networks):
    df = networks.assign(log_volume=-np.inf)
    title = correlations(df).legends[0].get_title().get_text()
    assert title.endswith("not recorded or infinite: log volume")
    figure = correlations(df, ["log_volume", "mls"])
    assert [text.get_text() for text in figure.axes[1].texts] == ["r –", "[–, –]", "ρ –", "[–, –]"]


# ------------------------------------------------------------------ saving


@pytest.mark.slow
def test_saving_writes_pdf_and_png(df, tmp_path):
    paths = save(trends(df), tmp_path / "new" / "fig.1")
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["fig.1.pdf", "fig.1.png"]
    assert paths["png"].read_bytes().startswith(b"\x89PNG")
    assert paths["pdf"].read_bytes().startswith(b"%PDF")


@pytest.mark.slow
def test_the_same_records_give_the_same_bytes(df, tmp_path):
    first, second = (save(trends(df), tmp_path / name) for name in "ab")
    for kind in ("pdf", "png"):
        assert first[kind].read_bytes() == second[kind].read_bytes()


@pytest.mark.slow
def test_a_figure_that_fails_leaves_the_old_file(df, tmp_path, monkeypatch):
    figure = trends(df)
    paths = save(figure, tmp_path / "f")
    before = paths["png"].read_bytes()

    def fail(file, **options):
        file.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(figure, "savefig", fail)
    with pytest.raises(FlatlensError, match=r"Cannot write .*f\.pdf: No space left"):
        save(figure, tmp_path / "f")
    assert paths["png"].read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f.pdf", "f.png"]


def test_drawing_leaves_the_users_settings_alone(df):
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    trends(df)
    assert dict(mpl.rcParams) == before


def test_colours_and_dashes_are_all_different():
    assert len(set(style.COLOURS)) == len(set(style.DASHES)) == len(set(style.MARKERS)) == 6
