import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from pwbench import suites
from pwbench.capture import Recording, Tables, discover, failures, load, verify
from pwbench.capture.recorder import Target
from pwbench.errors import InputError
from tests.calls import make_call

DEFINITIONS = """
[suites.a]
purpose = "Test."
queries = 20

[[suites.a.captures]]
name = "one"
prompt = "p"
context = 300
layer = 1
reason = "A chunk."

[[suites.a.captures]]
name = "mixed"
layer = 2
requests = [{ prompt = "p", context = 300 }, { prompt = "r", context = 50, queries = 7 }]
reason = "Two requests."

[[suites.a.captures]]
name = "invented"
synthetic = { pattern = "random", context = 5000, queries = 16, seed = 1 }
reason = "A bound."
"""


@pytest.fixture
def specs(tmp_path):
    path = tmp_path / "suites.toml"
    path.write_text(DEFINITIONS)
    return suites.load_suites(path)["a"].captures


@pytest.fixture
def runs(monkeypatch):
    """Stands in for the model: what was run, and one seeded recording for each target."""
    seen = []

    def run(model, prompts, name, targets, progress, prefill_chunk=2048):
        seen.append((name, list(targets)))
        return {t: fake(model, t) for t in targets}

    monkeypatch.setattr(suites, "_run_prompt", run)
    return seen


def fake(model, target: Target) -> Recording:
    call = make_call(
        model + target.layer, (target.queries,), prefix_lens=(target.begin,), poison="none", spare_pages=0
    )
    return Recording(call, torch.zeros_like(call.q), {"layer": target.layer})


def test_one_run_per_prompt_records_each_target_once(specs):
    """Whole chunks only, so that the contexts of a prompt share its run."""
    whole = [dataclasses.replace(spec, prefill_chunk=50) for spec in specs]
    assert suites.runs([*whole, *whole]) == [
        ("p", 50, [Target(1, 20, 300), Target(2, 20, 300)]),
        ("r", 50, [Target(2, 7, 50)]),
    ]


def test_what_a_prompt_records_does_not_depend_on_what_else_is_recorded_with_it(tmp_path):
    """A context that ends inside a prefill chunk would cut it for the longer ones: it runs alone."""
    path = tmp_path / "suites.toml"
    path.write_text(
        DEFINITIONS.replace("queries = 20", "queries = 20\nprefill_chunk = 100")
        + "\n[[suites.a.captures]]\nname = 'cut'\nprompt = 'p'\ncontext = 250\nlayer = 1\nreason = 'r'\n"
    )
    specs = suites.load_suites(path)["a"].captures
    assert suites.runs(specs) == [
        ("p", 100, [Target(1, 20, 300), Target(2, 20, 300)]),
        ("r", 100, [Target(2, 7, 50)]),
        ("p", 100, [Target(1, 20, 250)]),
    ]


def test_full_captures_of_chosen_suites_only_and_compared_with_the_tables(specs, runs, tmp_path):
    out, full = tmp_path / "out", tmp_path / "full"
    suites.make(specs, out, model=1, prompts="x", full_out=full, full_suites=["b"])
    assert not full.exists()
    suites.make(specs, out, model=1, prompts="x", full_out=full, full_suites=["a"])
    assert [(c.name, c.differing_rows) for c in suites.compare(full, out)] == [
        ("a/invented", 0), ("a/mixed", 0), ("a/one", 0),
    ]  # fmt: skip
    suites.make(specs, tmp_path / "other", model=2, prompts="x")
    found = {c.name: c for c in suites.compare(full, tmp_path / "other")}
    assert 0 < found["a/one"].differing_rows <= found["a/one"].rows
    assert [c.differing_rows for c in suites.compare(full, tmp_path / "none")] == [None] * 3


