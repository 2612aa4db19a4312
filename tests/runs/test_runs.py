"""A run folder survives anything, and whatever is wrong with it is said in one sentence."""

import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save

import flatlens as fl
from flatlens.runs import Run, RunBusyError, is_finished, read_runs
from flatlens.runs import run as module
from flatlens.runs.provenance import scrubbed

SRC = Path(module.__file__).parents[2]
RECORDS = [
    {"step": 0, "sharpness": 0.1 + 0.2, "log_volume": -math.inf, "note": "two\nlines"},
    {"step": 1, "sharpness": 5e-324, "log_volume": math.nan},
    {"step": 2, "sharpness": 1.7976931348623157e308, "log_volume": 1 / 3},
]


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "runs" / "a"


def filled(folder, records=RECORDS, config=None):
    with Run.open(folder, config) as run:
        for record in records:
            run.append(record)
    return (folder / "records.jsonl").read_bytes()


def refused(*words):
    """Expect a FlatlensError of one sentence with all of these words."""
    every = "".join(f"(?=.*{re.escape(word)})" for word in words)
    return pytest.raises(fl.FlatlensError, match=rf"\A(?i:{every})[^\n]{{20,400}}\Z")


def same(a, b):
    """Equal to the last bit, NaN included."""
    return repr(a) == repr(b)


# ------------------------------------------------------------------ what is written is read


def test_records_come_back_bit_for_bit(folder):
    filled(folder)
    with Run.open(folder) as run:
        assert same(run.records, RECORDS)


def test_records_are_the_same_before_and_after_reopening(folder):
    with Run.open(folder) as run:
        run.append({"step": 0, "x": np.float64(1 / 3), "y": np.float64("inf"), "z": (1, 2)})
        before = run.records
    with Run.open(folder) as run:
        assert same(run.records, before)


def test_lines_are_plain_json(folder):
    data = filled(folder)
    strict = [json.loads(line, parse_constant=pytest.fail) for line in data.splitlines()]
    assert [r["log_volume"] for r in strict] == ["-inf", "nan", 1 / 3]


def test_config_and_provenance(folder):
    with Run.open(folder, {"lr": 0.1, "widths": (3, 2)}) as run:
        assert run.config == {"lr": 0.1, "widths": [3, 2]}
    content = json.loads((folder / "config.json").read_text())
    assert content["config"] == {"lr": 0.1, "widths": [3, 2]}
    told = content["provenance"]
    assert told["flatlens"] == fl.__version__
    assert told["torch"] == torch.__version__
    assert told["threads"] == torch.get_num_threads()
    assert told["command"] == sys.argv
    assert told["git"] is None or re.fullmatch("[0-9a-f]{40,64}", told["git"])


@pytest.mark.parametrize(
    "value", [object(), torch.ones(2), {1, 2}], ids=["object", "tensor", "set"]
)
def test_what_json_cannot_hold_is_refused_and_not_written(folder, value):
    with Run.open(folder) as run:
        with refused("json"):
            run.append({"step": 0, "x": value})
        with refused("json"):
            run.checkpoint({}, {"x": value})
        assert run.records == []
        run.append({"step": 0})
    with refused("json"):
        Run.open(folder, {"x": value})
    assert (folder / "records.jsonl").read_text() == '{"step": 0}\n'


# ------------------------------------------------------------------ which run it is


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"lr": 0.2, "data": {"name": "digits", "n": 9}, "seed": 0}, ["lr=0.1", "0.2"]),
        ({"lr": 0.1, "data": {"name": "digits", "n": 8}, "seed": 0}, ["data.n=9", "8"]),
        ({"lr": 0.1, "data": {"name": "digits", "n": 9}}, ["seed=0", "nothing"]),
        ({"lr": 0.1, "data": {"name": "digits", "n": 9}, "seed": 0, "b": None}, ["b=nothing"]),
    ],
    ids=["value", "inner", "removed", "added"],
)
def test_another_config_is_refused_by_its_first_difference(folder, config, words):
    old = {"lr": 0.1, "data": {"name": "digits", "n": 9}, "seed": 0}
    data = filled(folder, config=old)
    with refused(str(folder), *words):
        Run.open(folder, config)
    assert (folder / "records.jsonl").read_bytes() == data
    with Run.open(folder, old) as run:  # the refusal left no lock behind
        assert len(run.records) == 3


