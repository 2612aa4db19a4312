"""Damaged files of a reproduction are refused in one sentence with file, line and field."""

import gzip
import json
import os
import random

import pytest

from flatlens import FlatlensError
from flatlens.files.reading import read_json
from flatlens.reproduction.archive import read_records
from flatlens.reproduction.call_log import read_provenance
from flatlens.reproduction.judgement import read_claims

RECORD = {
    "recipe": "mlp",
    "run": "a",
    "step": 0,
    "steps": 5,
    "lr": 0.1,
    "model": "mlp",
    "nmls": 1.0,
}
CLAIM = {
    "claim": "T1", "network": "mlp", "part": "p", "scope": "s", "statistic": "x", "claimed": "> 0",
    "value": 1.0, "low": 0.5, "high": None, "effect": 2.0, "n": 4, "units": 4,
    "verdict": "supported", "main": True, "note": "", "figure": "g4",
}  # fmt: skip


def archive(path, *records):
    content = "".join(json.dumps(record) + "\n" for record in records)
    path.write_bytes(gzip.compress(content.encode(), mtime=0))
    return path


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("step", "x"), ("step", -1), ("step", 0.5), ("step", True), ("steps", "many"), ("steps", 0),
        ("run", 3), ("run", ""), ("recipe", []), ("lr", "fast"), ("lr", 0), ("model", 5),
        ("nmls", "high"), ("nmls", [1]), ("nmls", {"a": 1}), ("eq12.rhs", "x"), ("batch_size", {}),
        ("seed", []), ("train_loss", True),
    ],
)  # fmt: skip
def test_a_wrong_type_names_line_and_field(tmp_path, field, value):
    path = archive(tmp_path / "r.gz", RECORD, RECORD | {field: value})
    with pytest.raises(
        FlatlensError, match=rf"^Line 2 of .*r\.gz is damaged: the field '{field}' .* it must"
    ):
        read_records(path)


@pytest.mark.parametrize("field", ["recipe", "run", "step", "steps"])
def test_a_missing_field_is_named(tmp_path, field):
    record = {key: value for key, value in RECORD.items() if key != field}
    with pytest.raises(FlatlensError, match=f"Line 1 of .*: the field '{field}' is missing"):
        read_records(archive(tmp_path / "r.gz", record))


def test_numbers_that_json_does_not_have_are_read(tmp_path):
    frame = read_records(archive(tmp_path / "r.gz", RECORD | {"nmls": "inf"}))["mlp"]
    assert frame["nmls"].tolist() == [float("inf")]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": ' * 40 + b"1" + b"}" * 40, "nested too deeply"),
        (b'{"step": 1' + b"0" * 400 + b"}", "an integer of 401 digits"),
        (b'{"step": 1' + b"0" * 9_000 + b"}", "an integer of 9001 digits"),
        (b"[1]", "instead of an object"),
        (b'{"a": "\xff"}', "not UTF-8 text"),
        (b'{"a"', "is damaged"),
        (b"", "holds no records"),
    ],
)
def test_bad_lines_are_one_sentence(tmp_path, line, reason):
    path = tmp_path / "r.gz"
    path.write_bytes(gzip.compress(line))
    with pytest.raises(FlatlensError, match=reason) as error:
        read_records(path)
    assert "r.gz" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_flipped_bytes_never_give_a_traceback(tmp_path):
    content = archive(tmp_path / "r.gz", *[RECORD | {"step": k} for k in range(50)]).read_bytes()
    draw = random.Random(0)
    sentences = []
    for _ in range(200):
        damaged = bytearray(content)
        damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
        (tmp_path / "d.gz").write_bytes(bytes(damaged))
        try:
            read_records(tmp_path / "d.gz")
        except FlatlensError as error:
            sentences.append(str(error))
    assert all("d.gz" in sentence for sentence in sentences)
    assert len(sentences) > 150  # flips in the header's time or name change nothing


@pytest.mark.parametrize("length", [5, 20, 60])
def test_a_file_that_was_cut_is_one_sentence(tmp_path, length):
    path = archive(tmp_path / "r.gz", *[RECORD] * 20)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(FlatlensError, match=r"r\.gz is cut short"):
        read_records(path)


def test_a_pipe_is_refused_and_not_opened(tmp_path):
    os.mkfifo(tmp_path / "r.gz")
    for read in (read_records, read_json, read_claims, read_provenance):
        with pytest.raises(FlatlensError, match="is not a regular file"):
            read(tmp_path / "r.gz")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"claim": "T9"}, "the field 'claim' is 'T9'"), ({"claim": ["T1"]}, "field 'claim'"),
        ({"value": "big"}, "the field 'value' is 'big'"), ({"verdict": "yes"}, "field 'verdict'"),
        ({"main": 1}, "the field 'main' is 1"), ({"n": None}, "the field 'n'"),
        ({"figure": 3}, "the field 'figure'"), ({"note": None}, "the field 'note'"),
        ({"low": True}, "the field 'low'"),
    ],
)  # fmt: skip
def test_an_odd_claim_names_row_and_field(tmp_path, change, reason):
    path = tmp_path / "claims.json"
    path.write_text(json.dumps([CLAIM, CLAIM | change]))
    with pytest.raises(FlatlensError, match=f"^Row 2 of .*claims.json .*{reason}|^Row 2.*{reason}"):
        read_claims(path)


@pytest.mark.parametrize("content", ["{}", "3", "[3]", '[{"claim": "T1"}]', "[" * 9_000, "nope"])
def test_a_file_without_claims_is_one_sentence(tmp_path, content):
    (tmp_path / "claims.json").write_text(content)
    with pytest.raises(FlatlensError, match=r"claims\.json"):
        read_claims(tmp_path / "claims.json")


def test_claims_are_read_as_they_were_written(tmp_path):
    (tmp_path / "claims.json").write_text(json.dumps([CLAIM]))
    (row,) = read_claims(tmp_path / "claims.json").to_dict("records")
    assert row["verdict"] == "supported"
    assert row["high"] != row["high"]  # NaN


@pytest.mark.parametrize(
    "content", ["[]", "{}", '{"calls": 3}', '{"calls": [3]}', "{", "[" * 9_000]
)
def test_odd_provenance_is_one_sentence(tmp_path, content):
    (tmp_path / "provenance.json").write_text(content)
    with pytest.raises(FlatlensError, match=r"provenance\.json"):
        read_provenance(tmp_path / "provenance.json")
