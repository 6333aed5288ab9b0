import json

from click.testing import CliRunner

from pwbench.capture import write
from pwbench.capture.format import QUERIES
from pwbench.cli.main import main
from tests.calls import make_call


def run(*arguments):
    return CliRunner().invoke(main, ["verify", *map(str, arguments)])


def make(folder, *names):
    return [write(folder / name, make_call(1, (9,)), kind="tables") for name in names]


def test_sound_captures_pass(tmp_path):
    make(tmp_path, "one", "two")
    result = run(tmp_path)
    assert result.exit_code == 0
    assert result.stdout.count("ok ") == 2


def test_a_broken_capture_fails_with_exit_code_1_and_its_rule(tmp_path):
    good, bad = make(tmp_path, "good", "bad")
    (bad / QUERIES).write_bytes(b"")
    result = run(tmp_path)
    assert result.exit_code == 1
    assert f"FAILED {bad}" in result.stdout
    assert "queries.parquet size: 0; expected" in result.stdout
    assert f"ok     {good}" in result.stdout
    assert "1 of 2 captures break the format" in result.stderr


def test_json_lists_every_check(tmp_path):
    (path,) = make(tmp_path, "one")
    data = json.loads(run(path, "--json").stdout)
    assert data["captures"][0]["ok"] is True
    assert {"name", "ok", "seen", "expected"} == set(data["captures"][0]["checks"][0])


def test_nothing_to_verify_is_bad_input(tmp_path):
    assert run(tmp_path).exit_code == 2