def test_a_folder_without_records_and_checkpoint_takes_another_config(folder):
    Run.open(folder, {"lr": 0.1}).close()
    with Run.open(folder, {"lr": 0.2}) as run:
        assert run.config == {"lr": 0.2}
        run.checkpoint({}, {})
    with refused("lr=0.2", "0.3"):
        Run.open(folder, {"lr": 0.3})


def test_keys_that_an_older_run_lacks_have_their_defaults(folder):
    filled(folder, config={"lr": 0.1})
    with Run.open(folder, {"lr": 0.1, "b": 3}, defaults={"lr": 9, "b": 3}) as run:
        assert run.config == {"lr": 0.1, "b": 3}
    with refused("b=3", "4"):
        Run.open(folder, {"lr": 0.1, "b": 4}, defaults={"b": 3})


def test_a_damaged_config_is_refused(folder):
    filled(folder)
    (folder / "config.json").write_text('{"config": {"lr"')
    with refused("config.json", "damaged"):
        Run.open(folder)


def test_records_without_a_config_are_refused(folder):
    filled(folder)
    (folder / "config.json").unlink()
    with refused("records", "config.json"):
        Run.open(folder, {"lr": 0.1})


def test_a_second_writer_is_refused(folder):
    with Run.open(folder) as run:
        with pytest.raises(RunBusyError, match=r"open elsewhere"):
            Run.open(folder)
        run.append({"step": 0})
    with Run.open(folder) as run:
        assert run.records == [{"step": 0}]


def test_a_forgotten_run_frees_its_lock(folder):
    run = Run.open(folder)
    del run
    Run.open(folder).close()


def test_a_closed_run_takes_nothing(folder):
    run = Run.open(folder)
    run.close()
    for call in (
        lambda: run.append({"step": 0}),
        lambda: run.checkpoint({}, {}),
        lambda: run.restore(),
        lambda: run.finish(),
        lambda: run.log("timing", {}),
        lambda: run.cut(0),
    ):
        with refused("closed"):
            call()


def test_a_finished_run_takes_no_records_and_loses_none(folder):
    with Run.open(folder) as run:
        run.checkpoint({"w": torch.ones(1)}, {})
        run.append({"step": 0})
        assert not run.done
        run.finish()
        assert run.done
        with refused("finished"):
            run.append({"step": 1})
        assert run.restore() is not None
    with Run.open(folder) as run:
        assert run.done
        assert run.records == [{"step": 0}]


# ------------------------------------------------------------------ damage


@pytest.mark.slow
def test_cut_short_at_every_byte(folder, tmp_path):
    data = filled(folder)
    for length in range(len(data) + 1):
        (folder / "records.jsonl").write_bytes(data[:length])
        whole = data[:length].count(b"\n")
        assert len(read_runs(folder)) == whole  # reading never writes
        assert (folder / "records.jsonl").read_bytes() == data[:length]
        with Run.open(folder) as run:
            assert same(run.records, RECORDS[:whole])
            for record in RECORDS[whole:]:
                run.append(record)
        assert (folder / "records.jsonl").read_bytes() == data


def test_blocks_of_zeros_at_the_end_are_dropped(folder):
    """As a file system may leave them when the power went."""
    data = filled(folder)
    (folder / "records.jsonl").write_bytes(data + bytes(4096))
    with Run.open(folder) as run:
        assert len(run.records) == 3
    assert (folder / "records.jsonl").read_bytes() == data


