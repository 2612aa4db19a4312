"""Names of the files in a run folder, and the version of their format.

| file                     | content                                                             |
|--------------------------|---------------------------------------------------------------------|
| `config.json`            | `format`, `config` (which run it is), `provenance` (how it was made) |
| `records.jsonl`          | one measurement a line, appended and written through to the disk    |
| `checkpoint.safetensors` | tensors to resume from, and the number of records at that time      |
| `snapshots/`             | the weights at every record, where the config asks for them         |
| `done`                   | there when the run is finished: number and checksum of the records  |
| `lock`                   | held by the writing process; the system frees it when that ends     |

The version of the format is 2. Version 1 is that of flatlens 0.1.0: it has no `format`, and `done`
is empty. Both are read.
"""

CONFIG = "config.json"
RECORDS = "records.jsonl"
CHECKPOINT = "checkpoint.safetensors"
SNAPSHOTS = "snapshots"
DONE = "done"
LOCK = "lock"
FORMAT = 2
