"""Downloads, against a server on this machine that misbehaves in every way we know of."""

import hashlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tarfile
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock

from flatlens import cli
from flatlens.data import download as download_module
from flatlens.data import fetch as module
from flatlens.data import published as published_module
from flatlens.data.fetch import PUBLISHED, Published, download, fetch, verify
from flatlens.errors import FlatlensError

WHOLE = np.random.default_rng(0).bytes(300_000)
GOOD = "sha256:" + hashlib.sha256(WHOLE).hexdigest()


class Server(ThreadingHTTPServer):
    """Gives `files`; `fault` is how it does so badly; `log` has every request's Range."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.log, self.fault = {"/file": WHOLE}, [], None
        self.stalled, self.release = threading.Event(), threading.Event()

    def url(self, path="/file"):
        return f"http://127.0.0.1:{self.server_port}{path}"


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *arguments):
        pass

    def do_GET(self):
        server, content = self.server, self.server.files.get(self.path)
        asked = self.headers.get("Range")
        server.log.append(asked)
        if content is None:
            return self.send_error(404)
        if server.fault == "503":
            return self.send_error(503)
        start = 0
        if asked and server.fault != "no range":
            start = int(asked.removeprefix("bytes=").rstrip("-"))
            if start >= len(content):
                return self.send_error(416)
        self.send_response(206 if start else 200)
        if start:
            last = len(content) - 1
            self.send_header("Content-Range", f"bytes {start}-{last}/{len(content)}")
        if server.fault != "no length":
            self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        body = content[start:]
        if server.fault == "cut":
            body = body[:100_000]
        if server.fault == "stall":
            self.wfile.write(body[:100_000])
            server.stalled.set()
            server.release.wait(30)
            return None
        self.wfile.write(body)
        return None


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.release.set()
        server.shutdown()
        thread.join()


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "new" / "file"


def part(path: Path) -> Path:
    return path.with_name("file.part")


def left(path: Path, content: bytes) -> None:
    """What an earlier try left."""
    path.parent.mkdir()
    part(path).write_bytes(content)


def refusal(server, path) -> str:
    with pytest.raises(FlatlensError) as caught:
        download(server.url(), path, GOOD)
    assert not path.exists()
    sentence = str(caught.value)
    assert sentence.endswith(".")
    assert "\n" not in sentence
    return sentence


def test_a_file_is_fetched_whole(server, path):
    seen = []
    download(server.url(), path, GOOD, lambda done, total: seen.append((done, total)))
    assert path.read_bytes() == WHOLE
    assert tree(path.parent) == ["file"]
    assert (seen[0], seen[-1]) == ((0, 300_000), (300_000, 300_000))


@pytest.mark.parametrize("size", [1, 123_456, 299_999])
def test_an_earlier_try_is_carried_on_with(server, path, size):
    left(path, WHOLE[:size])
    seen = []
    download(server.url(), path, GOOD, lambda done, total: seen.append((done, total)))
    assert path.read_bytes() == WHOLE
    assert server.log == [f"bytes={size}-"]
    assert seen[0] == (size, 300_000)


def test_a_whole_part_that_was_never_named(server, path):
    left(path, WHOLE)
    download(server.url(), path, GOOD)
    assert path.read_bytes() == WHOLE


@pytest.mark.parametrize(
    "content", [b"other" * 100, WHOLE + b"more"], ids=["another version", "too long"]
)
def test_a_wrong_part_is_begun_anew(server, path, content):
    left(path, content)
    download(server.url(), path, GOOD)
    assert path.read_bytes() == WHOLE
    assert server.log == [f"bytes={len(content)}-", None]


@pytest.mark.parametrize("fault", ["no range", "no length"])
def test_a_simple_server_will_do(server, path, fault):
    server.fault = fault
    left(path, WHOLE[:1000])
    download(server.url(), path, GOOD)
    assert path.read_bytes() == WHOLE


def test_a_wrong_file_is_refused_and_not_kept(server, path):
    server.files["/file"] = b"a login page"
    assert f"{server.url()} is not the published one" in refusal(server, path)
    assert tree(path.parent) == []


def test_what_broke_off_is_kept_and_carried_on_with(server, path):
    server.fault = "cut"
    assert "broke off after 100,000 of 300,000 bytes" in refusal(server, path)
    assert part(path).read_bytes() == WHOLE[:100_000]
    server.fault = None
    download(server.url(), path, GOOD)
    assert path.read_bytes() == WHOLE
    assert server.log == [None, "bytes=100000-"]


def test_a_server_error_keeps_what_is_there(server, path):
    server.fault = "503"
    left(path, WHOLE[:1000])
    assert f"{server.url()} answers 503" in refusal(server, path)
    assert part(path).read_bytes() == WHOLE[:1000]


def test_a_server_that_falls_silent(server, path, monkeypatch):
    monkeypatch.setattr(download_module, "TIMEOUT", 0.3)
    server.fault = "stall"
    assert "broke off: timed out" in refusal(server, path)
    assert part(path).read_bytes() == WHOLE[:100_000]


def test_no_server(path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/file"
        with pytest.raises(FlatlensError, match=r"Cannot reach .*refused"):
            download(url, path, GOOD)


def test_a_folder_that_cannot_be_made(server, tmp_path):
    (tmp_path / "new").write_text("a file")
    assert "Cannot write" in refusal(server, tmp_path / "new" / "file")


def test_two_downloads_of_one_file_do_not_mix(server, path):
    left(path, WHOLE[:10])
    with FileLock(path.with_name("file.part.lock")):
        assert "Another process is downloading" in refusal(server, path)
    assert server.log == []


@pytest.mark.slow
def test_interrupted_by_the_user(server, path):
    """A real process, a real Ctrl-C, then the same again."""
    code = f"""
