"""Integer inputs are measured by the output of their embedding, in any language model."""

import pytest
import torch
from torch import nn

import flatlens as fl
from flatlens.compat import make_torchvision_importable

IDS = torch.tensor([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8], [9, 7, 9, 3, 2, 3]])
MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0]])


def last_token(result):
    return result.logits[:, -1]


def causal(name: str, **options):
    make_torchvision_importable()
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    common = {"vocab_size": 12, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    config = getattr(transformers, f"{name}Config")(**common, **options)
    return transformers, config


def gpt2():
    transformers, config = causal("GPT2", n_positions=8, n_embd=8, n_layer=2, n_head=2)
    return transformers.GPT2LMHeadModel(config), last_token


def llama():
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": False}
    transformers, config = causal("Llama", **sizes, **heads)
    return transformers.LlamaForCausalLM(config), last_token


def bert():
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_labels": 4, "max_position_embeddings": 10}
    transformers, config = causal("Bert", **sizes)
    return transformers.BertForSequenceClassification(config), "logits"


def outputs(model, i: int, output, **inputs) -> torch.Tensor:
    result = model(**{k: v[i : i + 1] for k, v in inputs.items()})
    return (output(result) if callable(output) else result[output]).flatten()


@pytest.mark.slow
@pytest.mark.parametrize("build", [gpt2, llama, bert])
def test_a_language_model_from_its_config(build):
    model, output = build()
    model = model.double().eval()
    x = {"input_ids": IDS, "attention_mask": MASK}
    m = fl.measure(model, x, output=output)
    S, mls = [], []
    for i in range(3):
        f = outputs(model, i, output, **x)
        grads = [
            torch.autograd.grad(v, list(model.parameters()), retain_graph=True, allow_unused=True)
            for v in f
        ]
        S.append(sum(float(g.square().sum()) for row in grads for g in row if g is not None))
        vectors = model.get_input_embeddings()(IDS).detach().requires_grad_()
        f = outputs(model, i, output, inputs_embeds=vectors, attention_mask=MASK)
        rows = [torch.autograd.grad(v, vectors, retain_graph=True)[0].flatten() for v in f]
        mls.append(float(torch.linalg.svdvals(torch.stack(rows))[0]))
    # rotary positions and RMS norms of transformers are float32 inside
    assert m["sharpness"] == pytest.approx(sum(S) / 3, rel=1e-6)
    assert m["mls"] == pytest.approx(sum(mls) / 3, rel=1e-6)
    assert m.probe.M == 6 * 8
    assert "frozen" not in m.coverage.values()


@pytest.mark.slow
def test_gpt2_layers_are_measured_although_they_are_no_linear_modules():
    model, output = gpt2()
    m = fl.measure(model, {"input_ids": IDS}, output=output)
    assert "transformer.h.0.attn.c_attn" in {q.name for q in m.probe.layers}


@pytest.mark.slow
def test_per_position_outputs():
    model, _ = llama()
    m = fl.measure(model, {"input_ids": IDS[:2]}, output="logits", method="sketch", directions=4)
    assert m.probe.N == 6 * 12
    assert m["sharpness_se"] > 0


def test_a_masked_token_changes_nothing():
    model, _ = bert()
    x = {"input_ids": IDS, "attention_mask": MASK}
    other = {"input_ids": torch.where(MASK == 0, 11, IDS), "attention_mask": MASK}
    a, b = (fl.measure(model.double(), v, output="logits") for v in (x, other))
    assert a["nmls"] == pytest.approx(b["nmls"], rel=1e-10)


def test_tokens_are_measured_as_their_embeddings():
    torch.manual_seed(0)
    table, rest = nn.Embedding(12, 3), nn.Sequential(nn.Flatten(), nn.Linear(18, 4), nn.Tanh())
    net = nn.Sequential(table, rest, nn.Linear(4, 2)).double()
    m = fl.measure(net, IDS)
    table_free = nn.Sequential(rest, net[2])
    e = fl.measure(table_free, table(IDS).detach())
    for name in ("mls", "nmls", "log_volume", "local_dimension", "normalized_mls"):
        assert m[name] == pytest.approx(e[name], rel=1e-12)
    assert m["sharpness"] > e["sharpness"]  # the table is a parameter, too
    assert m.coverage["0.weight"] == "rule"
    table.requires_grad_(False)
    assert fl.measure(net, IDS)["sharpness"] == pytest.approx(e["sharpness"], rel=1e-12)


class Placed(nn.Module):
    """Tokens and their places, from tables of the same width."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(9, 3), nn.Embedding(9, 3)
        self.out = nn.Linear(3, 2)

    def forward(self, ids):
        places = torch.arange(ids.shape[1]).expand(len(ids), -1)
        return self.out((self.words(ids) * self.places(places)).tanh()).mean(1)


def test_places_that_happen_to_equal_the_tokens_are_no_input():
    torch.manual_seed(0)
    net, ids = Placed().double(), torch.tensor([[0, 1, 2, 3], [0, 1, 2, 3]])
    whole = fl.measure(net, ids)
    assert whole.probe.M == 12
    for chunk in (1, 2):
        assert fl.measure(net, ids, chunk=chunk)["mls"] == pytest.approx(whole["mls"], rel=1e-12)
    assert fl.measure(net, ids[:1])["mls"] == pytest.approx(whole["mls"], rel=1e-12)


def test_a_mask_of_floats_is_no_input():
    model, output = bert()
    x = {"input_ids": IDS, "attention_mask": MASK}
    whole = fl.measure(model.double().eval(), x, output=output)
    masked = fl.measure(model, x | {"attention_mask": MASK.double()}, output=output)
    assert (masked.probe.M, masked["mls"]) == (whole.probe.M, pytest.approx(whole["mls"]))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the imports
def test_a_scaled_embedding_is_differentiated_before_its_scale():
    """Gemma multiplies what it looked up by the square root of the width."""
    transformers, config = causal(
        "Gemma2", hidden_size=16, intermediate_size=20, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    model = transformers.Gemma2ForCausalLM(config).double().eval()
    ids = torch.tensor([[3, 1, 4, 1]])
    m = fl.measure(model, {"input_ids": ids}, output=last_token, quantities=["mls"])
    scaled = model.get_input_embeddings()(ids).detach()
    rows = nn.functional.embedding(ids, model.get_input_embeddings().weight).detach()
    torch.testing.assert_close(scaled, 4 * rows, rtol=1e-6, atol=0)
    after = torch.autograd.functional.jacobian(
        lambda embedded: last_token(model(inputs_embeds=embedded)), scaled
    )
    norm = torch.linalg.matrix_norm(after.flatten(0, 1).flatten(1), 2)
    assert m["mls"] == pytest.approx(4 * float(norm), rel=1e-6)
