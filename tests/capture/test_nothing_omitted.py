"""Every linear map of a parameter is a layer, or it is named."""

import pytest
import torch
from torch import nn
from traps import ZOO
from traps.no_layers import Times

import flatlens as fl

OVER_LAYERS = ("eq10", "eq12", "eq12_bias", "eq12_untied", "eq12_tied_rank", "eq17", "eq35")
FAST = (
    "textbook_mlp_of_bare_matrices",
    "matrix_on_tokens",
    "matrix_from_the_left",
    "samples_in_the_last_dimension",
    "experts_in_one_parameter",
    "every_expert_on_every_token",
    "heads_in_an_einsum",
    "einsum_with_a_matrix_for_each_group",
    "matrix_reshaped_before_use",
    "gru_of_three_layers_without_biases",
    "lstm_with_a_projection_both_ways",
    "lstm_and_gru_cells_in_a_loop",
    "pair_as_one_argument",
    "low_rank_update_beside_a_frozen_layer",
)


class Half(nn.Module):
    """A product inside a custom function, then a layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.w, self.out = nn.Parameter(torch.randn(4, 3)), nn.Linear(3, 2)

    def forward(self, x):
        return self.out(torch.tanh(Times.apply(x, self.w)))


@pytest.mark.parametrize("name", FAST)
def test_products_take_the_fast_path(name):
    case = ZOO[name]()
    p = fl.probe(case.model, case.x, output=case.output)
    assert {q.path for q in p.parameters if q.numel > 2} <= {"layer", "rule", "frozen"}
    assert p.unmeasured == []
    assert p.chunk > 1


def test_a_textbook_mlp_of_bare_matrices_is_a_theorem():
    case = ZOO["textbook_mlp_of_bare_matrices"]()
    m = fl.measure(case.model, case.x)
    assert list(m.layers["name"]) == ["w1", "w2"]
    assert {m[name].verdict for name in ("eq11", "eq12", "eq6", "eq10")} == {"theorem"}


def test_what_is_not_measured_is_named_everywhere():
    m = fl.measure(Half(), torch.randn(3, 4))
    assert m.unmeasured == ["w"]
    assert "w is not measured as a layer" in m.table()
    for name in OVER_LAYERS:
        assert m[name].verdict == "observation"
        assert "w is not measured as a layer" in m[name].why


def test_packed_sequences_are_named():
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.out = nn.LSTM(2, 3), nn.Linear(3, 2)

        def forward(self, x):
            lengths = torch.full((len(x),), x.shape[1])
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
            return self.out(self.rnn(packed)[1][0][-1])

    m = fl.measure(Packed(), torch.randn(3, 4, 2))
    assert set(m.unmeasured) >= {"rnn.weight_ih_l0", "rnn.weight_hh_l0"}
    assert m["eq12"].verdict == "observation"
    assert "rnn.weight_ih_l0" in m["eq12"].why


def test_a_network_without_a_layer_is_measured():
    m = fl.measure(nn.Sequential(nn.LayerNorm(4), nn.Tanh()), torch.randn(3, 4))
    for name in ("sharpness", "mls", "volume", "local_dimension", "adaptive_sharpness"):
        assert m[name] == m[name]
    assert m["nmls"] != m["nmls"]  # NaN: no layer
    assert m["eq8"].verdict == "theorem"
    assert m["eq12"].verdict == "not applicable"
    assert m.unmeasured == []


@pytest.mark.parametrize("name", ["norm_layer_alone", "custom_function_alone"])
def test_sketch_of_a_network_without_a_layer(name):
    case = ZOO[name]()
    exact = fl.probe(case.model, case.x)
    estimated = fl.sketch(case.model, case.x, directions=2)
    assert fl.mls(estimated) == pytest.approx(fl.mls(exact), rel=1e-3)


def test_norm_scales_tokens_and_tables_are_no_layers():
    for name in ("tokens_by_expand_and_repeat", "free_scale_and_shift", "computed_bias"):
        case = ZOO[name]()
        assert fl.probe(case.model, case.x).unmeasured == []


def test_nested_arguments_have_names_and_can_be_chosen():
    case = ZOO["dict_as_one_argument_and_a_dict_of_results"]()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = case.model

        def forward(self, batch):
            return self.inner(batch)

    m = fl.measure(Model(), case.x, output=("aux", 1, 0))
    assert m.inputs == ["batch['text']"]
    both = fl.measure(Model(), case.x, output="*")
    assert both.inputs == ["batch['image']", "batch['text']"]
    one = fl.measure(Model(), case.x, output="*", inputs=["batch['image']"])
    assert (one.probe.M, both.probe.M, both.probe.N) == (3, 5, 9)
    assert fl.measure(Model(), case.x, output="*", inputs=["batch"]).probe.M == 5


def test_a_nested_argument_that_does_not_exist_is_refused():
    case = ZOO["pair_as_one_argument"]()
    with pytest.raises(fl.FlatlensError, match="names 'other'"):
        fl.measure(case.model, case.x, inputs=["other"])


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("...i,oi->...o", [(3, 4, 2), (5, 2)]),
        ("bi,ir,ro->bo", [(3, 4), (4, 2), (2, 5)]),
        ("bi,oij,bj->bo", [(3, 4), (2, 4, 3), (3, 3)]),
        ("bti,io->bo", [(3, 4, 2), (2, 3)]),
        ("bi,io", [(3, 4), (4, 2)]),
        ("b...,...->b", [(3, 4, 2), (4, 2)]),
    ],
)
def test_einsum_gives_what_torch_gives(equation, shapes):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4, dtype=torch.float64)
            self.weights = nn.ParameterList(
                torch.randn(s, dtype=torch.float64) for s in shapes[1:] if s[0] != 3
            )

        def forward(self, x, *more):
            operands = [x, *self.weights, *more]
            return torch.einsum(equation, *operands).reshape(3 if len(x) == 3 else len(x), -1)

    torch.manual_seed(0)
    data = tuple(torch.randn(s, dtype=torch.float64) for s in shapes if s[0] == 3)
    model = Model()
    p = fl.probe(model, data)
    torch.testing.assert_close(torch.from_numpy(p.output), model(*data).detach())
    used = [q for q in p.parameters if q.name.startswith("weights")]
    rows = torch.autograd.functional.jacobian(
        lambda w: torch.einsum(equation, data[0], w, *[t.detach() for t in model.weights[1:]],
                               *data[1:]).reshape(len(data[0]), -1),
        model.weights[0].detach(),
    )  # fmt: skip
    want = rows.flatten(1).square().sum(1).numpy()
    assert used[0].grad == pytest.approx(want, rel=1e-10)
    assert p.unmeasured == []


def test_a_sparse_operand_is_left_to_torch():
    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(3, 2))
            self.register_buffer("neighbours", torch.eye(4).to_sparse())

        def forward(self, x):
            return torch.stack([self.neighbours @ sample @ self.w for sample in x]).flatten(1)

    torch.manual_seed(0)
    m = fl.measure(Graph(), torch.randn(2, 4, 3))
    assert set(m.layers["weight"]) == {"w"}


def test_a_weight_that_multiplies_inside_an_addition_is_named():
    """torch.addmm begins like torch.add, and rows looked up by an index are no known input."""

    class Indexed(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.randn(5, 3))
            self.w, self.b = nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(2))
            self.head = nn.Linear(2, 2)

        def forward(self, x):
            rows = self.table[(x[:, 0] > 0).long()]
            return self.head(torch.tanh(torch.addmm(self.b, rows, self.w)) * x[:, :2])

    m = fl.measure(Indexed().double(), torch.randn(4, 2, dtype=torch.float64))
    measured = {layer.weight for layer in m.probe.layers}
    assert "w" in measured or "w" in m.unmeasured


def test_layers_behind_a_tied_embedding_are_measured():
    """The rows that the tokens take are data, although a parameter alone is behind them."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(5, 3)
            self.w, self.b = nn.Parameter(torch.randn(3, 3)), nn.Parameter(torch.randn(3))

        def forward(self, ids):
            h = torch.tanh(torch.addmm(self.b, self.table(ids).flatten(0, 1), self.w))
            return nn.functional.linear(h, self.table.weight).unflatten(0, ids.shape)[:, -1]

    m = fl.measure(Tied().double(), torch.tensor([[0, 1], [2, 3], [4, 0]]))
    assert [layer.weight for layer in m.probe.layers] == ["w", "table.weight"]
    assert m.unmeasured == []
