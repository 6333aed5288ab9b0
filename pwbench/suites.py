"""The standard suites: what they hold and why, and how to make them from a model and its prompts.

``captures/suites.toml`` is the one definition. Making needs one model run per prompt: a shorter
context is a prefix of a longer one, and one pass records any number of layers and chunk lengths.

A capture's tables must not depend on what else is recorded with it, or their hashes would prove nothing.
In bf16 another cut of the prefill rounds near-tied choices differently, so the prefill's chunk is part of
the definition, and a context that would cut one of its chunks has a run of its own.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pwbench.capture import Tables, discover, load, write
from pwbench.capture.combine import combine
from pwbench.capture.recorder import Recording, Target
from pwbench.capture.statistics import union_sizes
from pwbench.errors import InputError

if TYPE_CHECKING:
    from pwbench.capture.transformers import Model

DEFINITIONS = Path("captures") / "suites.toml"
Progress = Callable[[str, int, int], None]
Recordings = dict[tuple[str, int, Target], Recording]
"""Of each (prompt, prefill chunk, target)."""


@dataclass(frozen=True)
class Request:
    """The last ``queries`` positions of the first ``context`` tokens of a prompt."""

    prompt: str
    context: int
    queries: int


@dataclass(frozen=True)
class CaptureSpec:
    """One capture of a suite: recorded (``layer``, ``requests``) or invented (``synthetic``).

    ``prefill_chunk``: tokens of the model's forward passes.
    """

    suite: str
    name: str
    reason: str
    layer: int | None = None
    requests: tuple[Request, ...] = ()
    synthetic: Mapping[str, Any] | None = None
    kind: str = "tables"
    prefill_chunk: int = 2048

    @property
    def targets(self) -> list[tuple[str, Target]]:
        """(prompt, target) of each request."""
        if self.layer is None:
            return []
        return [(r.prompt, Target(self.layer, r.queries, r.context)) for r in self.requests]


@dataclass(frozen=True)
class Suite:
    """A named set of captures and the question it answers."""

    name: str
    purpose: str
    captures: tuple[CaptureSpec, ...] = field(default_factory=tuple)


@dataclass(frozen=True)
class Made:
    """What became of one capture.

    Attributes:
        path: where it is.
        state: ``written``, ``kept`` (an equal one was there) or ``differs`` (one with other tables was
            there and stays). An equal one that declares another generator of seeded tensors is written anew.
        rows: (kv_head, query) rows it has.
        differing_rows: rows whose support differs from the stored capture compared with; None when
            nothing was compared.
    """

    path: Path
    state: str
    rows: int
    differing_rows: int | None


def load_suites(path: str | Path = DEFINITIONS) -> dict[str, Suite]:
    """Read the definitions.

    Raises:
        InputError: the file is missing, is not TOML, or an entry lacks something.
    """
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"Suite definitions {path} cannot be read: {error.strerror}. Run in a checkout, or name the file "
            "with --definitions."
        ) from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not TOML: {error}.") from None
    suites = document.get("suites", {})
    for name, body in suites.items() if isinstance(suites, dict) else [("suites", suites)]:
        entries = body.get("captures", []) if isinstance(body, dict) else None
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise InputError(f"{path}: suite {name!r} should be a table with an array of tables `captures`.")
    return {name: _suite(path, name, body) for name, body in suites.items()}


def _suite(path: str | Path, name: str, body: Mapping[str, Any]) -> Suite:
    specs = []
    for entry in body.get("captures", []):
        where = f"{path}: capture {entry.get('name', '?')!r} of suite {name!r}"
        if not entry.get("name") or not entry.get("reason"):
            raise InputError(f"{where} needs a name and a reason.")
        synthetic = entry.get("synthetic")
        raw = [] if synthetic else entry.get("requests", [entry])
        try:
            requests = tuple(
                Request(r["prompt"], int(r["context"]), int(r.get("queries", body.get("queries", 0))))
                for r in raw
            )
            layer = None if synthetic else int(entry["layer"])
        except KeyError as error:
            raise InputError(f"{where} needs {error.args[0]!r}.") from None
        except (TypeError, ValueError) as error:
            raise InputError(f"{where} holds what is no number: {error}.") from None
        if synthetic is not None and not isinstance(synthetic, dict):
            raise InputError(f"{where}: synthetic is {synthetic!r}, expected a table.")
        for request in requests:
            if not 0 < request.queries <= request.context:
                raise InputError(f"{where}: queries is {request.queries}, expected 1 to {request.context}.")
        specs.append(
            CaptureSpec(
                suite=name,
                name=entry["name"],
                reason=entry["reason"],
                layer=layer,
                requests=requests,
                synthetic=synthetic,
                kind=entry.get("kind", "tables"),
                prefill_chunk=_prefill_chunk(path, name, body),
            )
        )
    names = [spec.name for spec in specs]
    if len(set(names)) != len(names):
        raise InputError(f"{path}: suite {name!r} names a capture twice.")
    return Suite(name, body.get("purpose", ""), tuple(specs))


def _prefill_chunk(path: str | Path, name: str, body: Mapping[str, Any]) -> int:
    value = body.get("prefill_chunk", CaptureSpec.prefill_chunk)
    if type(value) is not int or value < 1:
        raise InputError(f"{path}: prefill_chunk of suite {name!r} is {value!r}, expected a token count.")
    return value


def runs(specs: Iterable[CaptureSpec]) -> list[tuple[str, int, list[Target]]]:
    """Model runs that the recorded captures need: (prompt, prefill chunk, targets), each target once.

    Contexts that are whole chunks share one run of a prompt; each other context has one of its own, since
    its end cuts a chunk that longer contexts have whole.
    """
    found: dict[tuple[str, int, int], dict[Target, None]] = {}
    for spec in specs:
        for prompt, target in spec.targets:
            ragged = target.context if target.context % spec.prefill_chunk else 0
            found.setdefault((prompt, spec.prefill_chunk, ragged), {})[target] = None
    return [(prompt, chunk, list(targets)) for (prompt, chunk, _), targets in found.items()]


def make(
    specs: Sequence[CaptureSpec],
    out: str | Path,
    *,
    model: Model | None = None,
    prompts: str | Path | None = None,
    kind: str | None = None,
    full_out: str | Path | None = None,
    full_suites: Collection[str] | None = None,
    against: str | Path | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> list[Made]:
    """Make captures; those already there with equal tables are kept.

    Args:
        specs: which.
        out: each goes to ``out/<suite>/<name>``.
        model, prompts: the loaded model and the folder of ``<prompt>.txt[.xz]``; needed for recorded ones.
        kind: ``full`` or ``tables`` for all, None for what each definition says.
        full_out: also write each as ``full`` below this folder, from the same run.
        full_suites: of these suites only; None for all.
        against: compare tables with the captures stored below this folder; None compares with ``out``.
        overwrite: replace captures whose tables differ.
        progress: called with (prompt, tokens done, tokens to do).

    Raises:
        InputError: a prompt or the model is missing.
    """
    recordings = _run(specs, model, prompts, progress)
    made = []
    for spec in specs:
        recording = _recording(spec, recordings)
        recording.facts["suite"] = {"name": spec.suite, "reason": spec.reason}
        if full_out is not None and (full_suites is None or spec.suite in full_suites):
            _put(Path(full_out) / spec.suite / spec.name, recording, "full", True, None)
        stored = None if against is None else Path(against) / spec.suite / spec.name
        made.append(_put(Path(out) / spec.suite / spec.name, recording, kind or spec.kind, overwrite, stored))
    return made


@dataclass(frozen=True)
class Compared:
    """One capture below a folder beside its namesake below another: ``differing_rows`` of ``rows`` rows
    differ; None where there is no namesake."""

    name: str
    rows: int
    differing_rows: int | None


def compare(folder: str | Path, against: str | Path) -> list[Compared]:
    """Whether the captures below ``folder`` hold the selections of their namesakes below ``against``.

    Raises:
        CaptureError: one cannot be read.
    """
    found = []
    for path in discover([folder]):
        one = load(path)
        other = Path(against) / one.suite / one.name
        differ = None
        if (other / "manifest.json").is_file():
            differ = differing_rows(one.tables, load(other).tables)
        found.append(Compared(f"{one.suite}/{one.name}", int(one.tables.counts.size), differ))
    return found


def differing_rows(left: Tables, right: Tables) -> int:
    """(kv_head, query) rows whose supports differ; all rows when the geometry differs."""
    same_shape = left.pages.shape == right.pages.shape
    geometry = ("positions", "cu_seqlens_q", "seq_lens", "page_table")
    if not same_shape or not all(np.array_equal(getattr(left, n), getattr(right, n)) for n in geometry):
        return int(left.counts.size)
    return int((left.pages != right.pages).any(axis=-1).sum())


def survey(
    model: Model,
    prompts: str | Path,
    names: Sequence[str],
    contexts: Sequence[int],
    queries: int,
    *,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Union sizes of every (prompt, context, layer), from which a suite's layers are chosen.

    Returns:
        rows ``prompt, context, layer, queries, u4, u8, quantile``: mean union of 4 and 8 neighbouring
        queries, and the share of this context's rows whose u8 is smaller (0 = highest affinity).
    """
    rows: list[dict[str, Any]] = []
    for name in names:
        targets = [Target(la, min(queries, c), c) for c in contexts for la in model.sparse_layers]
        found = _run_prompt(model, prompts, name, targets, progress)
        for target, recording in found.items():
            tables = Tables.of_call(recording.call)
            u4, u8 = (float(union_sizes(tables, g).mean()) for g in (4, 8))
            rows.append(
                {
                    "prompt": name,
                    "context": target.context,
                    "layer": target.layer,
                    "queries": target.queries,
                    "u4": u4,
                    "u8": u8,
                }
            )
    for row in rows:
        peers = [other["u8"] for other in rows if other["context"] == row["context"]]
        row["quantile"] = sum(u < row["u8"] for u in peers) / max(len(peers) - 1, 1)
    return sorted(rows, key=lambda row: (row["context"], row["u8"]))