@pytest.mark.parametrize("line", [b'{"step": 1, "sh', b"", b"[1, 2]", b"\x00\xff", b"7"], ids=repr)
def test_a_damaged_line_in_the_middle_is_named(folder, line):
    lines = filled(folder).split(b"\n")
    lines[1] = line
    damaged = b"\n".join(lines)
    (folder / "records.jsonl").write_bytes(damaged)
    with refused("line 2", "records.jsonl"):
        Run.open(folder)
    with refused("line 2", "records.jsonl"):
        read_runs(folder)
    assert (folder / "records.jsonl").read_bytes() == damaged


def test_interrupted_while_writing(folder, monkeypatch):
    data = filled(folder)
    with Run.open(folder) as run:

        def interrupt(_file):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", interrupt)
            with pytest.raises(KeyboardInterrupt):
                run.append({"step": 3})
            with pytest.raises(KeyboardInterrupt):
                run.checkpoint({"w": torch.ones(1)}, {})
        assert len(run.records) == 3
    assert (folder / "records.jsonl").read_bytes() == data
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "lock", "records.jsonl"]


# ------------------------------------------------------------------ checkpoints


def test_a_checkpoint_comes_back_bit_for_bit(folder):
    weight = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    tensors = {
        "weight": weight,
        "tied": weight,
        "view": weight.t()[1:],
        "count": torch.tensor(7),
        "rng": torch.get_rng_state(),
        "half": weight.bfloat16(),
        "leaf": weight.clone().requires_grad_(),
        "none": torch.empty(0, 2),
    }
    meta = {"step": 3, "loss": 0.1 + 0.2, "order": [2, 0, 1], "best": math.inf}
    with Run.open(folder) as run:
        run.checkpoint(tensors, meta)
    with Run.open(folder) as run:
        found, told = run.restore()
    assert told == meta
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_restoring_cuts_records_back_to_the_checkpoint(folder):
    with Run.open(folder) as run:
        assert run.restore() is None
        for record in RECORDS[:2]:
            run.append(record)
        run.checkpoint({}, {"step": 1})
        run.append(RECORDS[2])
    with Run.open(folder) as run:
        assert run.restore() == ({}, {"step": 1})
        assert same(run.records, RECORDS[:2])
    assert (folder / "records.jsonl").read_bytes().count(b"\n") == 2


def test_restoring_without_a_checkpoint_starts_again(folder):
    filled(folder)
    with Run.open(folder) as run:
        assert run.restore() is None
        assert run.records == []
    assert (folder / "records.jsonl").read_bytes() == b""


def test_a_damaged_checkpoint_is_refused_and_nothing_is_cut(folder):
    data = filled(folder)
    with Run.open(folder) as run:
        run.checkpoint({"w": torch.ones(100)}, {})
    path = folder / "checkpoint.safetensors"
    path.write_bytes(path.read_bytes()[:-9])
    with Run.open(folder) as run, refused("checkpoint.safetensors", "damaged"):
        run.restore()
    assert (folder / "records.jsonl").read_bytes() == data


def test_fewer_records_than_the_checkpoint_knows(folder):
    with Run.open(folder) as run:
        run.append({"step": 0})
        run.checkpoint({}, {})
    (folder / "records.jsonl").write_bytes(b"")
    with Run.open(folder) as run, refused("1 record,", "has 0"):
        run.restore()


def test_rests_of_a_killed_writer_are_removed(folder):
    filled(folder)
    (folder / ".checkpoint.safetensors.new").write_bytes(b"half")  # of flatlens 0.1.0
    (folder / ".flatlens-unfinished-x1-checkpoint.safetensors").write_bytes(b"half")
    Run.open(folder).close()
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "lock", "records.jsonl"]


