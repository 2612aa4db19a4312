"""Output options: nothing that flatlens did not write is overwritten."""

import os

import pytest

from flatlens import FlatlensError, cli
from flatlens.cli.outputs import begins_with, check_output_file, check_output_folder


def own(path):
    return begins_with("<title>flatlens")(path)


def test_a_new_file_and_an_own_file_are_taken(tmp_path):
    check_output_file(tmp_path / "new.html", own, "a report")
    (tmp_path / "old.html").write_text("<html><title>flatlens report: runs</title>")
    check_output_file(tmp_path / "old.html", own, "a report")


@pytest.mark.parametrize("kind", ["folder", "device", "link", "fifo", "other"])
def test_everything_else_is_refused(tmp_path, kind):
    path = tmp_path / "out.html"
    match kind:
        case "folder":
            path.mkdir()
        case "device":
            path = type(path)("/dev/null")
        case "link":
            (tmp_path / "target").write_text("<title>flatlens report")
            path.symlink_to(tmp_path / "target")
        case "fifo":
            os.mkfifo(path)
        case "other":
            path.write_text("my notes")
    with pytest.raises(FlatlensError, match="a report"):
        check_output_file(path, own, "a report")


def test_a_report_does_not_overwrite_its_input(tmp_path, capsys):
    run = tmp_path / "runs" / "a"
    run.mkdir(parents=True)
    (run / "records.jsonl").write_text('{"step": 0, "nmls": 1.0}\n')
    (run / "config.json").write_text('{"config": {}}')
    records = run / "records.jsonl"
    assert cli.main(["report", str(tmp_path / "runs"), "-o", str(records)]) == 2
    assert "exists and is not a report of flatlens" in capsys.readouterr().err
    assert records.read_text() == '{"step": 0, "nmls": 1.0}\n'


def test_a_folder_option_refuses_a_file_and_files_that_are_no_files(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(FlatlensError, match="not a folder"):
        check_output_folder(tmp_path / "file")
    (tmp_path / "demo.png").mkdir()
    with pytest.raises(FlatlensError, match=r"demo.png is not a regular file"):
        check_output_folder(tmp_path, ["demo.png"])
    check_output_folder(tmp_path / "new", ["demo.png"])