def test_made_captures_verify_and_say_why_they_are_there(specs, runs, tmp_path):
    made = suites.make(specs, tmp_path / "out", model=1, prompts="x", full_out=tmp_path / "full")
    assert [m.state for m in made] == ["written"] * 3
    assert [name for name, _ in runs] == ["p", "r"]
    for folder, kind in (("out", "tables"), ("full", "full")):
        for path in discover([tmp_path / folder]):
            # The stand-in for the model computes nothing, so its output is not checked.
            bad = {c.name for c in verify(path) if not c.ok} - {"out_model near the reference"}
            assert not bad
            assert load(path).kind == kind
    stored, full = (load(tmp_path / f / "a" / "mixed") for f in ("out", "full"))
    assert stored.tables_sha256 == full.tables_sha256
    assert stored.manifest["suite"] == {"name": "a", "reason": "Two requests."}
    assert stored.manifest["geometry"]["requests"] == 2
    assert load(tmp_path / "out" / "a" / "invented").synthetic


def test_remaking_keeps_what_is_equal_and_counts_what_is_not(specs, runs, tmp_path):
    out = tmp_path / "out"
    suites.make(specs, out, model=1, prompts="x")
    again = suites.make(specs, out, model=1, prompts="x")
    assert [(m.state, m.differing_rows) for m in again] == [("kept", 0)] * 3
    before = load(out / "a" / "one").tables_sha256
    other = suites.make(specs, out, model=2, prompts="x")
    assert [m.state for m in other] == ["differs", "differs", "kept"]
    assert 0 < other[0].differing_rows <= other[0].rows == 20
    assert load(out / "a" / "one").tables_sha256 == before
    replaced = suites.make(specs, out, model=2, prompts="x", overwrite=True)
    assert [m.state for m in replaced] == ["written", "written", "kept"]
    assert load(out / "a" / "one").tables_sha256 != before


def test_an_equal_capture_whose_seeded_tensors_nobody_can_make_is_written_anew(specs, runs, tmp_path):
    out = tmp_path / "out"
    suites.make(specs, out, model=1, prompts="x")
    one = out / "a" / "one"
    old = load(one).manifest
    old["tensors"]["generator"] = "mersenne/9"
    (one / "manifest.json").write_text(json.dumps(old))
    assert not load(one).replayable
    again = suites.make(specs, out, model=1, prompts="x")
    assert sorted(m.state for m in again) == ["kept", "kept", "written"]
    assert load(one).replayable and load(one).tables_sha256 == old["tables_sha256"]
    # With other tables it stays, as any other does.
    (one / "manifest.json").write_text(json.dumps(old))
    other = suites.make(specs, out, model=2, prompts="x")
    assert [m.state for m in other] == ["differs", "differs", "kept"] and not load(one).replayable


def test_captures_made_elsewhere_are_compared_with_the_stored_ones(specs, runs, tmp_path):
    suites.make(specs, tmp_path / "stored", model=1, prompts="x")
    same, other = (
        suites.make(
            specs, tmp_path / f"out{m}", model=m, prompts="x", kind="full", against=tmp_path / "stored"
        )
        for m in (1, 2)
    )
    assert [m.differing_rows for m in same] == [0, 0, 0]
    assert other[0].differing_rows > 0
    assert [m.state for m in other] == ["written"] * 3


def test_differing_rows_are_counted_and_other_geometry_differs_everywhere():
    tables = Tables.of_call(make_call(1, (20,)))
    pages = tables.pages.copy()
    pages[0, 3, 0] += 1
    fields = ("counts", "positions", "cu_seqlens_q", "seq_lens", "page_table")
    other = Tables(pages, *(getattr(tables, name) for name in fields))
    assert suites.differing_rows(tables, tables) == 0
    assert suites.differing_rows(tables, other) == 1
    assert suites.differing_rows(tables, Tables.of_call(make_call(1, (20,), prefix_lens=(700,)))) == 20


def test_a_survey_ranks_union_sizes_within_a_context(runs):
    class Model(int):
        sparse_layers = (1, 2)

    rows = suites.survey(Model(3), "x", ["p", "r"], [300, 400], queries=64)
    assert len(rows) == 8
    for context in (300, 400):
        here = [row for row in rows if row["context"] == context]
        assert [row["u8"] for row in here] == sorted(row["u8"] for row in here)
        assert here[0]["quantile"] == 0.0
        tables = Tables.of_call(fake(3, Target(here[0]["layer"], 64, context)).call)
        first = np.unique(tables.pages[0, :8][tables.pages[0, :8] >= 0])
        assert len(first) <= 3 and here[0]["u4"] <= here[0]["u8"]


