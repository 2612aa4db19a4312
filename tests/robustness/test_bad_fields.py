"""Every field of every file that is read back: a wrong value names the file and the field."""

import gzip
import json
import math
from dataclasses import fields

import bad_values
import pytest
import torch
from safetensors.torch import save_file

import flatlens as fl
from flatlens.files.schema import Field
from flatlens.report import measurement_files
from flatlens.reproduction import archive, call_log, judgement
from flatlens.runs import Run, checkpoints, done_file, run_config
from flatlens.training.config import Config
from flatlens.training.config_checks import CHECKS

HUGE = 10**30
# JSON values of every type; a field is tried with those that its schema does not allow.
VALUES = [
    None, True, 3, -1, 0.5, float("nan"), float("inf"), HUGE, "word", "", [], [1], {}, {"a": 1},
]  # fmt: skip


def wrong(field: Field):
    """Values of a type that the field does not have, and numbers outside of its range."""
    for value in VALUES:
        kind = type(value)
        number = kind in (int, float)
        allowed = kind in field.kinds or (kind is int and float in field.kinds)
        limited = math.isfinite(field.low) or math.isfinite(field.high)
        outside = number and limited and not field.low <= value <= field.high
        if not allowed or outside or value is HUGE:
            yield value


RECORD = {"recipe": "mlp", "run": "a", "step": 0, "steps": 5, "lr": 0.1, "nmls": 1.0}
CLAIM = {
    "claim": "T1", "network": "mlp", "part": "p", "scope": "s", "statistic": "x", "claimed": "> 0",
    "value": 1.0, "low": 0.5, "high": None, "effect": 2.0, "n": 4, "units": 4,
    "verdict": "supported", "main": True, "note": "", "figure": "g4",
}  # fmt: skip
CALL = {"command": "flatlens", "scale": "smoke", "wall_time": "3 s"}
EXAMPLES = {str: "word", int: 1.0, bool: True}  # by the type that a field of an entry has
ENTRY = {
    entries: {n: EXAMPLES[field.kinds[0]] for n, field in schema.items()}
    for entries, schema in measurement_files.SCHEMAS.items()
}


def read_archive(folder, change):
    line = json.dumps(RECORD | change).encode() + b"\n"
    (folder / "file.gz").write_bytes(gzip.compress(line))
    archive.read_records(folder / "file.gz")


def read_claims(folder, change):
    (folder / "file.json").write_text(json.dumps([CLAIM | change]))
    judgement.read_claims(folder / "file.json")


def read_provenance(folder, change):
    (folder / "file.json").write_text(json.dumps({"calls": []} | change))
    call_log.read_provenance(folder / "file.json")


def read_call(folder, change):
    (folder / "file.json").write_text(json.dumps({"calls": [CALL | change]}))
    call_log.read_provenance(folder / "file.json")


def read_measurement(entries):
    def read(folder, change):
        content = {name: [entry] for name, entry in ENTRY.items()}
        content[entries] = [ENTRY[entries] | change]
        (folder / "file.json").write_text(json.dumps(content))
        measurement_files.read_measurement(folder / "file.json")

    return read


def read_done(folder, change):
    content = {"records": 0, "sha256": "0" * 64} | change
    (folder / "done").write_text(json.dumps(content))
    done_file.read(folder)


def read_run_config(folder, change):
    (folder / "config.json").write_text(json.dumps({"format": 1, "config": {}} | change))
    run_config.read_config(folder / "config.json")


def read_checkpoint(folder, change):
    content = json.dumps({"records": 0, "meta": {}} | change)
    save_file({"a": torch.zeros(1)}, folder / "file.safetensors", {checkpoints.KEY: content})
    checkpoints.read(folder / "file.safetensors")


FILES = {
    "records.jsonl.gz": (archive.SCHEMA, read_archive),
    "claims.json": (judgement.SCHEMA, read_claims),
    "provenance.json": (call_log.SCHEMA, read_provenance),
    "provenance.json, call": (call_log.CALL, read_call),
    "done": (done_file.SCHEMA, read_done),
    "config.json": (run_config.SCHEMA, read_run_config),
    "checkpoint.safetensors": (checkpoints.SCHEMA, read_checkpoint),
    **{
        f"measurement, {entries}": (schema, read_measurement(entries))
        for entries, schema in measurement_files.SCHEMAS.items()
    },
}
TABLE = [
    pytest.param(file, name, value, id=f"{file}-{name}-{bad_values.label(value)}")
    for file, (schema, _) in FILES.items()
    for name, field in schema.items()
    for value in wrong(field)
]


@pytest.mark.parametrize(("file", "name", "value"), TABLE)
def test_a_wrong_field_is_one_sentence_with_its_name(file, name, value, tmp_path):
    _, read = FILES[file]
    with pytest.raises(fl.FlatlensError, match=r"file\.|done|config\.json") as error:
        read(tmp_path, {name: value})
    message = str(error.value)
    assert len(message.splitlines()) == 1
    assert repr(name) in message or value is HUGE


@pytest.mark.parametrize("file", FILES)
def test_a_file_without_changes_is_read(file, tmp_path):
    FILES[file][1](tmp_path, {})


# -- the fields of a config ------------------------------------------------------------------

KINDS = {f.name: f.type for f in fields(Config)}
CONFIG_TABLE = [
    pytest.param(name, value, id=f"{name}-{bad_values.label(value)}")
    for name, annotation in KINDS.items()
    for value in [
        *bad_values.wrong_values(str(annotation)),
        *(v for v in bad_values.odd_values(str(annotation)) if isinstance(v, int | float)),
    ]
    if (name, value) != ("measure", 3)  # every 3 steps
]


@pytest.mark.parametrize(("name", "value"), CONFIG_TABLE)
def test_a_wrong_field_of_a_config_is_named(name, value):
    with pytest.raises(fl.FlatlensError, match=name) as error:
        Config.from_dict({name: value})
    assert len(str(error.value).splitlines()) == 1


def test_every_field_of_a_config_has_a_check():
    assert set(KINDS) == set(CHECKS)
    assert len(CONFIG_TABLE) > 200


# -- the lines of a run ----------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, True, [], {}], ids=repr)
def test_a_wrong_step_of_a_run_names_line_and_field(value, tmp_path):
    with Run.open(tmp_path / "a", {}) as run:
        run.append({"step": 0})
    path = tmp_path / "a" / "records.jsonl"
    path.write_text(path.read_text() + json.dumps({"step": value}) + "\n")
    with pytest.raises(fl.FlatlensError, match=r"^Line 2 of .*records\.jsonl .*'step'"):
        fl.read_runs(tmp_path)
