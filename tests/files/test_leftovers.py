"""What a killed writer left is removed by the next writer of the same file, and nothing else is."""

import os
import signal
import subprocess
import sys

import pytest

from flatlens.files.replacing import TEMPORARY, is_temporary, write_whole

WRITER = """
import sys, time
from pathlib import Path
from flatlens.files.replacing import replacing
with replacing(Path(sys.argv[1])) as temporary:
    temporary.write_bytes(b"half")
    print("writing", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def writer(tmp_path):
    """A process that is in the middle of writing a.pdf."""
    command = [sys.executable, "-c", WRITER, str(tmp_path / "a.pdf")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout.readline() == "writing\n"
        yield process
        process.kill()


def temporary_files(folder):
    return sorted(file.name for file in folder.iterdir() if is_temporary(file))


def test_the_next_writer_removes_what_a_killed_one_left(tmp_path, writer):
    write_whole(tmp_path / "a.pdf", b"mine")
    assert len(temporary_files(tmp_path)) == 1  # its writer lives
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    write_whole(tmp_path / "b.pdf", b"another file")
    assert len(temporary_files(tmp_path)) == 1
    write_whole(tmp_path / "a.pdf", b"whole")
    assert temporary_files(tmp_path) == []
    assert (tmp_path / "a.pdf").read_bytes() == b"whole"


def test_files_of_other_machines_and_of_the_user_stay(tmp_path):
    names = [f"{TEMPORARY}00000000-1-abcdefgh-a.pdf", f"{TEMPORARY}abcdefgh-a.pdf", ".a.pdf.new"]
    for name in names:
        (tmp_path / name).write_bytes(b"")
    write_whole(tmp_path / "a.pdf", b"whole")
    assert {file.name for file in tmp_path.iterdir()} == {"a.pdf", *names}
