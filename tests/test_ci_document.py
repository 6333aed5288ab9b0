"""docs/ci.md: the workflow is valid YAML, and each pwbench command in it is one that pwbench takes."""

from __future__ import annotations

import re
import shlex

import click
import pytest
from click.testing import CliRunner

from pwbench import gate, results
from pwbench.cli.main import main
from tests.rows import suite_rows

yaml = pytest.importorskip("yaml")


@pytest.fixture(scope="module")
def document(repository):
    return (repository / "docs" / "ci.md").read_text()


@pytest.fixture(scope="module")
def workflow(document):
    (block,) = re.findall(r"<!-- workflow -->\n```yaml\n(.*?)```\n<!-- end -->", document, flags=re.S)
    return yaml.safe_load(block)


def commands(document, workflow):
    """Every pwbench command line of the document, as arguments."""
    steps = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    fenced = re.findall(r"^```(\w*)\n(.*?)^```", document, flags=re.S | re.M)
    lines = [*steps, *(line for kind, block in fenced if not kind for line in block.splitlines())]
    found = [shlex.split(line) for line in lines if re.match(r"(\.venv/bin/)?pwbench ", line)]
    assert len(found) >= 8
    return [words[1:] for words in found]


def test_the_workflow_has_a_cpu_and_a_gpu_tier(workflow):
    assert set(workflow["jobs"]) == {"cpu", "gpu"}
    assert workflow["jobs"]["gpu"]["runs-on"] == ["self-hosted", "gpu", "h200"]
    assert "labels" in workflow["jobs"]["gpu"]["if"]


def test_every_command_names_options_that_exist(document, workflow):
    for words in commands(document, workflow):
        command = main.get_command(click.Context(main), words[0])
        assert command is not None, words
        context = click.Context(command, info_name=words[0], **command.context_settings)
        command.make_parser(context).parse_args(list(words[1:]))  # raises on an unknown option


def test_the_gate_and_report_commands_of_the_workflow_run(
    tmp_path, monkeypatch, small_captures, document, workflow
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "captures").symlink_to(small_captures)
    (tmp_path / "README.md").write_text("No tables.\n")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "results.md").write_text("No tables.\n")
    rows = suite_rows(captures=("code-8k",), samples=200)
    results.write("results/gate-h200.parquet", rows)
    results.write("build/current.parquet", rows)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "summary.md")
    run = CliRunner().invoke
    assert run(main, ["gate", "--bless", "--why", "first"]).exit_code == 0
    ran = 0
    for words in commands(document, workflow):
        if words[0] not in ("gate", "report"):
            continue
        words = ["summary.md" if word == "$GITHUB_STEP_SUMMARY" else word for word in words]
        result = run(main, words)
        assert result.exit_code == 0, (words, result.output)
        ran += 1
    assert ran >= 6
    for made in ("build/counters.xml", "build/times.xml", "build/report.html", "summary.md"):
        assert (tmp_path / made).stat().st_size > 0


def test_every_verdict_is_explained(document):
    for verdict in (*gate.FAILING, "SAME", "FASTER", "UNSURE", "NEW"):
        assert verdict in document