def test_files_of_others_are_not_removed(folder):
    filled(folder)
    mine = [".notes.new", ".flatlens-notes", "figure.png.new", ".flatlens-unfinished-x1-error.txt"]
    for name in mine:
        (folder / name).write_text("mine")
    Run.open(folder).close()
    assert set(mine) < {p.name for p in folder.iterdir()}


# ------------------------------------------------------------------ finished runs


def finished(folder):
    """A finished run of three records whose checkpoint was written after the second."""
    with Run.open(folder) as run:
        run.append(RECORDS[0])
        run.append(RECORDS[1])
        run.checkpoint({"w": torch.ones(1)}, {"step": 1})
        run.append(RECORDS[2])
        run.finish()
    return (folder / "records.jsonl").read_bytes()


def test_done_holds_number_and_checksum_of_the_records(folder):
    data = finished(folder)
    content = json.loads((folder / "done").read_text())
    assert content == {"records": 3, "sha256": hashlib.sha256(data).hexdigest()}
    assert is_finished(folder)


LOST = {
    "has 2 records": lambda data: b"\n".join(data.split(b"\n")[:2]) + b"\n",
    "checksum": lambda data: data.replace(b"1.797", b"1.796"),
    "has 0 records": lambda data: b"",
    "damaged": lambda data: data.replace(b'{"step": 2', b'"step": 2'),
}


@pytest.mark.parametrize("words", LOST)
def test_a_finished_run_that_lost_records_is_noticed_and_repaired(folder, words):
    data = finished(folder)
    (folder / "records.jsonl").write_bytes(LOST[words](data))
    assert not is_finished(folder)
    with refused("records.jsonl", words):
        read_runs(folder)
    with Run.open(folder) as run:
        assert run.damage is not None
        run.repair()
        assert not run.done
        # the records before the checkpoint decide whether it can be used
        assert (run.restore() is not None) == (words != "has 0 records")
        for record in RECORDS[len(run.records) :]:
            run.append(record)
        run.finish()
    assert (folder / "records.jsonl").read_bytes() == data
    assert is_finished(folder)


def test_records_before_the_checkpoint_that_were_changed_start_the_run_again(folder):
    data = finished(folder)
    (folder / "records.jsonl").write_bytes(data.replace(b"0.30000000000000004", b"0.3"))
    with Run.open(folder) as run:
        run.repair()
        assert run.restore() is None
        assert run.records == []


def test_what_follows_the_last_record_of_a_finished_run_is_dropped(folder):
    data = finished(folder)
    (folder / "records.jsonl").write_bytes(data + b'{"step": 9}\n{"st')
    with Run.open(folder) as run:
        assert run.damage is None
        assert len(run.records) == 3
    assert (folder / "records.jsonl").read_bytes() == data


def test_the_empty_done_of_0_1_0_is_accepted(folder):
    finished(folder)
    (folder / "done").write_bytes(b"")
    content = json.loads((folder / "config.json").read_text())
    assert content.pop("format") == 2
    (folder / "config.json").write_text(json.dumps(content))
    assert is_finished(folder)
    assert len(read_runs(folder)) == 3
    with Run.open(folder) as run:
        assert run.done
        assert run.damage is None


def test_a_later_format_is_refused(folder):
    filled(folder)
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | {"format": 3}))
    with refused("format 3", "newer flatlens"):
        Run.open(folder)


# ------------------------------------------------------------------ hostile files

DEEP = "[" * 100_000 + "]" * 100_000
HOSTILE_LINES = {
    "nested too deeply": DEEP.encode(),
    "levels": b'{"step": ' + b"[" * 40 + b"]" * 40 + b"}",
    "integer of 400 digits": b'{"step": ' + b"7" * 400 + b"}",
    "integer beyond 64 bits": b'{"step": 9999999999999999999}',
    "'step' is [1]": b'{"step": [1]}',
    "not UTF-8": b'{"step": "\xff"}',
    "not JSON": b'{"step" 1}',
    "instead of an object": b"[1]",
}


