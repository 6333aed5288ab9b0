"""The columns of a results file: name, type, unit and meaning, written once and used everywhere."""

from __future__ import annotations

from typing import NamedTuple


class Column(NamedTuple):
    """What one column of a results file is.

    Attributes:
        name: the key in a row.
        dtype: ``string``, ``int64``, ``float64``, ``list<float64>`` or ``map<list<float64>>``.
        unit: what a value counts, empty for texts and plain ratios.
        description: what it means, one sentence, for a reader who has only the file.
        section: the heading it is listed under in the column dictionary.
    """

    name: str
    dtype: str
    unit: str
    description: str
    section: str


# A heading, then its columns as `name | type | unit | meaning`; an indented line goes on.
_DICTIONARY = """
# Where the row comes from
session | string | - | Identity (UUID) of the replay that made the row; samples pair up only inside one
    session.
created_utc | string | - | When the row was finished, ISO 8601 in UTC.
suite | string | - | Folder the capture lies in; geomeans never cross suites.
capture | string | - | Name of the capture that was replayed.
tables_sha256 | string | - | Hash of the capture's tables: equal hashes mean equal selections.
kind | string | - | What the capture stores: full (tables and tensors) or tables.
tensors | string | - | Where Q and KV came from: stored in the capture, or seeded random values.
generator | string | - | What made seeded Q and KV; null where they were stored. Times on the values of two
    generators are not compared.
commit | string | - | pwbench commit that measured, with -dirty when the tree had changes.
# What ran, and on what
variant | string | - | The competitor's registered name.
window | int64 | query positions | Consecutive query positions one regroup window holds; null for variants
    that do not search.
device | string | - | cuda or cpu; rows of the two are never compared.
gpu | string | - | GPU name, or the processor's name on cpu rows.
driver | string | - | GPU driver version.
cuda | string | - | CUDA runtime version.
torch | string | - | PyTorch version.
cupy | string | - | CuPy version.
peer | string | - | For another library's kernel: its version and which of its kernels ran.
precision | string | - | fast (Q and P in 8 bits) or accurate (rel-L2 at most 2.5e-3 on seeded tensors).
mode | string | - | graph (CUDA-graph replay of the complete call) or eager (launched from Python).
l2 | string | - | L2 cache before each sample: cold (flushed) or warm.
status | string | - | ok, unavailable (cannot run here) or failed (ran and was wrong or broke).
reason | string | - | Why the status is not ok.
# Time
samples | int64 | samples | How many times the complete call was timed.
complete_us | float64 | us | Median time of the complete call: everything that must happen per call.
search_us | float64 | us | Median time of the search stage: finding the permutation of the queries.
metadata_us | float64 | us | Median time of the metadata stage: page lists and membership masks of the
    groups.
attention_us | float64 | us | Median time of the attention stage; the whole time of a competitor that
    cannot be split.
reduction_us | float64 | us | Median time of the stage that merges partial outputs, where a variant has
    one.
gap_us | float64 | us | complete_us minus the sum of the stages; negative means the stages overlap.
prepare_ms | float64 | ms | Untimed one-off preparation: allocation, compilation, planning that is not per
    call.
complete_samples | list<float64> | us | Every sample of the complete call in sample-index order; equal
    indices of one session are a pair.
stage_samples | map<list<float64>> | us | Every sample of every stage, by stage name.
sm_clock_mhz | float64 | MHz | Median SM clock while sampling.
throttle | string | - | Clock throttle reasons seen while sampling; empty when there were none.
noise_floor | float64 | - | Half width of the interval of the baseline's ratio against itself (A/A) in
    this session and capture; null when it was not run.
# Accuracy
rel_l2 | float64 | - | Relative L2 error of the output against the fp32 reference on the stored FP8 cache.
max_abs | float64 | - | Largest absolute error against the reference.
cosine | float64 | - | Cosine similarity with the reference.
checked_rows | int64 | query rows | Output rows that were compared with the reference.
fp8_cache_rel_l2 | float64 | - | Error that the FP8 cache itself costs: the reference against the model's
    own output; null when the capture has none.
# Size and counters (exact, the same on every device)
total_q | int64 | queries | Query positions of the call.
context | int64 | tokens | Longest request of the call, its cached tokens included.
kv_heads | int64 | heads | KV heads of the call.
groups | int64 | groups | Groups of query positions that share one page list.
selected_pages | int64 | pages | Pages selected, summed over the query rows.
union_pages | int64 | pages | Pages in the groups' unions, summed over the groups: page visits, what
    decides bytes moved.
subgroup_pages | int64 | pages | Pages in the unions of four-query subgroups, summed: tensor-core rounds.
kv_bytes | int64 | bytes | K and V bytes that the page visits read.
mma_flops | int64 | FLOP | Matrix operations the tensor cores perform, masked-out work included.
useful_flops | int64 | FLOP | Matrix operations that selected, visible tokens need.
roofline_us | float64 | us | Shortest time the GPU's measured ceilings allow for these counters.
roofline_term | string | - | The ceiling that sets roofline_us.
partial_bytes | int64 | bytes | Partial outputs written and read back; page-union only.
tile_occupancy | float64 | - | Share of query tile rows that hold a real query; page-union only.
"""


def _parse(text: str) -> tuple[Column, ...]:
    columns: list[Column] = []
    section = ""
    for line in text.strip().replace("\n    ", " ").splitlines():
        if line.startswith("# "):
            section = line[2:]
            continue
        name, dtype, unit, description = (part.strip() for part in line.split(" | "))
        columns.append(Column(name, dtype, "" if unit == "-" else unit, description, section))
    return tuple(columns)


COLUMNS = _parse(_DICTIONARY)
"""Every column of a results file, in file order."""


def column_dictionary() -> str:
    """docs/columns.md: the meaning of every column, in Markdown."""
    lines = [
        "# Columns of a results file",
        "",
        "Generated from the descriptions in `pwbench/columns.py`; the same text",
        "is in the metadata of every results file. `pwbench.load_results()` gives these columns as a pandas",
        "DataFrame, one row per result.",
    ]
    section = ""
    for column in COLUMNS:
        if column.section != section:
            section = column.section
            lines += [
                "",
                f"## {section}",
                "",
                "| column | type | unit | meaning |",
                "| --- | --- | --- | --- |",
            ]
        dtype = column.dtype.replace("<", "&lt;")
        lines.append(f"| `{column.name}` | {dtype} | {column.unit} | {column.description} |")
    return "\n".join(lines) + "\n"
