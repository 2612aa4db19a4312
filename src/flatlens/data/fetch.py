"""Published data sets: which files they are, where they lie, how to get and to check them.

Each data set has a folder of its own name, in the folder that the environment variable
FLATLENS_DATA names or, second, in the cache folder. Downloads go to the cache folder. A file gets
its name only when it is whole and its checksum is right; until then it is called NAME.part, and
the next try carries on with it. Only the standard library is used, and rich for the progress bar.
"""

from __future__ import annotations

import fcntl
import hashlib
import http.client
import os
import shutil
import tarfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

from flatlens.errors import FlatlensError
from flatlens.runs.files import replacing

BLOCK = 1 << 16  # bytes read at a time
TIMEOUT = 30.0  # seconds without a byte after which a server counts as gone

Status = Literal["good", "missing", "different"]
Tick = Callable[[int, int | None], object]  # bytes so far, bytes in all if known


@dataclass(frozen=True)
class Published:
    """A data set as its authors published it; checksums are written algorithm:hexdigest."""

    what: str
    files: Mapping[str, str]  # path in the data set's folder -> checksum
    base: str  # address of the folder that holds the downloads
    downloads: Mapping[str, str]  # file below `base` -> checksum; an archive is unpacked
    other: Mapping[str, str] = field(default_factory=dict)  # files in a second format, as good

    def there(self, folder: Path) -> Mapping[str, str] | None:
        """The files of the first format that a folder has completely."""
        formats = (files for files in (self.files, self.other) if files)
        return next((fs for fs in formats if all((folder / f).is_file() for f in fs)), None)


# FashionMNIST: SHA-256 of the files whose MD5 sums the authors publish.
# CIFAR-10: the MD5 of the archive is published; SHA-1 or MD5 of the files in it.
_FASHION = {
    "train-images-idx3-ubyte.gz":
        "sha256:3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
    "train-labels-idx1-ubyte.gz":
        "sha256:a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
    "t10k-images-idx3-ubyte.gz":
        "sha256:346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
    "t10k-labels-idx1-ubyte.gz":
        "sha256:67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
}  # fmt: skip
PUBLISHED: dict[str, Published] = {
    "fashion-mnist": Published(
        what="70,000 images of clothes, 28 x 28, 10 classes (31 MB)",
        files=_FASHION,
        base="http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
        downloads=_FASHION,
    ),
    "cifar10": Published(
        what="60,000 colour images, 32 x 32, 10 classes (170 MB)",
        files={
            "cifar-10-batches-bin/data_batch_1.bin":
                "sha1:aadd24acce27caa71bf4b10992e9e7b2d74c2540",
            "cifar-10-batches-bin/data_batch_2.bin":
                "sha1:c0ba65cce70568cd57b4e03e9ac8d2a5367c1795",
            "cifar-10-batches-bin/data_batch_3.bin":
                "sha1:1dd00a74ab1d17a6e7d73e185b69dbf31242f295",
            "cifar-10-batches-bin/data_batch_4.bin":
                "sha1:aab85764eb3584312d3c7f65fd2fd016e36a258e",
            "cifar-10-batches-bin/data_batch_5.bin":
                "sha1:26e2849e66a845b7f1e4614ae70f4889ae604628",
            "cifar-10-batches-bin/test_batch.bin":
                "sha1:67eb016db431130d61cd03c7ad570b013799c88c",
        },
        base="https://www.cs.toronto.edu/~kriz",
        downloads={"cifar-10-binary.tar.gz": "md5:c32a1d4ab5d03f1284b67883e8d87530"},
        other={  # of cifar-10-python.tar.gz
            "cifar-10-batches-py/data_batch_1": "md5:c99cafc152244af753f735de768cd75f",
            "cifar-10-batches-py/data_batch_2": "md5:d4bba439e000b95fd0a9bffe97cbabec",
            "cifar-10-batches-py/data_batch_3": "md5:54ebc095f3ab1f0389bbae665268c751",
            "cifar-10-batches-py/data_batch_4": "md5:634d18415352ddfa80567beed471001a",
            "cifar-10-batches-py/data_batch_5": "md5:482c414d41f54cd18b22e5b47cb7c3cb",
            "cifar-10-batches-py/test_batch": "md5:40351d587109b95175f43aff81a1287e",
        },
    ),
}  # fmt: skip