@pytest.mark.parametrize("words", HOSTILE_LINES)
def test_a_hostile_record_is_refused_by_file_line_and_reason(folder, words):
    data = filled(folder)
    (folder / "records.jsonl").write_bytes(data + HOSTILE_LINES[words] + b"\n")
    for read in (Run.open, read_runs):
        with refused("line 4", "records.jsonl", words):
            read(folder)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[]", "object"),
        ('{"config": 3}', "'config' is 3"),
        ('{"provenance": {}}', "'config' is missing"),
        (f'{{"config": {DEEP}}}', "nested too deeply"),
        ('{"config": {"seed": ' + "1" * 400 + "}}", "400 digits"),
        ('{"config": {}, "format": "two"}', "'format'"),
    ],
)
def test_a_hostile_config_is_refused_by_its_field(folder, content, words):
    filled(folder)
    (folder / "config.json").write_text(content)
    with refused("config.json", words):
        Run.open(folder)


@pytest.mark.parametrize("name", ["records.jsonl", "config.json", "done", "checkpoint.safetensors"])
@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_links_pipes_and_folders_are_not_read(folder, tmp_path, name, kind):
    finished(folder)
    path = folder / name
    path.rename(tmp_path / "elsewhere")
    if kind == "link":
        path.symlink_to(tmp_path / "elsewhere")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    words = "symbolic link" if kind == "link" else "regular file"
    if name == "checkpoint.safetensors":
        with Run.open(folder) as run, refused(name, words):
            run.restore()
    elif name == "done":
        with Run.open(folder) as run:
            assert words in (run.damage or "")
    else:
        with refused(name, words):
            Run.open(folder)


def test_a_hostile_checkpoint_description_is_refused(folder):
    with Run.open(folder) as run:
        for text in ('{"records": "many", "meta": {}}', '{"records": 0}', DEEP, "7"):
            data = save({"w": torch.ones(1)}, {"flatlens": text})
            (folder / "checkpoint.safetensors").write_bytes(data)
            with refused("checkpoint.safetensors", "damaged"):
                run.restore()
        (folder / "checkpoint.safetensors").write_bytes(save({"w": torch.ones(1)}))
        with refused("checkpoint.safetensors", "damaged"):
            run.restore()


# ------------------------------------------------------------------ the lock


@pytest.mark.slow
def test_a_forked_child_does_not_hold_the_lock(folder):
    script(FORKED, str(folder))


FORKED = """
    import os, sys, time
    from flatlens.runs import Run
    run = Run.open(sys.argv[1])
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            run.append({"step": 0})
        except Exception as error:
            assert "closed" in str(error), error
            os.write(write_end, b"refused")
        time.sleep(60)
        os._exit(0)
    assert os.read(read_end, 7) == b"refused"
    run.append({"step": 1})
    run.close()
    with Run.open(sys.argv[1]) as again:  # the child lives, and holds nothing
        assert again.records == [{"step": 1}]
    os.kill(child, 9)
    os.waitpid(child, 0)
"""


@pytest.mark.slow
def test_run_folders_need_no_fcntl(folder):
    """As on Windows: neither module may be imported by flatlens itself."""
    script(NO_FCNTL, str(folder))


NO_FCNTL = """
    import os, sys
    import filelock, torch  # the library has a lock of its own for every system
    sys.modules["fcntl"] = None
    del os.fork, os.register_at_fork, os.pwrite, os.O_NOFOLLOW, os.O_NONBLOCK
    filelock.FileLock = filelock.SoftFileLock
    from flatlens.runs import Run, RunBusyError, read_runs
    import flatlens.data, flatlens.data.fetch, flatlens.training.train
    with Run.open(sys.argv[1]) as run:
        run.append({"step": 0})
        run.checkpoint({"w": torch.ones(1)}, {"step": 0})
        try:
            Run.open(sys.argv[1])
        except RunBusyError:
            run.finish()
    assert len(read_runs(sys.argv[1])) == 1
"""


