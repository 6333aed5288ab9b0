import json

from click.testing import CliRunner

from pwbench.capture import failures, verify
from pwbench.cli.main import main

DEFINITIONS = """
[suites.bounds]
purpose = "Bounds."

[[suites.bounds.captures]]
name = "random"
synthetic = { pattern = "random", context = 5000, queries = 16, seed = SEED }
reason = "No affinity."
"""


def run(*arguments):
    return CliRunner().invoke(main, ["suites", *map(str, arguments)])


def define(folder, seed=1):
    (folder / "suites.toml").write_text(DEFINITIONS.replace("SEED", str(seed)))
    return ("--definitions", folder / "suites.toml")


def test_the_list_says_what_is_stored(tmp_path):
    definitions = define(tmp_path)
    assert "- random" in run(*definitions).stdout
    assert run("make", *definitions, "--out", tmp_path).exit_code == 0
    assert "- random" not in run(*definitions).stdout
    data = json.loads(run(*definitions, "--json").stdout)
    assert data["bounds"]["captures"][0]["stored"] is True


def test_captures_are_made_then_kept_and_other_ones_are_reported(tmp_path):
    out = ("--out", tmp_path)
    assert "written" in run("make", *define(tmp_path), *out).stdout
    assert failures(verify(tmp_path / "bounds" / "random")) is None
    assert "kept" in run("make", *define(tmp_path), *out).stdout
    result = run("make", *define(tmp_path, seed=2), *out)
    assert result.exit_code == 1
    assert "of 16 rows differ" in result.stdout
    assert "other tables" in result.stderr
    assert run("make", *define(tmp_path, seed=2), *out, "--overwrite").exit_code == 0


def test_folders_of_captures_are_compared_and_a_difference_is_a_failed_check(tmp_path):
    assert run("make", *define(tmp_path), "--out", tmp_path / "a").exit_code == 0
    assert run("make", *define(tmp_path, seed=2), "--out", tmp_path / "b").exit_code == 0
    same = run("compare", tmp_path / "a", "--against", tmp_path / "a")
    assert same.exit_code == 0 and "the same selections in all 16 rows" in same.stdout
    other = run("compare", tmp_path / "a", "--against", tmp_path / "b")
    assert other.exit_code == 1 and "of 16 rows differ" in other.stdout and "not the same run" in other.stderr
    absent = run("compare", tmp_path / "a", "--against", tmp_path / "c", "--json")
    assert json.loads(absent.stdout)["captures"][0]["differing_rows"] is None


def test_unknown_suites_and_missing_options_are_bad_input(tmp_path):
    definitions = define(tmp_path)
    result = run("make", *definitions, "--suite", "nope", "--out", tmp_path)
    assert result.exit_code == 2
    assert "there are bounds" in result.stderr
    assert run("survey").exit_code == 2
    result = run("survey", "--model", tmp_path, "--prompts", tmp_path, "--contexts", "8k,x")
    assert "expected token counts" in result.stderr
    assert "holds no .txt" in run("survey", "--model", tmp_path, "--prompts", tmp_path).stderr