# -- where ---------------------------------------------------------------------------------------


def cache(name: str) -> Path:
    """The data set's folder below the user's cache folder."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "flatlens" / name


def folders(name: str) -> list[Path]:
    """Where a data set may lie, in the order in which it is looked for."""
    named = os.environ.get("FLATLENS_DATA")
    return [*([Path(named) / name] if named else []), cache(name)]


def find(name: str) -> Path | None:
    """The first folder that has all files of a data set, whatever is in them."""
    source = published(name)
    return next((folder for folder in folders(name) if source.there(folder)), None)


def locate(name: str) -> list[Path]:
    """The files of a data set, all of them in one place, or a refusal that says what to do."""
    for folder in folders(name):
        if files := published(name).there(folder):
            return [folder / file for file in files]
    raise FlatlensError(
        f"The data {name} is not here: run flatlens data fetch {name}, or {by_hand(name)}."
    )


def by_hand(name: str) -> str:
    """What to put where when there is no network."""
    files = list(published(name).files)
    first, *second = folders(name)
    missing = [file for file in files if not (first / file).is_file()] or files
    place = f"{first}" if second else f"{name} in a folder that you name in FLATLENS_DATA"
    return (
        f"put {', '.join(missing)} into {place} (FLATLENS_DATA is looked at first), "
        f"or all of its {len(files)} files into {cache(name)}"
    )


def published(name: str) -> Published:
    """What is known of a data set, or a refusal."""
    if name not in PUBLISHED:
        raise FlatlensError(
            f"No published data set is called {name!r}; there are {', '.join(PUBLISHED)}."
        )
    return PUBLISHED[name]


# -- check ---------------------------------------------------------------------------------------


def verify(name: str) -> dict[Path, Status]:
    """Whether each file of a data set is the published one, in the folder where it is found."""
    source, folder = published(name), find(name) or folders(name)[0]
    files = source.there(folder) or source.files
    return {folder / f: status(folder / f, c) for f, c in files.items()}


def status(path: Path, checksum: str) -> Status:
    """Whether a file is there and has that checksum."""
    if not path.is_file():
        return "missing"
    return "good" if matches(path, checksum) else "different"


def matches(path: Path, checksum: str) -> bool:
    """Whether a file has a checksum, written as md5:..., sha1:... or sha256:..."""
    algorithm, _, digest = checksum.partition(":")
    with path.open("rb") as stream:
        # as a checksum only: builds that forbid MD5 for security allow it then
        found = hashlib.file_digest(
            stream, lambda: hashlib.new(algorithm, usedforsecurity=False)
        ).hexdigest()
    return found == digest


# -- get -----------------------------------------------------------------------------------------


def fetch(name: str) -> Path:
    """Downloads what is missing of a data set into the cache folder, checks it, gives the folder.

    A data set that is whole already, there or in FLATLENS_DATA, is not fetched again.
    """
    source = published(name)
    for folder in folders(name):
        files = source.there(folder) or source.files
        if all(status(folder / f, c) == "good" for f, c in files.items()):
            return folder
    target = cache(name)
    with _progress() as tick:
        for file, checksum in source.downloads.items():
            if status(target / file, checksum) == "good":
                continue
            try:
                download(f"{source.base}/{file}", target / file, checksum, tick(file))
            except FlatlensError as error:
                raise FlatlensError(
                    f"{str(error).rstrip('.')}; try again, or {by_hand(name)}."
                ) from error
            if file not in source.files:
                unpack(target / file, target, source.files)
                (target / file).unlink()
    return target


def download(url: str, path: Path, checksum: str, tick: Tick = lambda done, total: None) -> None:
    """The file at `url`, whole and checked, as `path`.

    Bytes go to `path`.part. What an earlier try left there is not asked for again (HTTP Range);
    the checksum has the last word, and a resumed file that fails it is fetched once more from the
    start, since it may have been begun with another version.
    """
    part = path.with_name(f"{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("ab") as stream, _alone(stream, part):
            resumed = stream.tell() > 0
            _receive(url, stream, tick)
            if not matches(part, checksum) and resumed:
                stream.truncate(0)
                _receive(url, stream, tick)
            os.fsync(stream.fileno())
            if not matches(part, checksum):
                part.unlink()
                raise FlatlensError(
                    f"What {url} gives is not the published file: {checksum} fails."
                )
            part.replace(path)
    except OSError as error:
        raise FlatlensError(f"Cannot write {part}: {error.strerror or error}.") from error


def _receive(url: str, stream: IO[bytes], tick: Tick) -> None:
    """Appends to a file what it lacks of `url`."""
    start = stream.seek(0, os.SEEK_END)
    request = urllib.request.Request(url, headers={"Range": f"bytes={start}-"} if start else {})
    with _open(url, request) as response:
        if response is None:  # nothing beyond what is there
            return
        if response.status != http.client.PARTIAL_CONTENT:
            stream.truncate(0)
            start = 0
        length = response.headers.get("Content-Length")
        total = start + int(length) if length else None
        done = start
        tick(done, total)
        while block := _read(url, response):
            stream.write(block)
            done += len(block)
            tick(done, total)
        stream.flush()
        if total is not None and done < total:
            raise FlatlensError(f"{url} broke off after {done:,} of {total:,} bytes.")


@contextmanager
def _open(url: str, request: urllib.request.Request) -> Iterator[http.client.HTTPResponse | None]:
    """The server's answer, or None where it says that the range asked for lies past the end."""
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code != http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
            raise FlatlensError(f"{url} answers {error.code} {error.reason}.") from error
        yield None
        return
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise FlatlensError(f"Cannot reach {url}: {reason}.") from error
    with response:
        yield response