def _run(
    specs: Sequence[CaptureSpec],
    model: Model | None,
    prompts: str | Path | None,
    progress: Progress | None,
) -> Recordings:
    wanted = runs(specs)
    if wanted and (model is None or prompts is None):
        names = dict.fromkeys(prompt for prompt, _, _ in wanted)
        raise InputError(f"Suites made from {', '.join(names)} need --model and --prompts.")
    recordings: Recordings = {}
    for prompt, chunk, targets in wanted:
        assert model is not None and prompts is not None
        for target, recording in _run_prompt(model, prompts, prompt, targets, progress, chunk).items():
            recordings[prompt, chunk, target] = recording
    return recordings


def _run_prompt(
    model: Model,
    prompts: str | Path,
    name: str,
    targets: Sequence[Target],
    progress: Progress | None,
    prefill_chunk: int = CaptureSpec.prefill_chunk,
) -> dict[Target, Recording]:
    from pwbench.capture.transformers import capture, read_prompt

    report = None if progress is None else lambda done, total: progress(name, done, total)
    prompt = read_prompt(find_prompt(prompts, name))
    return capture(model, prompt, targets, prefill_chunk=prefill_chunk, progress=report)


def find_prompt(folder: str | Path, name: str) -> Path:
    """``folder/<name>.txt.xz`` or ``.txt``.

    Raises:
        InputError: neither is there.
    """
    for suffix in (".txt.xz", ".txt"):
        path = Path(folder) / f"{name}{suffix}"
        if path.is_file():
            return path
    raise InputError(f"{folder} holds no {name}.txt.xz and no {name}.txt, which a suite is made from.")


