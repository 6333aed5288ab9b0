import json

import pytest
from click.testing import CliRunner

from pwbench.capture import write
from pwbench.capture.synthetic import generate
from pwbench.cli.main import main
from tests.calls import make_call


def run(*arguments):
    return CliRunner().invoke(main, ["inspect", *map(str, arguments)])


@pytest.fixture
def path(tmp_path):
    recording = generate(8192, 128, affinity=0.8, seed=1)
    return write(tmp_path / "suite" / "one", recording.call, kind="tables", facts=recording.facts)


def test_a_person_sees_geometry_provenance_unions_and_a_histogram(path):
    result = run(path)
    assert result.exit_code == 0, result.output
    for part in (
        "suite/one, tables",
        "synthetic",
        "128 queries",
        "context up to 8192",
        "groups of 8",
        "█",
        "░",
    ):
        assert part in result.stdout


def test_unions_are_those_of_both_orders(path):
    data = json.loads(run(path, "--json").stdout)
    unions = data["unions"]
    assert list(unions) == ["2", "4", "8", "16", "32"]
    means = [unions[g]["original"]["mean"] for g in unions]
    assert means == sorted(means)
    assert unions["8"]["regrouped"]["mean"] < unions["8"]["original"]["mean"]
    assert unions["8"]["original"]["groups"] == 16
    assert data["geometry"]["total_q"] == 128


def test_a_wider_window_is_another_search(path):
    means = {
        window: json.loads(run(path, "--json", "--window", window).stdout)["unions"]["8"]["regrouped"]["mean"]
        for window in (8, 128)
    }
    assert means[128] < means[8]


def test_empty_selections_and_many_requests_can_be_inspected(tmp_path):
    call = make_call(1, (9, 0, 30), selection="empty", kv_heads=2)
    assert run(write(tmp_path / "one", call, kind="tables")).exit_code == 0


def test_what_is_no_capture_is_bad_input(tmp_path):
    result = run(tmp_path)
    assert result.exit_code == 2
    assert "is not a capture" in result.stderr
