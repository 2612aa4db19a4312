"""The oracle comparison can fail: the core is broken on purpose, one idea at a time."""

import dataclasses
from collections.abc import Callable

import pytest
import test_zoo
import torch
from traps import ZOO

import flatlens as fl
from flatlens.algebra import spectra
from flatlens.algebra import weight_gradients as weights
from flatlens.capture.graph import Graph
from flatlens.capture.kinds import normalisation
from flatlens.capture.recording import Recording
from flatlens.passes import arrangement, independence, layer_columns, run
from flatlens.passes.positions import Positions

pytestmark = pytest.mark.slow

CHECKS = [
    test_zoo.test_input,
    test_zoo.test_layer_numbers,
    test_zoo.test_weight_norms,
    test_zoo.test_parameters,
    test_zoo.test_metrics,
]


@pytest.fixture
def compare(monkeypatch):
    """Every number of a case of the zoo against the oracle, measured afresh."""

    def probe(name: str):
        case = ZOO[name]()
        return fl.probe(case.model, case.x, output=case.output)

    def run(name: str) -> None:
        for check in CHECKS:
            check(name)

    monkeypatch.setattr(test_zoo, "probed", probe)
    return run


def no_clones(patch) -> None:
    """Keep what a layer read and gave as it stands, though it is overwritten in place."""
    patch(Recording, "overwritten", lambda self: frozenset())


def added_norms(patch) -> None:
    """Add up the norms of a reused weight's parts in place of joining their positions."""
    whole = weights.weight_gradient

    def parts(calls, *options):
        sums = [whole([call], *options) for call in calls]
        plain, adaptive = sum(s.plain for s in sums), sum(s.adaptive for s in sums)
        return weights.WeightSums(plain, adaptive, sums[0].invariant)

    patch(layer_columns, "weight_gradient", parts)


def no_biases(patch) -> None:
    rows = Positions.bias_rows
    patch(Positions, "bias_rows", lambda self: torch.zeros_like(rows(self)))
    patch(Positions, "row_is_bias_gradient", False)  # where they would not be asked for


def no_norm_parameters(patch) -> None:
    """Scale and shift of a norm layer as constants, not as one copy per sample."""
    affine = normalisation.affine

    def constant(recorder, normed, weight, bias, view):
        weight, bias = (None if t is None else t.detach() for t in (weight, bias))
        return affine(recorder, normed, weight, bias, view)

    patch(normalisation, "affine", constant)


def samples_outside(patch) -> None:
    """Take the samples of every flattened dimension for the slow index."""
    find = arrangement.call_layout

    def outer(one, two):
        layout = find(one, two)
        return layout and dataclasses.replace(layout, inner=False)

    patch(arrangement, "call_layout", outer)


def unchecked(patch) -> None:
    """Do not measure some samples without the others."""
    patch(run, "check_subset", lambda *_: None)


def anyones_rows(patch) -> None:
    """Do not look whose outputs a row reaches."""
    patch(arrangement, "check_owners", lambda *_: None)
    patch(independence, "check_owners", lambda *_: None)


def one_use_each(patch) -> None:
    """Believe that every parameter in the graph is used once."""
    count = Graph.uses
    patch(Graph, "uses", lambda self, leaf: min(1, count(self, leaf)))


def gram_only(patch) -> None:
    """Never decompose the Jacobian itself."""
    patch(spectra, "GRAM_LIMIT", 0.0)


def through_for_total(patch) -> None:
    """Take the derivative through a layer for that by the tensor which enters it."""
    patch(Graph, "read_once", lambda self, edge: True)


BREAKS: dict[str, tuple[Callable | tuple, list[str]]] = {
    "no clones": (
        no_clones,
        [
            "inplace_add_on_the_input_of_a_frozen_layer",
            "inplace_scale_of_tokens_that_a_frozen_layer_read",
        ],
    ),
    "added norms": (
        added_norms,
        ["module_called_twice", "conv_called_twice", "tied_linear_linear"],
    ),
    "no biases": (no_biases, ["plain_mlp", "lenet", "shared_bias"]),
    "no norm parameters": (no_norm_parameters, ["layernorm_on_tokens", "batchnorm2d_eval"]),
    "samples outside": (
        (samples_outside, unchecked, anyones_rows),
        ["tokens_time_major_folded", "images_folded_time_major_for_a_conv"],
    ),
    "anyone's rows": (
        anyones_rows,
        [
            "a_row_looked_up_for_each_sample_of_which_the_first_serves_all",
            "a_scale_applied_to_samples_in_reverse_and_forward",
            "layer_norm_on_samples_in_the_order_of_their_sums",
        ],
    ),
    "one use each": (
        one_use_each,
        ["weight_used_in_a_linear_and_elsewhere", "tied_transposed"],
    ),
    "gram only": (gram_only, ["bottleneck_in_the_middle", "module_list_reused_in_a_loop"]),
    "through for total": (through_for_total, ["residual", "qkv_on_one_tensor"]),
}


@pytest.mark.parametrize(
    ("idea", "name"), [(idea, name) for idea, (_, names) in BREAKS.items() for name in names]
)
def test_what_is_broken_is_seen(monkeypatch, compare, idea, name):
    compare(name)  # whole as it is
    broken = BREAKS[idea][0]
    for one in broken if isinstance(broken, tuple) else (broken,):
        one(monkeypatch.setattr)
    with pytest.raises(AssertionError):
        compare(name)


@pytest.mark.parametrize("name", BREAKS["samples outside"][1])
def test_a_wrong_layout_alone_is_caught_by_the_pass_itself(monkeypatch, compare, name):
    samples_outside(monkeypatch.setattr)
    compare(name)
    case = ZOO[name]()
    assert "one at a time" in " ".join(fl.probe(case.model, case.x).notes)
