"""The capture format: names, versions, and the tables of a call as plain arrays and as Parquet.

A capture is a directory::

    manifest.json         written last: schema, provenance, geometry, and every file's size and SHA-256
    queries.parquet       one row per (kv_head, query row): its support, position and visible length
    requests.parquet      one row per request: lengths and page table
    tensors.safetensors   q, kv, scales and what the model computed; only in captures of kind ``full``

`Tables` is everything that decides which work a call does: the selections and the geometry, without
the values. Its SHA-256 is taken over the arrays, not over the Parquet bytes, so two captures of one
run agree whichever library version wrote them and whether or not tensors lie beside them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from pwbench.errors import CaptureError
from pwbench.operator import (
    GROUP_HEADS,
    HEAD_DIM,
    INVALID,
    PAGE,
    TOPK,
    SparsePrefillCall,
    request_of_rows,
    right_aligned_positions,
    supports,
)

SCHEMA_NAME = "pwbench.capture"
SCHEMA_MAJOR = 1
SCHEMA_MINOR = 0
KINDS = ("full", "tables")

MANIFEST = "manifest.json"
QUERIES = "queries.parquet"
REQUESTS = "requests.parquet"
TENSORS = "tensors.safetensors"

QUERY_COLUMNS = ("kv_head", "row", "request", "position", "causal_len", "n_sel", "pages")
REQUEST_COLUMNS = ("request", "seq_len", "q_start", "q_len", "prefix_len", "page_table")

_DELTA_COLUMNS = ("kv_head", "row", "request", "position", "causal_len", "n_sel")
_ROW_GROUP = 1 << 20


@dataclass(frozen=True, eq=False)
class Tables:
    """Selections and geometry of one call, on the CPU.

    Attributes:
        pages: supports, ascending logical ids, -1 last, ``[Hkv, total_q, TOPK]`` int32.
        counts: ids per row, ``[Hkv, total_q]`` int32.
        positions: causal position of each query row, ``[total_q]`` int32.
        cu_seqlens_q: ``[B + 1]`` int32.
        seq_lens: ``[B]`` int32.
        page_table: logical page -> row of ``kv``, ``[B, max_pages]`` int32; -1 past a request's end.
    """

    pages: np.ndarray
    counts: np.ndarray
    positions: np.ndarray
    cu_seqlens_q: np.ndarray
    seq_lens: np.ndarray
    page_table: np.ndarray

    @property
    def kv_heads(self) -> int:
        return self.pages.shape[0]

    @property
    def total_q(self) -> int:
        return self.pages.shape[1]

    @property
    def requests(self) -> int:
        return len(self.seq_lens)

    def geometry(self) -> dict[str, int]:
        """The manifest's entry ``geometry``. A full capture may have a larger cache than its tables need."""
        return {
            "q_heads": GROUP_HEADS * self.kv_heads,
            "kv_heads": self.kv_heads,
            "group_heads": GROUP_HEADS,
            "head_dim": HEAD_DIM,
            "page": PAGE,
            "topk": TOPK,
            "requests": self.requests,
            "total_q": self.total_q,
            "context": self.context,
            "cache_pages": max(self.cache_pages, 1),
        }

    @property
    def context(self) -> int:
        """Tokens of the longest request."""
        return int(self.seq_lens.max(initial=0))

    @property
    def cache_pages(self) -> int:
        """Rows the paged cache must have for every page table entry to exist."""
        return int(self.page_table.max(initial=-1)) + 1

    @property
    def causal_lens(self) -> np.ndarray:
        """Tokens that each query row may see, ``[total_q]`` int32: min(L, position + 1)."""
        length = self.seq_lens[request_of_rows(self.cu_seqlens_q)]
        return np.minimum(length, self.positions.astype(np.int64) + 1).astype(np.int32)

    @property
    def right_aligned(self) -> bool:
        """Whether every request's last query sits at its last token, the operator's default."""
        return bool(np.array_equal(self.positions, right_aligned_positions(self.cu_seqlens_q, self.seq_lens)))

    @classmethod
    def of_call(cls, call: SparsePrefillCall) -> Tables:
        """The tables of a call: its supports (cleaned selections) and geometry."""
        pages, counts = supports(call)
        seq_lens = call.seq_lens.cpu().numpy().astype(np.int32)
        needed = -(-seq_lens.astype(np.int64) // PAGE)
        width = int(needed.max(initial=0))
        table = call.page_table.cpu().numpy()[:, :width].astype(np.int32)
        table = np.where(np.arange(width)[None, :] < needed[:, None], table, INVALID).astype(np.int32)
        return cls(
            pages=pages,
            counts=counts,
            positions=call.positions.cpu().numpy().astype(np.int32),
            cu_seqlens_q=call.cu_seqlens_q.cpu().numpy().astype(np.int32),
            seq_lens=seq_lens,
            page_table=table,
        )

    def sha256(self) -> str:
        """Hash of the content: equal exactly when two calls select and address the same pages."""
        digest = hashlib.sha256(b"pwbench.tables.1")
        for name in ("pages", "positions", "cu_seqlens_q", "seq_lens", "page_table"):
            array = np.ascontiguousarray(getattr(self, name).astype("<i4"))
            digest.update(f"{name}{list(array.shape)}".encode())
            digest.update(array.tobytes())
        return digest.hexdigest()

    # Parquet --------------------------------------------------------------------------------

    def queries_table(self) -> pa.Table:
        """One row per (kv_head, query row), sorted by both; see `QUERY_COLUMNS`."""
        heads, rows = self.kv_heads, self.total_q
        request = request_of_rows(self.cu_seqlens_q)
        id_type = pa.int16() if int(self.pages.max(initial=0)) < 1 << 15 else pa.int32()
        flat = pa.array(self.pages.reshape(-1), type=pa.int32()).cast(id_type)
        columns = {
            "kv_head": pa.array(np.repeat(np.arange(heads, dtype=np.int32), rows)),
            "row": pa.array(np.tile(np.arange(rows, dtype=np.int32), heads)),
            "request": pa.array(np.tile(request.astype(np.int32), heads)),
            "position": pa.array(np.tile(self.positions, heads)),
            "causal_len": pa.array(np.tile(self.causal_lens, heads)),
            "n_sel": pa.array(self.counts.reshape(-1).astype(np.int32)),
            "pages": pa.FixedSizeListArray.from_arrays(flat, TOPK),
        }
        return pa.table(columns)

    def requests_table(self) -> pa.Table:
        """One row per request; see `REQUEST_COLUMNS`."""
        q_start = self.cu_seqlens_q[:-1]
        q_len = np.diff(self.cu_seqlens_q)
        needed = -(-self.seq_lens.astype(np.int64) // PAGE)
        tables = [self.page_table[r, : needed[r]].tolist() for r in range(self.requests)]
        return pa.table(
            {
                "request": pa.array(np.arange(self.requests, dtype=np.int32)),
                "seq_len": pa.array(self.seq_lens),
                "q_start": pa.array(q_start),
                "q_len": pa.array(q_len.astype(np.int32)),
                "prefix_len": pa.array((self.seq_lens - q_len).astype(np.int32)),
                "page_table": pa.array(tables, type=pa.list_(pa.int32())),
            }
        )

    def write(self, directory: Path) -> None:
        """Write both Parquet files into ``directory``."""
        _write_parquet(self.queries_table(), directory / QUERIES)
        _write_parquet(self.requests_table(), directory / REQUESTS)

    @classmethod
    def read(cls, directory: Path) -> Tables:
        """Read both Parquet files; the arrays come as stored, checked only as far as shapes need.

        Raises:
            CaptureError: a file is not Parquet, lacks a column, or its rows do not form the arrays.
        """
        queries = read_table(directory / QUERIES)
        requests = read_table(directory / REQUESTS)
        q_start, q_len = _ints(requests, "q_start"), _ints(requests, "q_len")
        total_q = int(q_len.sum())
        if not np.array_equal(q_start, np.cumsum(q_len) - q_len):
            raise CaptureError(
                f"{directory / REQUESTS}: q_start begins {q_start[:4].tolist()}, expected sums of q_len."
            )
        heads = _kv_heads(queries, total_q, directory)
        pages = queries["pages"].combine_chunks()
        if not pa.types.is_fixed_size_list(pages.type) or pages.type.list_size != TOPK:
            raise CaptureError(
                f"{directory / QUERIES}: column pages is {pages.type}, expected lists of exactly {TOPK}."
            )
        ids = pages.flatten()
        if len(ids) != heads * total_q * TOPK or ids.null_count:
            raise CaptureError(
                f"{directory / QUERIES}: column pages holds nulls, expected {TOPK} ids in every row."
            )
        ids = _int32(ids.to_numpy(zero_copy_only=False), f"{directory / QUERIES}: column pages")
        if (q_len < 0).any():
            raise CaptureError(f"{directory / REQUESTS}: q_len holds {q_len.min()}, expected at least 0.")
        page_lists = requests["page_table"]
        if not pa.types.is_list(page_lists.type) or not pa.types.is_integer(page_lists.type.value_type):
            raise CaptureError(
                f"{directory / REQUESTS}: column page_table is {page_lists.type}, expected lists of integers."
            )
        tables = page_lists.to_pylist()
        if any(row is None or None in row for row in tables):
            raise CaptureError(f"{directory / REQUESTS}: column page_table holds nulls, expected none.")
        width = max((len(t) for t in tables), default=0)
        page_table = np.full((len(tables), width), INVALID, dtype=np.int32)
        for request, row in enumerate(tables):
            page_table[request, : len(row)] = _int32(row, f"{directory / REQUESTS}: column page_table")
        return cls(
            pages=ids.reshape(heads, total_q, TOPK),
            counts=_ints(queries, "n_sel").astype(np.int32).reshape(heads, total_q),
            positions=_ints(queries, "position").astype(np.int32)[:total_q],
            cu_seqlens_q=np.concatenate([[0], np.cumsum(q_len)]).astype(np.int32),
            seq_lens=_ints(requests, "seq_len").astype(np.int32),
            page_table=page_table,
        )

    def call(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        softmax_scale: float,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> SparsePrefillCall:
        """These tables and the given values as a checked call on the CPU."""
        return SparsePrefillCall(
            q=q,
            kv=kv,
            topk=torch.from_numpy(self.pages.copy()),
            page_table=torch.from_numpy(self.page_table.copy()),
            cu_seqlens_q=torch.from_numpy(self.cu_seqlens_q.copy()),
            seq_lens=torch.from_numpy(self.seq_lens.copy()),
            positions=torch.from_numpy(self.positions.copy()),
            softmax_scale=softmax_scale,
            k_scale=k_scale,
            v_scale=v_scale,
        ).validate()


def _kv_heads(queries: pa.Table, total_q: int, directory: Path) -> int:
    """KV heads in the table; its rows must be (kv_head, row) in order, none missing."""
    rows = queries.num_rows
    heads = rows // total_q if total_q else 0
    if total_q == 0 or rows != heads * total_q or heads == 0:
        raise CaptureError(
            f"{directory / QUERIES} has {rows} rows, expected a positive multiple of the {total_q} queries "
            f"that {REQUESTS} declares."
        )
    in_order = np.array_equal(
        _ints(queries, "kv_head"), np.repeat(np.arange(heads), total_q)
    ) and np.array_equal(_ints(queries, "row"), np.tile(np.arange(total_q), heads))
    if not in_order:
        raise CaptureError(
            f"{directory / QUERIES}: rows are not sorted by kv_head and row with none missing."
        )
    return heads


def _ints(table: pa.Table, column: str) -> np.ndarray:
    values = table[column]
    if not pa.types.is_integer(values.type) or values.null_count:
        raise CaptureError(
            f"Column {column} is {values.type} with {values.null_count} nulls, expected integers."
        )
    return _int32(values.to_numpy(), f"Column {column}").astype(np.int64)


def _int32(values: Any, what: str) -> np.ndarray:
    """``values`` as int32, refused where that would change one."""
    wide = np.asarray(values)
    for extreme in (wide.max(), wide.min()) if wide.size else ():
        if not -(1 << 31) <= extreme < 1 << 31:
            raise CaptureError(f"{what} holds {extreme}, expected what 32 bits can hold.")
    return wide.astype(np.int32)


def _write_parquet(table: pa.Table, path: Path) -> None:
    leaves = {
        name: "DELTA_BINARY_PACKED"
        for name in table.column_names
        if name in _DELTA_COLUMNS or pa.types.is_int32(table.schema.field(name).type)
    }
    with path.open("wb") as file:
        pq.write_table(
            table,
            file,
            compression="zstd",
            compression_level=19,
            use_dictionary=False,
            column_encoding=leaves,
            row_group_size=_ROW_GROUP,
            write_statistics=False,
        )


def read_table(path: Path) -> pa.Table:
    """`QUERIES` or `REQUESTS` as stored, every column that this version knows of present.

    Raises:
        CaptureError: it is not Parquet or lacks a column.
    """
    columns = QUERY_COLUMNS if path.name == QUERIES else REQUEST_COLUMNS
    try:
        # Opened here: Arrow itself takes only UTF-8 paths, and a folder for a whole data set.
        # NOTE: A reading thread of Arrow that is still there when the interpreter ends aborts the process.
        with path.open("rb") as file:
            table = pq.read_table(file, use_threads=False, pre_buffer=False)
    except (OSError, pa.ArrowException) as error:
        raise CaptureError(f"{path} cannot be read as Parquet: {error}.") from None
    twice = [name for name in columns if table.column_names.count(name) > 1]
    if twice:
        raise CaptureError(f"{path} has column {twice[0]} more than once, expected once.")
    missing = [name for name in columns if name not in table.column_names]
    if missing:
        raise CaptureError(f"{path} has no column {', '.join(missing)}; expected {', '.join(columns)}.")
    return table