def _read(url: str, response: http.client.HTTPResponse) -> bytes:
    try:
        return response.read1(BLOCK)  # what has come: nothing is lost when the rest does not
    except (OSError, http.client.HTTPException) as error:
        raise FlatlensError(f"{url} broke off: {error}.") from error


def unpack(archive: Path, folder: Path, files: Mapping[str, str]) -> None:
    """Takes these files, and no others, out of a tar archive; each is checked and then named."""
    try:
        with tarfile.open(archive) as tar:
            for name, checksum in files.items():
                content = tar.extractfile(name)
                if content is None:
                    raise FlatlensError(f"{archive}: {name} is no file.")
                with content, replacing(folder / name) as temporary:
                    with temporary.open("wb") as stream:
                        shutil.copyfileobj(content, stream)
                    if not matches(temporary, checksum):
                        raise FlatlensError(f"{archive}: {name} is not the published file.")
    except (tarfile.TarError, KeyError, EOFError, OSError) as error:
        raise FlatlensError(f"Cannot unpack {archive}: {error}.") from error


@contextmanager
def _alone(stream: IO[bytes], part: Path) -> Iterator[None]:
    """Two downloads of one file would mix their bytes; the lock dies with the process."""
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise FlatlensError(f"Another process is downloading {part}.") from error
    if not part.exists():  # it was named while we opened it
        raise FlatlensError(f"Another process has just downloaded {part.with_suffix('')}.")
    yield


@contextmanager
def _progress() -> Iterator[Callable[[str], Tick]]:
    """One bar a file on standard error while a person looks at it; else nothing."""
    console = Console(stderr=True)
    columns = ("{task.description}", BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:

        def bar(file: str) -> Tick:
            task = bars.add_task(file, total=None)
            return lambda done, total: bars.update(task, completed=done, total=total)

        yield bar