def _recording(spec: CaptureSpec, recordings: Recordings) -> Recording:
    if spec.synthetic is not None:
        from pwbench.capture.synthetic import generate, generate_batch

        try:
            return (generate_batch if "requests" in spec.synthetic else generate)(**spec.synthetic)
        except TypeError as error:
            where = f"Capture {spec.name!r} of suite {spec.suite!r}"
            raise InputError(f"{where} cannot be generated: {error}; compare its synthetic table.") from None
    parts = [recordings[prompt, spec.prefill_chunk, target] for prompt, target in spec.targets]
    if len(parts) > 1:
        # Engines hand out cache pages in no order; one request alone would hide what that costs.
        return combine(parts, placement_seed=1)
    return Recording(parts[0].call, parts[0].out_model, dict(parts[0].facts))


def _put(path: Path, recording: Recording, kind: str, overwrite: bool, stored: Path | None) -> Made:
    tables = Tables.of_call(recording.call)
    rows = int(tables.counts.size)
    compared = stored if stored is not None else path
    differ = differing_rows(load(compared).tables, tables) if (compared / "manifest.json").is_file() else None
    if path.exists():
        here = load(path)
        same = here.kind == kind and here.tables_sha256 == tables.sha256()
        if same and (here.replayable or kind == "full"):
            return Made(path, "kept", rows, differ)
        if not same and not overwrite:
            return Made(path, "differs", rows, differ)
        # Equal tables with seeded tensors of an older generator are written anew: the selections stay.
        overwrite = True
    write(
        path,
        recording.call,
        kind=kind,
        out_model=recording.out_model,
        facts=recording.facts,
        overwrite=overwrite,
    )
    return Made(path, "written", rows, differ)
