"""Published data sets: their files, checksums and addresses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from flatlens.errors import FlatlensError


@dataclass(frozen=True)
class Published:
    """A data set as its authors published it; checksums are written algorithm:hexdigest.

    Args:
        what: a description for people.
        files: path in the folder of the data set -> checksum.
        base: address of the folder that holds the downloads.
        downloads: file below `base` -> checksum. An archive is unpacked.
        other: the files of a second format that serves as well.
    """

    what: str
    files: Mapping[str, str]
    base: str
    downloads: Mapping[str, str]
    other: Mapping[str, str] = field(default_factory=dict)

    def complete_format(self, folder: Path) -> Mapping[str, str] | None:
        """Return the files of the first format that a folder has completely, or None."""
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


def published(name: str) -> Published:
    """Return what is known about a data set.

    Raises:
        FlatlensError: if there is no data set of that name.

    >>> published("fashion-mnist").base.startswith("http")
    True
    """
    if name not in PUBLISHED:
        raise FlatlensError(
            f"No published data set is called {name!r}; there are {', '.join(PUBLISHED)}."
        )
    return PUBLISHED[name]