from pathlib import Path
from flatlens.data.fetch import download
download({server.url()!r}, Path({str(path)!r}), {GOOD!r})
"""
    source = Path(__file__).parents[2] / "src"
    environment = {**os.environ, "PYTHONPATH": str(source)}
    server.fault = "stall"
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE, text=True
    )
    assert server.stalled.wait(60)
    process.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in process.communicate(timeout=60)[1]
    assert not path.exists()
    kept = part(path).read_bytes()
    assert kept == WHOLE[: len(kept)]
    server.fault = None
    download(server.url(), path, GOOD)
    assert path.read_bytes() == WHOLE
    assert server.log == [None, f"bytes={len(kept)}-" if kept else None]


# ------------------------------------------------------------------ whole data sets


def digest(content: bytes) -> str:
    return "sha1:" + hashlib.sha1(content).hexdigest()


@pytest.fixture
def sets(server, monkeypatch, tmp_path) -> Path:
    """Two small data sets, plain and packed; gives the cache folder."""
    files = {"a.gz": b"first", "b.gz": b"second"}
    packed = {"batches/one.bin": b"one", "batches/two.bin": b"two"}
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        for name, content in {**packed, "../outside": b"bad", "batches/readme": b"-"}.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    archive = stream.getvalue()
    server.files = {f"/{name}": content for name, content in files.items()}
    server.files["/packed.tar.gz"] = archive
    sums = {name: digest(content) for name, content in files.items()}
    plain = Published("two files", sums, server.url(""), sums)
    inside = {name: digest(content) for name, content in packed.items()}
    tarred = Published("packed", inside, server.url(""), {"packed.tar.gz": digest(archive)})
    for place in (module, published_module):
        monkeypatch.setattr(place, "PUBLISHED", {"plain": plain, "packed": tarred})
    monkeypatch.setenv("FLATLENS_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "flatlens"


def tree(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def test_fetching_files(sets, server):
    assert fetch("plain") == sets / "plain"
    assert tree(sets) == ["plain/a.gz", "plain/b.gz"]
    assert set(verify("plain").values()) == {"good"}
    assert len(server.log) == 2
    fetch("plain")  # nothing is left to do
    assert len(server.log) == 2


def test_fetching_an_archive_takes_its_files_and_no_others(sets):
    fetch("packed")
    assert tree(sets.parent) == [f"flatlens/packed/batches/{n}.bin" for n in ("one", "two")]
    assert (sets / "packed/batches/two.bin").read_bytes() == b"two"


def test_only_what_is_missing_or_wrong_is_fetched(sets, server):
    fetch("plain")
    (sets / "plain/b.gz").write_bytes(b"damaged")
    assert list(verify("plain").values()) == ["good", "different"]
    fetch("plain")
    assert len(server.log) == 3
    assert set(verify("plain").values()) == {"good"}


def test_what_flatlens_data_holds_is_not_fetched(sets, server, tmp_path):
    (tmp_path / "data/plain").mkdir(parents=True)
    (tmp_path / "data/plain/a.gz").write_bytes(b"first")
    (tmp_path / "data/plain/b.gz").write_bytes(b"second")
    assert fetch("plain") == tmp_path / "data/plain"
    assert server.log == []


@pytest.mark.parametrize("moment", ["_extract", "matches", "replace"])
def test_a_fetch_killed_while_unpacking_is_completed_by_the_next(sets, monkeypatch, moment):
    def killed(*_):
        raise SystemExit

    with monkeypatch.context() as patch:
        if moment == "replace":  # the second file is not renamed
            real, calls = Path.replace, []
            counted = lambda self, to: (  # noqa: E731
                killed() if calls.append(to) or len(calls) == 3 else real(self, to)
            )
            patch.setattr(Path, "replace", counted)
        else:
            patch.setattr(module, moment, killed)
        patch.setattr(module.shutil, "rmtree", lambda *_, **__: None)  # the process is gone
        with pytest.raises(SystemExit):
            fetch("packed")
    assert module.find("packed") is None
    assert fetch("packed") == sets / "packed"
    assert set(verify("packed").values()) == {"good"}
    assert tree(sets) == ["packed/batches/one.bin", "packed/batches/two.bin"]


def test_a_fetch_that_ends_incomplete_says_so(sets, monkeypatch):
    monkeypatch.setattr(module, "unpack", lambda *_: None)
    with pytest.raises(FlatlensError, match=r"not complete after the download: batches/one.bin"):
        fetch("packed")


def test_an_archive_with_another_file_in_it_is_refused(sets, monkeypatch):
    source = module.PUBLISHED["packed"]
    files = {**source.files, "batches/two.bin": digest(b"2")}
    monkeypatch.setitem(published_module.PUBLISHED, "packed", replace(source, files=files))
    with pytest.raises(FlatlensError, match=r"packed.tar.gz: batches/two.bin is not the published"):
        fetch("packed")
    assert module.find("packed") is None


def test_an_archive_that_lacks_a_file_is_refused(sets, monkeypatch):
    source = module.PUBLISHED["packed"]
    files = {**source.files, "batches/three.bin": digest(b"3")}
    monkeypatch.setitem(published_module.PUBLISHED, "packed", replace(source, files=files))
    with pytest.raises(FlatlensError, match=r"Cannot unpack .*three.bin"):
        fetch("packed")


def test_offline_says_which_files_to_put_where(sets, server, tmp_path):
    server.fault = "503"
    with pytest.raises(FlatlensError) as caught:
        fetch("plain")
    sentence = str(caught.value)
    assert "answers 503" in sentence
    assert f"put a.gz, b.gz into {tmp_path / 'data/plain'}" in sentence
    assert f"all of its 2 files into {sets / 'plain'}." in sentence
    assert "\n" not in sentence


def test_unknown_names(sets):
    with pytest.raises(FlatlensError, match="'mnist'; there are plain, packed"):
        fetch("mnist")


# ------------------------------------------------------------------ the command


def test_command_lists_fetches_and_verifies(sets, capsys):
    assert cli.main(["data", "list"]) == 0
    assert capsys.readouterr().out.count("not here") == 2
    assert cli.main(["data", "fetch", "plain"]) == 0
    assert capsys.readouterr().out == f"{sets / 'plain'}\n"
    assert cli.main(["data", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"plain": str(sets / "plain"), "packed": None}
    assert cli.main(["data", "verify", "plain"]) == 0
    assert capsys.readouterr().out.count("good") == 2


def test_command_verify_fails_on_wrong_files(sets, capsys):
    fetch("plain")
    (sets / "plain/a.gz").write_bytes(b"damaged")
    assert cli.main(["data", "verify", "plain", "--json"]) == 2
    told = capsys.readouterr()
    assert json.loads(told.out) == {
        str(sets / "plain/a.gz"): "different",
        str(sets / "plain/b.gz"): "good",
    }
    assert told.err == "flatlens: 1 of 2 files of plain are not the published ones.\n"


@pytest.mark.parametrize("command", ["list", "fetch", "verify"])
def test_command_help_shows_an_example(command, capsys):
    assert cli.main(["data", command, "--help"]) == 0
    assert f"flatlens data {command}" in capsys.readouterr().out.split("Example")[1]


# ------------------------------------------------------------------ the real thing

# as published in the data set's README
FASHION_MD5 = {
    "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
}


def test_our_checksums_are_those_of_the_files_with_the_published_md5():
    folder = Path(os.environ.get("FLATLENS_DATA", "")) / "fashion-mnist"
    if not os.environ.get("FLATLENS_DATA") or not folder.is_dir():
        pytest.skip("FLATLENS_DATA names no folder with fashion-mnist")
    for name, md5 in FASHION_MD5.items():
        assert hashlib.md5((folder / name).read_bytes()).hexdigest() == md5
    assert set(verify("fashion-mnist").values()) == {"good"}


def test_every_download_has_an_address_and_a_checksum():
    for source in PUBLISHED.values():
        assert source.base.startswith("http")
        for checksum in (*source.files.values(), *source.downloads.values()):
            algorithm, digest = checksum.split(":")
            assert len(digest) == 2 * hashlib.new(algorithm).digest_size
