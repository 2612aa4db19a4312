"""Models of Transformers and text by name, on a tiny model that is saved here."""

import json

import pytest
import torch

import flatlens as fl
from flatlens.cli import main
from flatlens.data import load
from flatlens.errors import FlatlensError
from flatlens.training.hf_models import create, transformers
from flatlens.training.networks import build

TEXT = "the cat sat on the mat and the dog sat on the cat " * 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder as save_pretrained leaves it: a GPT-2 of one block, and a tokenizer of words."""
    pytest.importorskip("tokenizers")
    library = transformers()
    from tokenizers import Tokenizer, models, pre_tokenizers

    place = tmp_path_factory.mktemp("hf") / "tiny"
    torch.manual_seed(0)
    words = {word: i for i, word in enumerate(["?", *sorted(set(TEXT.split()))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    library.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(
        place
    )
    config = library.GPT2Config(
        vocab_size=len(words), n_positions=16, n_embd=8, n_layer=1, n_head=2, n_inner=12
    )
    library.GPT2LMHeadModel(config).save_pretrained(place)
    return place


@pytest.fixture
def book(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text(TEXT)
    return path


@pytest.mark.slow
def test_the_class_is_the_one_that_the_configuration_names(folder):
    model = build(f"hf:{folder}")
    assert type(model).__name__ == "GPT2LMHeadModel"
    assert not model.training


def test_random_weights_follow_the_global_seed(folder):
    torch.manual_seed(3)
    one = create(str(folder), weights="random").state_dict()
    torch.manual_seed(3)
    two = create(str(folder), weights="random").state_dict()
    saved = create(str(folder)).state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(one["transformer.h.0.attn.c_attn.weight"],
                           saved["transformer.h.0.attn.c_attn.weight"])  # fmt: skip


def test_text_is_consecutive_pieces_and_the_token_after_each(book):
    data = load(f"text:{book}?length=5")
    assert data.classes == 256
    x, y = torch.cat([data.x_train, data.x_test]), torch.cat([data.y_train, data.y_test])
    whole = list(TEXT.encode())
    assert x.flatten().tolist() == whole[: x.numel()]
    assert y.tolist() == [whole[5 * (i + 1)] for i in range(len(x))]


@pytest.mark.slow
def test_the_tokenizer_of_the_model_reads_the_text(folder, book, capsys):
    command = ["measure", f"hf:{folder}", "--data", f"text:{book}?length=6", "--n", "3", "--json"]
    assert main([*command, "--dtype", "float64"]) == 0
    measured = json.loads(capsys.readouterr().out)["quantities"]
    data = load(f"text:{book}", length=6, tokenizer=str(folder))
    assert data.classes == 8
    model = build(f"hf:{folder}").double()
    chosen = torch.randperm(len(data.x_train), generator=torch.Generator().manual_seed(0))[:3]
    last = lambda result: result.logits[:, -1]  # noqa: E731
    m = fl.measure(model, data.x_train[chosen.sort().values], output=last)
    assert measured["sharpness"] == pytest.approx(m["sharpness"], rel=1e-10)
    assert measured["mls"] == pytest.approx(m["mls"], rel=1e-10)


@pytest.mark.slow
def test_outputs_of_all_positions_are_more(folder, book, capsys):
    command = ["measure", f"hf:{folder}", "--data", f"text:{book}?length=4", "--n", "2", "--json"]
    assert main([*command, "--quantities", "sharpness"]) == 0
    last = json.loads(capsys.readouterr().out)["quantities"]["sharpness"]
    assert main([*command, "--quantities", "sharpness", "--position", "all"]) == 0
    assert json.loads(capsys.readouterr().out)["quantities"]["sharpness"] > last


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (lambda place: (place / "model.safetensors").unlink(), "no safetensors file"),
        (lambda place: (place / "config.json").unlink(), "no config.json"),
        (lambda place: (place / "config.json").write_text("{"), "Cannot load hf:"),
        (
            lambda place: (place / "config.json").write_text(
                '{"model_type": "strange", "auto_map": {"AutoConfig": "code.Config"}}'
            ),
            "code of its own|Cannot load hf:",
        ),
    ],
)
def test_what_cannot_be_loaded_is_one_sentence(folder, tmp_path, prepare, words):
    import shutil

    place = tmp_path / "copy"
    shutil.copytree(folder, place)
    prepare(place)
    with pytest.raises(FlatlensError, match=words):
        build(f"hf:{place}")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("length=0", "not a number of tokens"),
        ("length=400", "two sequences"),
        ("tokenizer=./no", "tokenizer"),
    ],
)
def test_text_that_does_not_fit_is_one_sentence(book, options, words):
    with pytest.raises(FlatlensError, match=words):
        load(f"text:{book}?{options}")


def test_text_that_is_none(tmp_path):
    (tmp_path / "a").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FlatlensError, match="not UTF-8"):
        load(f"text:{tmp_path / 'a'}")
    with pytest.raises(FlatlensError, match="Cannot read"):
        load(f"text:{tmp_path / 'none'}")