# ------------------------------------------------------------------ provenance


@pytest.mark.parametrize(
    "words",
    [
        ["--hub-token", "s3cret"],
        ["--api-key=s3cret"],
        ["--wandb.api_key", "s3cret"],
        ["--password", "s3cret"],
        ["PASSWORD=s3cret"],
        ["--data", "npz:a?token=s3cret"],
        ["--address", "tcp://me:s3cret@host:1"],
        ["--header", "Authorization: s3cret"],
        ["hf_abcdefghijs3cret"],
        ["--x", "ghp_0123456789s3cret"],
    ],
)
def test_secrets_of_the_command_line_are_not_stored(folder, monkeypatch, words):
    monkeypatch.setattr(sys, "argv", ["flatlens", "train", *words, "--lr", "0.1"])
    Run.open(folder).close()
    text = (folder / "config.json").read_text()
    assert "s3cret" not in text
    command = json.loads(text)["provenance"]["command"]
    assert command[:2] == ["flatlens", "train"]
    assert command[-2:] == ["--lr", "0.1"]


@pytest.mark.parametrize(
    "words",
    [
        ["--model", "timm:vit_tiny_patch16_224", "--tokens", "8"],
        ["--data", "npz:/home/me/key/a.npz", "--seed", "12345678901"],
        ["--config", "C:\\keys\\a.toml", "--steps", "1000000000000"],
    ],
)
def test_ordinary_words_of_the_command_line_stay(words):
    assert scrubbed(words) == words


# ------------------------------------------------------------------ reading many


def sweep(folder):
    filled(folder / "a", [{"step": 0, "loss": 0.5}], {"lr": 0.1, "loss": "mse", "data": {"n": 3}})
    filled(folder / "b/c", [{"step": 0, "loss": 0.25, "volume": math.inf}, {"step": 9, "loss": 1}],
           {"lr": 0.2, "loss": "mse", "widths": [2, 3]})  # fmt: skip


def test_read_runs_is_one_tidy_table(tmp_path):
    sweep(tmp_path)
    table = read_runs(tmp_path)
    assert list(table) == [
        "run", "step", "loss", "volume", "lr", "config.loss", "data.n", "widths",
    ]  # fmt: skip
    assert list(table.run) == ["a", "b/c", "b/c"]
    assert list(table.step) == [0, 0, 9]
    assert table.step.dtype == int
    assert list(table.lr) == [0.1, 0.2, 0.2]
    assert set(table["config.loss"]) == {"mse"}
    assert table.volume[1] == math.inf
    assert table.volume.dtype == float
    assert list(table.groupby("widths").loss.sum()) == [1.25]


@pytest.mark.slow
def test_read_runs_while_they_are_written(tmp_path):
    with Run.open(tmp_path / "a") as run:
        assert list(read_runs(tmp_path)) == ["run", "step"]
        run.append({"step": 0})
        assert len(read_runs(tmp_path)) == 1
    assert list(read_runs(tmp_path / "a").run) == ["."]


def test_damaged_runs_may_be_left_out_and_reported(tmp_path):
    for name in ("good", "bad"):
        filled(tmp_path / name)
    (tmp_path / "bad" / "config.json").write_text("{")
    told: list[str] = []
    assert set(read_runs(tmp_path, damaged=told).run) == {"good"}
    assert len(told) == 1
    assert "bad/config.json is missing or damaged" in told[0]
    assert len(read_runs(tmp_path / "bad", damaged=told)) == 0


def test_unreadable_runs_are_named_with_the_reason(tmp_path):
    for name in ("good", "bad", "lost"):
        finished(tmp_path / name)
    (tmp_path / "bad" / "config.json").write_text("{")
    (tmp_path / "lost" / "records.jsonl").unlink()
    with pytest.warns(UserWarning, match="left out") as caught:
        table = read_runs(tmp_path)
    assert set(table.run) == {"good"}
    assert sorted(table.attrs["unreadable"]) == ["bad", "lost"]
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == 2
    assert "bad/config.json is missing or damaged" in messages[0]
    assert "lost/records.jsonl: No such file" in messages[1]


