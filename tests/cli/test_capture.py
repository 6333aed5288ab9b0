import json

import pytest
import torch
from click.testing import CliRunner

from pwbench.capture import failures, load, tensors_file, verify
from pwbench.cli.main import main
from tests.calls import make_call


def run(*arguments):
    return CliRunner().invoke(main, ["capture", *map(str, arguments)])


def test_synthetic_captures_are_written_and_labelled(tmp_path):
    out = tmp_path / "one"
    result = run(
        "synthetic", "--context", "4K", "--queries", 64, "--affinity", 0.5, "--seed", 3, "--out", out
    )
    assert result.exit_code == 0, result.output
    assert "synthetic" in result.stdout
    loaded = load(out)
    assert failures(verify(out)) is None
    assert loaded.manifest["synthetic"] == {"pattern": "persistent", "affinity": 0.5, "seed": 3}
    assert (loaded.tables.total_q, loaded.tables.context) == (64, 4096)


def test_json_says_what_was_made(tmp_path):
    result = run("synthetic", "--context", 300, "--out", tmp_path / "one", "--kind", "full", "--json")
    (row,) = json.loads(result.stdout)["captures"]
    assert row["kind"] == "full"
    assert (row["queries"], row["context"], row["synthetic"]) == (300, 300, True)
    assert row["tables_sha256"] == load(tmp_path / "one").tables_sha256


def test_a_tensors_file_is_imported(tmp_path):
    tensors_file.save(tmp_path / "call.safetensors", make_call(1, (20,), poison="none"))
    result = run("tensors", tmp_path / "call.safetensors", "--layer", 7, "--out", tmp_path / "one")
    assert result.exit_code == 0, result.output
    assert failures(verify(tmp_path / "one")) is None
    assert (load(tmp_path / "one").kind, load(tmp_path / "one").manifest["layer"]) == ("full", 7)


def test_a_dummy_call_is_skipped_and_said_so(tmp_path):
    call = make_call(1, (20,), poison="none")
    tensors_file.save(tmp_path / "a", type(call)(**{**vars(call), "topk": torch.zeros_like(call.topk)}))
    result = run("tensors", tmp_path / "a", "--out", tmp_path / "one")
    assert result.exit_code == 2
    assert "is a dummy call" in result.stderr
    assert not (tmp_path / "one").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("synthetic", "--context", "4Q"), "is no number of tokens"),
        (("synthetic", "--context", 64, "--queries", 65), "queries is 65, expected between 1"),
        (("tensors", "/nowhere.safetensors"), "cannot be read as safetensors"),
        (
            ("transformers", "--model", "/nowhere", "--prompt", "/nowhere.txt", "--context", 64),
            "cannot be read",
        ),
    ],
)
def test_bad_input_ends_with_one_sentence_and_exit_code_2(tmp_path, arguments, message):
    result = run(*arguments, "--out", tmp_path / "one")
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "one").exists()


def test_an_existing_destination_is_refused_before_the_work(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "file").write_text("x")
    result = run("synthetic", "--context", 64, "--out", tmp_path / "one")
    assert result.exit_code == 2
    assert "already exists" in result.stderr


@pytest.mark.parametrize("command", ["transformers", "tensors", "synthetic"])
def test_help_has_an_example(command):
    assert "Example" in run(command, "-h").stdout


def test_a_model_is_recorded_layer_by_layer(tmp_path):
    pytest.importorskip("transformers")
    from tests.capture.test_transformers import save_model

    save_model(tmp_path / "model")
    (tmp_path / "p.txt").write_text("abcdefgh" * 50)
    common = ("transformers", "--model", tmp_path / "model", "--prompt", tmp_path / "p.txt", "--context", 300)
    result = run(
        *common, "--queries", 40, "--prefill-chunk", 128, "--out", tmp_path / "all", "--kind", "full"
    )
    assert result.exit_code == 0, result.output
    for name in ("p-l1", "p-l2"):
        assert failures(verify(tmp_path / "all" / name)) is None
    result = run(*common, "--layers", "2", "--out", tmp_path / "single")
    assert result.exit_code == 0, result.output
    assert load(tmp_path / "single").manifest["layer"] == 2
    result = run(*common, "--layers", "0", "--out", tmp_path / "dense")
    assert result.exit_code == 2
    assert "sparse layers are [1, 2]" in result.stderr
    result = run(*common, "--layers", "1-2", "--out", tmp_path / "dense")
    assert "expected layer numbers such as 1,3" in result.stderr
