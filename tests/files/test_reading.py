"""Files that were damaged or made by a stranger give one sentence, and files are written whole."""

import gzip
import os
import random

import pytest

from flatlens.errors import FlatlensError
from flatlens.files.reading import parse_json, read_bytes, read_gzip_lines
from flatlens.files.replacing import replacing, write_whole
from flatlens.files.schema import Field, checked

LINES = [f'{{"step": {k}}}'.encode() for k in range(500)]


def test_gzip_lines_come_back(tmp_path):
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(b"\n".join(LINES[:200]) + b"\n") + gzip.compress(b"{}\n"))
    assert list(read_gzip_lines(path)) == [*LINES[:200], b"{}"]


@pytest.mark.parametrize("seed", range(20))
def test_flipped_bytes_of_a_gzip_file_give_one_sentence(tmp_path, seed):
    draw = random.Random(seed)
    content = bytearray(gzip.compress(b"\n".join(LINES) + b"\n", mtime=0))
    for _ in range(3):
        content[draw.randrange(10, len(content))] ^= 1 << draw.randrange(8)
    (tmp_path / "a.gz").write_bytes(content)
    with pytest.raises(FlatlensError, match=r"a\.gz is (damaged|cut short)[^\n]*\.\Z"):
        list(read_gzip_lines(tmp_path / "a.gz"))


def test_a_gzip_file_that_is_cut_short_or_no_gzip(tmp_path):
    content = gzip.compress(b"\n".join(LINES))
    for part, words in ((content[:-9], "cut short"), (b"", "cut short"), (b"text", "damaged")):
        (tmp_path / "a.gz").write_bytes(part)
        with pytest.raises(FlatlensError, match=words):
            list(read_gzip_lines(tmp_path / "a.gz"))


def test_a_gzip_bomb_is_refused(tmp_path):
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"0\n" * 5_000_000))
    with pytest.raises(FlatlensError, match="unpacks to more than is read"):
        for _ in read_gzip_lines(tmp_path / "a.gz", limit=1_000_000):
            pass


def test_a_file_larger_than_the_limit_is_refused(tmp_path):
    (tmp_path / "a").write_bytes(bytes(100))
    with pytest.raises(FlatlensError, match="has 100 bytes, more than the 99"):
        read_bytes(tmp_path / "a", limit=99)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({}, "'count' is missing"),
        ({"count": "3"}, "'count' is '3', but it must be a whole number"),
        ({"count": True}, "whole number"),
        ({"count": -1}, "a finite number of at least 0"),
        ([], "instead of an object"),
    ],
)
def test_a_schema_names_the_field(value, words):
    with pytest.raises(FlatlensError, match=words):
        checked(value, {"count": Field((int,), required=True, low=0)}, "done")


def test_json_names_its_place():
    with pytest.raises(
        FlatlensError, match=r"a.json is damaged: it is not JSON .*line 2, column 2"
    ):
        parse_json("{\n}}", "a.json")


def test_a_full_disk_names_the_file_and_changes_nothing(tmp_path):
    write_whole(tmp_path / "a", b"old")
    with (
        pytest.raises(FlatlensError, match=r"Cannot write .*/a: No space left"),
        replacing(tmp_path / "a"),
    ):
        raise OSError(28, os.strerror(28))
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_bytes() == b"old"


def test_an_error_about_another_file_stays_what_it_is(tmp_path):
    with pytest.raises(FileNotFoundError), replacing(tmp_path / "a"):
        (tmp_path / "nowhere").read_text()
    assert not list(tmp_path.iterdir())