def test_no_runs(tmp_path):
    with refused("no run", str(tmp_path)):
        read_runs(tmp_path)


def test_the_documented_duckdb_query(tmp_path, monkeypatch):
    duckdb = pytest.importorskip("duckdb", reason="needs duckdb")
    (query,) = re.findall(r"SELECT .* FROM read_json_auto\(.*\)", module.__doc__)
    values = [-1.5, -math.inf, 0.1 + 0.2]
    filled(tmp_path / "runs/a", [{"step": k, "log_volume": v} for k, v in enumerate(values)])
    filled(tmp_path / "runs/b/c", [{"step": 0, "mls": 2.0, "log_volume": -math.inf}])
    monkeypatch.chdir(tmp_path)
    table = duckdb.sql(query).df().sort_values(["filename", "step"])
    assert list(table.step) == [0, 1, 2, 0]
    assert [Path(name).parent.as_posix() for name in table.filename] == ["runs/a"] * 3 + [
        "runs/b/c"
    ]
    (cast,) = re.findall(r"CAST\(log_volume AS DOUBLE\)", module.__doc__)
    found = duckdb.sql(query.replace("*", f"{cast} AS v, filename, step", 1)).df()
    assert list(found.sort_values(["filename", "step"]).v) == [*values, -math.inf]


# ------------------------------------------------------------------ kill -9, full and closed disks


