"""Sharded networks give every process the numbers of the whole network, to 1e-10 in float64."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import flatlens as fl

pytestmark = pytest.mark.slow
WORLD_SIZE = 2
SCRIPT = Path(__file__).with_name("sharded_processes.py")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each of two processes measured, in the order of ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    source = str(Path(fl.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    processes = []
    try:
        for rank in range(WORLD_SIZE):
            command = [sys.executable, "-W", "ignore", str(SCRIPT)]
            command += [str(rank), str(WORLD_SIZE), str(port), str(folder / f"{rank}.json")]
            processes.append(
                subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
            )
        errors = [process.communicate(timeout=180)[1] for process in processes]
        assert [p.returncode for p in processes] == [0] * WORLD_SIZE, "\n".join(errors)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD_SIZE)]


PAIRS = {
    "fully_shard": "plain",
    "fully_shard after a forward pass": "plain",
    "fully_shard with mixed precision": "plain",
    "fully_shard sketch": "plain sketch",
    "fully_shard trace": "plain trace",
    "fully_shard shares": "plain shares",
    "fully_shard training": "plain training",
    "flat": "plain all trainable",
    "flat with original parameters": "plain all trainable",
    "flat training": "plain all trainable training",
    "tensor parallel": "plain perceptron",
}


@pytest.mark.parametrize("rank", range(WORLD_SIZE))
@pytest.mark.parametrize("case", PAIRS)
def test_every_process_has_the_numbers_of_the_whole_network(results, case, rank):
    sharded, plain = results[rank][case], results[0][PAIRS[case]]
    assert plain["values"]
    assert sharded["values"] == pytest.approx(plain["values"], rel=1e-10)
    assert sharded.get("coverage") == plain.get("coverage")


@pytest.mark.parametrize("case", ["fully_shard", "flat", "tensor parallel"])
def test_a_note_says_that_parameters_were_gathered(results, case):
    assert any("each process gathered all" in note for note in results[0][case]["notes"])


@pytest.mark.parametrize("case", ["tensor parallel trace", "counts on a part"])
def test_tensor_parallel_networks_that_cannot_be_gathered_are_refused(results, case):
    for result in results:
        assert result[case]["message"].startswith("the network is tensor parallel")


def test_parameters_of_deepspeed_are_refused_by_name():
    model = nn.Linear(3, 2)
    model.weight.ds_id, model.weight.ds_numel = 0, 6
    model.weight.data = torch.empty(0)
    with pytest.raises(fl.FlatlensError, match="DeepSpeed ZeRO-3"):
        fl.measure(model, torch.ones(2, 3))
