"""The provenance of a run: versions, command and machine.

The command line is stored in `config.json` of every run. Words that look like a secret (a token,
a password, an API key, the user part of an address) are replaced by `HIDDEN` before.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import torch

import flatlens

HIDDEN = "[hidden]"
# names whose value is a secret: --api-key VALUE, --hub.token=VALUE, Authorization: VALUE
_NAME = (
    r"(?i:[\w.-]*(?:token|secret|passw(?:or)?d|passphrase|credentials?|pwd)"
    r"|[\w.-]*(?:api|access|private|secret|session|auth)[-_.]?key"
    r"|-*(?:auth|authorization|bearer))"
)
_NAMED = re.compile(_NAME)
_ASSIGNED = re.compile(rf"(?<![\w.-])({_NAME}(?:=|:\s*))(?!//)[^&;,]+")
# values that are secrets by their form
_FORMS = re.compile(
    r"\b(?:hf|gh[opsur]|github_pat|glpat|sk|pk|rk|xox[abeoprs])[-_][A-Za-z0-9_-]{10,}"
    r"|\bA[KS]IA[0-9A-Z]{12,}"  # Amazon
    r"|\bAIza[\w-]{30,}"  # Google
    r"|\bnpm_\w{20,}|\bpypi-\w{20,}"
    r"|\beyJ[\w-]{10,}\.[\w-]{10,}(?:\.[\w-]*)?"  # JSON web token
    r"|\b[0-9a-fA-F]{40,}\b"  # as long as the key of an experiment logger
)
_ADDRESS = re.compile(r"(\w+://)[^/@\s]+@")  # scheme://user:password@host


def provenance() -> dict[str, Any]:
    """Return versions, command and machine; they do not decide which run it is.

    The command line is part of it, without what looks like a secret (see `scrubbed`).
    """
    return {
        "flatlens": flatlens.__version__,
        "git": _git_hash(),
        "command": scrubbed(sys.argv),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def scrubbed(words: Sequence[str]) -> list[str]:
    """Return the words of a command line without what looks like a secret.

    >>> scrubbed(["train", "--hub-token", "abc", "--password=abc", "--lr", "0.1"])
    ['train', '--hub-token', '[hidden]', '--password=[hidden]', '--lr', '0.1']
    >>> scrubbed(["--address", "tcp://me:abc@10.0.0.1:8786"])
    ['--address', 'tcp://[hidden]@10.0.0.1:8786']
    """
    hide_next = False
    clean: list[str] = []
    for word in words:
        if hide_next and not word.startswith("--"):
            clean.append(HIDDEN)
            hide_next = False
            continue
        hide_next = word.startswith("-") and _NAMED.fullmatch(word) is not None
        without_user = _ADDRESS.sub(rf"\1{HIDDEN}@", word)
        clean.append(_FORMS.sub(HIDDEN, _ASSIGNED.sub(rf"\1{HIDDEN}", without_user)))
    return clean


def _git_hash() -> str | None:
    """Return the commit of the current folder, or None outside of git."""
    try:
        git = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return git.stdout.strip()
