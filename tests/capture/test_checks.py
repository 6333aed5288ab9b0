"""Every rule of the format, broken one at a time; hashes are mended so that only the rule is at fault."""

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from pwbench import reference
from pwbench.capture import failures, load, verify, write
from pwbench.capture.format import MANIFEST, QUERIES, REQUESTS, TENSORS, Tables
from pwbench.capture.writer import file_sha256
from pwbench.errors import CaptureError
from tests.calls import make_call


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    call = make_call(5, (21, 12), kv_heads=2, selection="random", poison="none", spare_pages=2)
    return write(tmp_path_factory.mktemp("sound") / "one", call, out_model=reference.attend(call))


@pytest.fixture
def capture(sound, tmp_path):
    """A copy of the sound capture, to break."""
    return Path(shutil.copytree(sound, tmp_path / "one"))


def broken(path):
    """Names of the checks that fail."""
    return {check.name for check in verify(path) if not check.ok}


def edit_manifest(path, change):
    manifest = json.loads((path / MANIFEST).read_text())
    change(manifest)
    (path / MANIFEST).write_text(json.dumps(manifest))


def mend(path):
    """Make the manifest's sizes and hashes those of the files as they are now."""

    def change(manifest):
        for entry in manifest["files"]:
            file = path / entry["path"]
            entry |= {"bytes": file.stat().st_size, "sha256": file_sha256(file)}
        manifest["tables_sha256"] = Tables.read(path).sha256()

    edit_manifest(path, change)


def edit_column(path, file, column, change):
    table = pq.read_table(path / file)
    values = table[column].to_pylist()
    change(values)
    index = table.column_names.index(column)
    kind = table.schema.field(column).type
    pq.write_table(table.set_column(index, column, pa.array(values, kind)), path / file)
    mend(path)


def edit_tensors(path, change):
    tensors = load_file(path / TENSORS)
    change(tensors)
    save_file(tensors, path / TENSORS)
    mend(path)


def test_a_sound_capture_breaks_no_rule(capture):
    assert failures(verify(capture)) is None


def put(index, value):
    def change(values):
        values[index] = value

    return change


def put_id(place, page):
    def change(values):
        ids = [i for i in values[0] if i >= 0]
        ids[place] = page
        values[0] = ids + [-1] * (16 - len(ids))

    return change


COLUMN_RULES = {
    "ids in the future": (QUERIES, "pages", put_id(-1, 400), {"page ids visible"}),
    "negative ids": (QUERIES, "pages", put_id(0, -2), {"page ids visible"}),
    "n_sel": (QUERIES, "n_sel", put(3, 0), {"n_sel", "-1 last"}),
    "causal_len": (QUERIES, "causal_len", put(3, 7), {"queries causal_len"}),
    "request of a row": (QUERIES, "request", put(3, 1), {"queries request"}),
    "positions per head": (QUERIES, "position", put(40, 9), {"queries position"}),
    "request ids": (REQUESTS, "request", put(0, 4), {"requests request"}),
    "prefix_len": (REQUESTS, "prefix_len", put(0, 4), {"requests prefix_len"}),
}


@pytest.mark.parametrize("rule", COLUMN_RULES)
def test_a_broken_column_is_named(capture, rule):
    file, column, change, names = COLUMN_RULES[rule]
    edit_column(capture, file, column, change)
    # A changed selection also moves the output away from what the model computed.
    assert broken(capture) - {"out_model near the reference"} == names


def test_unsorted_and_repeated_ids_are_named(capture):
    def swap(values):
        values[0][0], values[0][1] = values[0][1], values[0][0]

    edit_column(capture, QUERIES, "pages", swap)
    assert "page ids ascending" in broken(capture)

    def repeat(values):
        values[0][0] = values[0][1] = min(values[0][:2])

    edit_column(capture, QUERIES, "pages", repeat)
    assert "page ids ascending" in broken(capture)


def test_padding_before_ids_is_named(capture):
    def hole(values):
        values[0] = [-1, *values[0][:15]]

    edit_column(capture, QUERIES, "pages", hole)
    assert {"-1 last", "page ids visible"} <= broken(capture)


def test_positions_must_be_right_aligned_unless_stored(capture):
    def earlier(values):
        for index, position in enumerate(values):
            values[index] = position - 1

    edit_column(capture, QUERIES, "position", earlier)
    edit_column(capture, QUERIES, "causal_len", earlier)
    assert "positions right-aligned" in broken(capture)
    edit_manifest(capture, lambda m: m.update(positions="stored"))
    assert "positions right-aligned" not in broken(capture)


def test_own_positions_are_declared_by_the_writer(tmp_path):
    call = make_call(1, (4,), positions=(600, 5, 9, 300), poison="none")
    path = write(tmp_path / "one", call)
    assert load(path).manifest["positions"] == "stored"
    assert failures(verify(path)) is None


def test_page_table_rows_are_unique_long_enough_and_not_negative(capture):
    def repeat(values):
        values[0][1] = values[0][0]

    edit_column(capture, REQUESTS, "page_table", repeat)
    assert "page_table unique" in broken(capture)
    edit_column(capture, REQUESTS, "page_table", put(1, [0]))
    assert "page_table length" in broken(capture)

    def negative(values):
        values[0][1] = -3

    edit_column(capture, REQUESTS, "page_table", negative)
    assert "page_table rows" in broken(capture)