def test_recorded_suites_need_a_model(specs, tmp_path):
    with pytest.raises(InputError, match="need --model and --prompts"):
        suites.make(specs, tmp_path)


def test_a_prompt_is_found_compressed_or_plain(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "b.txt.xz").write_bytes(b"x")
    assert suites.find_prompt(tmp_path, "a").name == "a.txt"
    assert suites.find_prompt(tmp_path, "b").name == "b.txt.xz"
    with pytest.raises(InputError, match="holds no c"):
        suites.find_prompt(tmp_path, "c")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('reason = "A chunk."', "", "needs a name and a reason"),
        ("layer = 1", "", "needs 'layer'"),
        ('prompt = "p"\ncontext = 300\n', "", "needs 'prompt'"),
        ("queries = 20", "queries = 301", "queries is 301, expected 1 to 300"),
        ('name = "mixed"', 'name = "one"', "names a capture twice"),
        ("[suites.a]", "[suites.a", "is not TOML"),
        ("queries = 20", "queries = 20\nprefill_chunk = 0", "prefill_chunk of suite 'a' is 0"),
    ],
)
def test_bad_definitions_are_refused(tmp_path, old, new, message):
    assert old in DEFINITIONS
    path = tmp_path / "suites.toml"
    path.write_text(DEFINITIONS.replace(old, new, 1))
    with pytest.raises(InputError, match=message):
        suites.load_suites(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("suites = 3", "should be a table"),
        ("[suites]\na = 3", "should be a table"),
        ("[suites.a]\ncaptures = 3", "should be a table"),
        ("[suites.a]\ncaptures = [3]", "should be a table"),
        ("[[suites.a.captures]]\nname = 'n'\nreason = 'r'\nlayer = 'x'\nrequests = []", "no number"),
        ("[[suites.a.captures]]\nname = 'n'\nreason = 'r'\nlayer = 1\nrequests = 3", "no number"),
        ("[[suites.a.captures]]\nname = 'n'\nreason = 'r'\nsynthetic = 3", "expected a table"),
        ("\xff", "is not TOML"),
    ],
)
def test_definitions_of_another_shape_are_refused(tmp_path, text, message):
    (tmp_path / "suites.toml").write_bytes(text.encode("latin-1"))
    with pytest.raises(InputError, match=message):
        suites.load_suites(tmp_path / "suites.toml")


def test_a_synthetic_capture_of_unknown_properties_is_refused(tmp_path):
    (tmp_path / "suites.toml").write_text(
        "[[suites.a.captures]]\nname = 'n'\nreason = 'r'\nsynthetic = {colour = 'blue'}"
    )
    (spec,) = suites.load_suites(tmp_path / "suites.toml")["a"].captures
    with pytest.raises(InputError, match=r"'n' of suite 'a' cannot be generated: .*colour"):
        suites.make([spec], tmp_path / "out")


def test_missing_definitions_are_refused(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        suites.load_suites(tmp_path / "none.toml")


# The repository's own captures --------------------------------------------------------------------


def test_stored_captures_are_those_defined(repository: Path):
    defined = {
        (s.name, c.name)
        for s in suites.load_suites(repository / suites.DEFINITIONS).values()
        for c in s.captures
    }
    stored = {(load(p).suite, load(p).name) for p in discover([repository / "captures"])}
    assert stored <= defined


def test_stored_captures_verify_and_are_small(repository: Path):
    total = 0
    for path in discover([repository / "captures"]):
        assert failures(verify(path)) is None
        total += sum(f.stat().st_size for f in path.iterdir())
    assert total < 8_000_000


def test_invented_captures_are_reproduced_exactly(repository: Path, tmp_path):
    """The generator's random streams must give the same selections on every machine and version."""
    defined = suites.load_suites(repository / suites.DEFINITIONS)
    specs = [spec for name in ("extremes", "shapes", "affinity") for spec in defined[name].captures]
    made = suites.make(specs, tmp_path, against=repository / "captures")
    assert [m.differing_rows for m in made] == [0] * len(specs)
