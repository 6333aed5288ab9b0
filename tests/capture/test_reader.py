import json

import pytest
import torch

from pwbench.capture import discover, failures, load, seeded, verify, write
from pwbench.capture.format import MANIFEST
from pwbench.errors import CaptureError
from tests.calls import make_call


@pytest.fixture
def tables(tmp_path):
    return write(tmp_path / "suite" / "two", make_call(2, (19, 8)), kind="tables", seed=7)


def edit(path, **changes):
    manifest = json.loads((path / MANIFEST).read_text()) | changes
    (path / MANIFEST).write_text(json.dumps(manifest))


def schema(major, minor):
    return {"name": "pwbench.capture", "major": major, "minor": minor}


def test_an_unknown_major_version_is_refused(tables):
    edit(tables, schema=schema(2, 0))
    with pytest.raises(CaptureError, match=r"format version 2\.0, this pwbench reads 1\.x"):
        load(tables)


def test_an_unknown_minor_version_is_read_and_passed_through(tables):
    edit(tables, schema=schema(1, 99), colour="blue")
    assert failures(verify(tables)) is None
    assert load(tables).manifest["colour"] == "blue"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": {"name": "npm"}}, "belongs to something else"),
        ({"schema": None}, "belongs to something else"),
        ({"complete": False}, "was not finished"),
        ({"complete": None}, "was not finished"),
        ({"kind": "recipe"}, "kind is 'recipe'"),
        ({"files": {}}, "files is"),
        ({"geometry": 3}, "geometry is 3"),
        ({"softmax_scale": "big"}, "softmax_scale is 'big', expected a number"),
        ({"quant": {"k_scale": True, "v_scale": 1.0}}, "k_scale is True"),
        (
            {"tensors": {"seed": 0, "late_maxima": "often"}},
            "tensors.late_maxima is 'often', expected a number",
        ),
    ],
)
def test_a_manifest_that_says_the_wrong_thing_is_refused(tables, changes, message):
    edit(tables, **changes)
    with pytest.raises(CaptureError, match=message):
        load(tables)


def test_a_directory_without_a_manifest_is_no_capture(tmp_path):
    with pytest.raises(CaptureError, match="holds no manifest"):
        load(tmp_path)
    with pytest.raises(CaptureError, match="no such directory"):
        load(tmp_path / "nowhere")


def test_stored_tensors_of_a_tables_capture_are_refused(tables):
    with pytest.raises(CaptureError, match="stores no tensors"):
        load(tables).call(tensors="stored")
    with pytest.raises(CaptureError, match="expected auto, stored or seeded"):
        load(tables).call(tensors="fresh")


def test_seeded_tensors_follow_the_manifests_seed(tables):
    first, again = load(tables).call(), load(tables).call(tensors="seeded")
    assert torch.equal(first.q, again.q)
    assert torch.equal(first.kv.view(torch.uint8), again.kv.view(torch.uint8))
    edit(tables, tensors=load(tables).manifest["tensors"] | {"seed": 8})
    assert not torch.equal(load(tables).call().q, first.q)


def test_seeded_tensors_follow_the_manifests_late_maxima(tables):
    first, declared = load(tables).call(), load(tables).manifest["tensors"]
    edit(tables, tensors=declared | {"late_maxima": 9.0})
    assert not torch.equal(load(tables).call().q, first.q)
    edit(tables, tensors={name: value for name, value in declared.items() if name != "late_maxima"})
    unsaid = load(tables).call()
    edit(tables, tensors=declared | {"late_maxima": seeded.LATE_MAXIMA})
    assert torch.equal(load(tables).call().q, unsaid.q)


def test_another_generator_is_refused(tables):
    edit(tables, tensors={"generator": "mersenne/9", "seed": 0})
    with pytest.raises(CaptureError, match="mersenne/9"):
        load(tables).call()


def test_full_captures_can_be_replayed_with_seeded_tensors(tmp_path):
    call = make_call(2, (19,), poison="none", k_scale=0.5)
    loaded = load(write(tmp_path / "one", call))
    stored, made = loaded.call(), loaded.call(tensors="seeded")
    assert not torch.equal(stored.q, made.q)
    assert torch.equal(stored.topk, made.topk)
    assert (stored.k_scale, made.k_scale) == (0.5, 1.0)


def test_out_model_is_there_only_where_it_was_stored(tmp_path, tables):
    call = make_call(2, (19,), poison="none")
    out = torch.ones(call.q.shape)
    assert load(write(tmp_path / "with", call, out_model=out)).out_model().shape == call.q.shape
    assert load(write(tmp_path / "without", call)).out_model() is None
    assert load(tables).out_model() is None


def test_discover_finds_captures_below_folders_once_and_ignores_dot_directories(tmp_path, monkeypatch):
    call = make_call(2, (5,))
    for name in ("captures/b/y", "captures/b/x", "captures/a/z", "captures/b/.x.partial-1"):
        write(tmp_path / name, call, kind="tables")
    monkeypatch.chdir(tmp_path)
    names = [str(path) for path in discover()]
    assert names == ["captures/a/z", "captures/b/x", "captures/b/y"]
    assert [str(p) for p in discover(["captures/b/y", "captures/b"])] == ["captures/b/y", "captures/b/x"]


def test_discover_says_where_there_is_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CaptureError, match="captures: no such directory"):
        discover()
    with pytest.raises(CaptureError, match="no capture in or below"):
        discover([tmp_path])