def script(code, *arguments, before=()):
    """Run `code` in a fresh interpreter (importing torch takes seconds: one for many cases)."""
    environment = {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}
    command = [*before, sys.executable, "-W", "error", "-c", textwrap.dedent(code), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


KILLED = """
    import os, random, signal, sys, time
    from pathlib import Path
    import torch
    from flatlens.runs import Run, RunBusyError, read_runs

    def train(folder):
        with Run.open(folder, {"steps": 60}) as run:
            found = run.restore()
            tensors, meta = found or ({"w": torch.full((50,), 0.5)}, {"step": 0})
            w = tensors["w"]
            for step in range(meta["step"], 60):
                w = 3.9 * w * (1 - w)
                run.append({"step": step, "w": w[0].item(), "text": "x" * (step * 37 % 500)})
                if step % 7 == 0:
                    run.checkpoint({"w": w}, {"step": step + 1})
            run.finish()

    def child(folder):
        pid = os.fork()
        if pid == 0:
            try:
                train(folder)
                os._exit(0)
            finally:
                os._exit(1)
        return pid

    torch.set_num_threads(1)
    whole, broken, kills = sys.argv[1], sys.argv[2], int(sys.argv[3])
    start = time.perf_counter()
    assert os.waitpid(child(whole), 0)[1] == 0
    took = time.perf_counter() - start
    random.seed(0)
    killed = tries = 0
    while killed < kills:
        tries += 1
        pid = child(broken)
        time.sleep(random.random() * took / 4)
        os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
        killed += os.WIFSIGNALED(status)
        if os.path.exists(broken + "/done"):  # begin another one
            same = [Path(run, "records.jsonl").read_text() for run in (broken, whole)]
            assert same[0] == same[1]
            os.rename(broken, f"{broken}.{tries}")
    assert os.waitpid(child(broken), 0)[1] == 0
    print(len(read_runs(broken)))

    # a forked child that outlives its parent's Run does not keep the lock
    run = Run.open(whole)
    ready, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(tell, b"x")
        time.sleep(20)
        os._exit(0)
    os.read(ready, 1)
    run.close()
    try:
        Run.open(whole).close()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
"""


@pytest.mark.slow
def test_killed_at_random_moments(tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert script(KILLED, str(whole), str(broken), "30") == "60\n"
    names = [p.name for p in sorted(whole.iterdir())]
    assert names == ["checkpoint.safetensors", "config.json", "done", "lock", "records.jsonl"]
    assert [p.name for p in sorted(broken.iterdir())] == names
    for name in names[:2] + names[3:]:
        assert (broken / name).read_bytes() == (whole / name).read_bytes()


FULL = """
    import sys
    from pathlib import Path
    import torch
    import flatlens as fl
    from flatlens.runs import Run

    def refused(call, *words):
        try:
            call()
        except fl.FlatlensError as error:
            assert all(word in str(error) for word in words), error
            assert "\\n" not in str(error)
            return
        raise AssertionError("nothing was refused")

    folder, reason = Path(sys.argv[1]), sys.argv[2]
    if len(sys.argv) > 3:
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), -1))
    with Run.open(folder, {"lr": 0.1}) as run:
        run.append({"step": 0})
        run.checkpoint({"w": torch.ones(10)}, {"step": 0})
        before = {p.name: p.read_bytes() for p in folder.iterdir()}
        refused(lambda: run.append({"step": 1, "text": "x" * 200_000}), reason, "records.jsonl")
        big = {"w": torch.ones(100_000)}
        refused(lambda: run.checkpoint(big, {}), reason, "checkpoint.safetensors")
        assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
        run.append({"step": 1})  # there is room for a short one
    with Run.open(folder) as run:
        assert run.records == [{"step": 0}, {"step": 1}]
        assert run.restore()[1] == {"step": 0}
"""


@pytest.mark.slow
def test_a_file_that_may_not_grow(tmp_path):
    script(FULL, str(tmp_path / "a"), "File too large", "65536")


def namespaces(tmp_path):
    """`unshare` with the right to mount, or skip."""
    tool = shutil.which("unshare")
    trial = [tool or "", "-rm", "mount", "-t", "tmpfs", "tmpfs", str(tmp_path)]
    if tool is None or subprocess.run(trial, capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system (unshare -rm)")
    return [tool, "-rm", "sh", "-c"]


@pytest.mark.slow
def test_a_full_disk(tmp_path):
    mount = f'mount -t tmpfs -o size=64k tmpfs {tmp_path} && exec "$@"'
    script(FULL, str(tmp_path / "a"), "No space left", before=[*namespaces(tmp_path), mount, "sh"])


READ_ONLY = """
    import sys
    import flatlens as fl
    from flatlens.runs import Run, read_runs
    for name in ("a", "new"):
        try:
            Run.open(sys.argv[1] + "/" + name)
        except fl.FlatlensError as error:
            print(error)
    print(len(read_runs(sys.argv[1])))
"""


@pytest.mark.slow
def test_a_read_only_disk(tmp_path):
    inner = tmp_path / "runs"
    data = filled(inner / "a")
    mount = f'mount --bind {inner} {inner} && mount -o remount,bind,ro {inner} && exec "$@"'
    out = script(READ_ONLY, str(inner), before=[*namespaces(tmp_path), mount, "sh"]).splitlines()
    assert [line.split(":")[1].split(";")[0].strip() for line in out[:2]] == [
        "Read-only file system"
    ] * 2
    assert out[2] == "3"
    assert (inner / "a" / "records.jsonl").read_bytes() == data


def test_a_folder_that_may_not_be_written(tmp_path, monkeypatch):
    """Root may write anywhere, so the refusal itself is played."""
    filled(tmp_path / "a")

    def forbid(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", forbid)
    with refused(str(tmp_path / "a"), "permission denied"):
        Run.open(tmp_path / "a")


def test_a_file_in_place_of_the_folder(tmp_path):
    (tmp_path / "a").write_text("")
    with refused(str(tmp_path / "a"), "exists"):
        Run.open(tmp_path / "a")
