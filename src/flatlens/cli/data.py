"""``flatlens data``: list, fetch and verify the published data sets."""

from __future__ import annotations

import json

from cyclopts import App

from flatlens.cli.options import Json
from flatlens.errors import FlatlensError

app = App(
    name="data",
    help="List, fetch and verify the published data sets (fashion-mnist, cifar10).",
    help_epilogue="""Examples:
  flatlens data list
  flatlens data fetch fashion-mnist
  flatlens data verify cifar10""",
)


@app.command(
    name="list",
    help_epilogue="""Example:
  flatlens data list --json""",
)
def list_data(*, as_json: Json = False) -> None:
    """List the published data sets and the folders in which they are.

    Parameters
    ----------
    as_json
        Print one JSON object with the folder of each data set, or null.
    """
    from flatlens.data.fetch import PUBLISHED, find

    folders = {name: find(name) for name in PUBLISHED}
    if as_json:
        print(json.dumps({name: folder and str(folder) for name, folder in folders.items()}))
        return
    for name, folder in folders.items():
        print(f"{name:15}{PUBLISHED[name].what}: {folder or 'not here'}")


@app.command(
    help_epilogue="""Example:
  flatlens data fetch fashion-mnist"""
)
def fetch(name: str, /) -> None:
    """Download a data set into the cache folder and check it; a stopped download continues.

    Parameters
    ----------
    name
        The data set to download: fashion-mnist or cifar10.
    """
    from flatlens.data.fetch import fetch

    print(fetch(name))


@app.command(
    help_epilogue="""Example:
  flatlens data verify cifar10"""
)
def verify(name: str, /, *, as_json: Json = False) -> None:
    """Compare the files of a data set with the published checksums; exit code 2 if any differs.

    Parameters
    ----------
    name
        The data set to check: fashion-mnist or cifar10.
    as_json
        Print one JSON object with good, missing or different for each file.
    """
    from flatlens.data.fetch import verify

    files = verify(name)
    if as_json:
        print(json.dumps({str(path): status for path, status in files.items()}))
    else:
        for path, status in files.items():
            print(f"{status:10}{path}")
    wrong = sum(status != "good" for status in files.values())
    if wrong:
        raise FlatlensError(f"{wrong} of {len(files)} files of {name} are not the published ones.")