def test_a_page_table_entry_outside_the_cache_is_named(capture):
    def outside(values):
        values[0][1] = 10_000

    edit_column(capture, REQUESTS, "page_table", outside)
    assert "geometry cache_pages" in broken(capture)


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_a_nan_in_a_valid_token_is_named_and_one_past_the_end_is_not(capture, byte):
    tables = load(capture).tables
    length = int(tables.seq_lens[0])
    last = int(tables.page_table[0, (length - 1) // 128])

    def poison(token):
        def change(tensors):
            tensors["kv"].view(torch.uint8)[last, 1, token, 200] = byte

        return change

    edit_tensors(capture, poison(length % 128))
    assert broken(capture) == set()
    edit_tensors(capture, poison((length - 1) % 128))
    assert broken(capture) == {"kv without NaN"}


def test_a_query_that_is_not_finite_is_named(capture):
    edit_tensors(capture, lambda t: t["q"].view(-1).__setitem__(7, float("nan")))
    assert broken(capture) == {"q finite"}


def test_an_output_that_is_not_the_models_is_named(capture):
    edit_tensors(capture, lambda t: t.update(out_model=t["out_model"].roll(1, 0).contiguous()))
    assert broken(capture) == {"out_model near the reference"}


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("q", torch.zeros(33, 32, 128)),
        ("q", torch.zeros(5, 32, 128, dtype=torch.bfloat16)),
        ("kv", torch.zeros(3, 2, 128, 256, dtype=torch.uint8)),
        ("out_model", torch.zeros(33, 16, 128, dtype=torch.bfloat16)),
        ("k_scale", torch.tensor([2.0])),
    ],
)
def test_a_tensor_of_another_shape_type_or_scale_is_named(capture, name, tensor):
    edit_tensors(capture, lambda t: t.update({name: tensor}))
    assert f"tensor {name}" in broken(capture)


def test_a_full_capture_without_a_tensor_is_named(capture):
    edit_tensors(capture, lambda t: t.pop("kv"))
    assert "tensor kv" in broken(capture)


@pytest.mark.parametrize("name", ["softmax_scale", "k_scale", "v_scale"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_scales_are_positive_and_finite(capture, name, value):
    def change(manifest):
        place = manifest if name == "softmax_scale" else manifest["quant"]
        place[name] = value

    edit_manifest(capture, change)
    assert name in broken(capture)


@pytest.mark.parametrize(
    "name",
    ["q_heads", "kv_heads", "head_dim", "page", "topk", "requests", "total_q", "context", "cache_pages"],
)
def test_geometry_is_the_tables(capture, name):
    edit_manifest(capture, lambda m: m["geometry"].update({name: 1}))
    assert f"geometry {name}" in broken(capture)


# Damage -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", [QUERIES, REQUESTS, TENSORS])
def test_a_truncated_an_edited_and_a_missing_file_are_named(capture, file):
    whole = (capture / file).read_bytes()
    (capture / file).write_bytes(whole[:-5])
    assert broken(capture) == {f"{file} size"}
    edited = bytearray(whole)
    edited[len(edited) // 2] ^= 1
    (capture / file).write_bytes(edited)
    assert broken(capture) == {f"{file} SHA-256"}
    (capture / file).unlink()
    assert broken(capture) == {f"{file} exists"}


def test_a_foreign_file_is_named(capture):
    (capture / "notes.txt").write_text("hello")
    assert broken(capture) == {"no other file"}


def test_a_file_outside_the_capture_is_not_followed(capture):
    edit_manifest(capture, lambda m: m["files"].append({"path": "../secret", "bytes": 1, "sha256": "0"}))
    assert broken(capture) == {"file name"}


def test_an_unlisted_file_that_the_kind_needs_is_named(capture):
    edit_manifest(capture, lambda m: m.update(files=[e for e in m["files"] if e["path"] != TENSORS]))
    assert "files listed" in broken(capture)


def test_tables_of_another_capture_are_noticed_even_with_mended_file_hashes(capture, tmp_path):
    other = write(tmp_path / "two", make_call(9, (21, 12), kv_heads=2, poison="none"), kind="tables")
    (capture / QUERIES).write_bytes((other / QUERIES).read_bytes())

    def change(manifest):
        for entry in manifest["files"]:
            file = capture / entry["path"]
            entry |= {"bytes": file.stat().st_size, "sha256": file_sha256(file)}

    edit_manifest(capture, change)
    assert "tables hash" in broken(capture)
    with pytest.raises(CaptureError, match="was edited"):
        load(capture).call()


def test_verify_never_raises_for_what_is_not_a_capture(tmp_path):
    assert broken(tmp_path) == {"readable"}
    assert broken(tmp_path / "nowhere") == {"readable"}
    (tmp_path / MANIFEST).write_text("{")
    assert broken(tmp_path) == {"readable"}
    (tmp_path / MANIFEST).write_text("[]")
    assert broken(tmp_path) == {"readable"}
