"""``pwbench capture``: record a call from a model, a file of tensors, or a generator."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from pwbench.cli._common import CONTEXT_SETTINGS, emit_json, handle_errors, json_option, progress
from pwbench.errors import InputError


class TokenCount(click.ParamType):
    """A number of tokens, such as 8192 or 8K."""

    name = "tokens"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        text = str(value).strip().lower()
        digits, unit = (text[:-1], 1024) if text.endswith("k") else (text, 1)
        whole = digits.isascii() and digits.isdigit() and len(digits) <= 10
        count = int(digits) * unit if whole else 0
        if not 0 < count < 1 << 31:
            self.fail(
                f"{value!r} is no number of tokens; expected one such as 8192 or 8K, below 2^31.", param, ctx
            )
        return count


TOKENS = TokenCount()
OUT = click.option("--out", type=click.Path(path_type=Path), required=True, help="Directory to create.")


@click.group(context_settings=CONTEXT_SETTINGS)
def capture() -> None:
    """Record the inputs of the operator from a model, a file or a generator.

    \b
    Example:
      pwbench capture transformers --model DIR --prompt code.txt --context 8192 --out captures/mine
      pwbench capture tensors dump.safetensors --out captures/mine/layer-3
      pwbench capture synthetic --context 65536 --queries 8192 --affinity 0.9 --out captures/mine/synthetic
    """


@capture.command(context_settings=CONTEXT_SETTINGS)
@click.option("--model", type=click.Path(path_type=Path), required=True, help="Model directory.")
@click.option("--prompt", type=click.Path(path_type=Path), required=True, help="UTF-8 text, plain or .xz.")
@click.option("--context", type=TOKENS, required=True, help="Tokens to prefill, such as 8192 or 64K.")
@click.option("--queries", type=TOKENS, help="Record the last N positions. [default: 8192 or the context]")
@click.option("--layers", default="all", show_default=True, help="Such as 1,3; all = every sparse layer.")
@click.option("--kind", type=click.Choice(["full", "tables"]), default="tables", show_default=True)
@click.option("--prefill-chunk", type=TOKENS, default=2048, show_default=True, help="Tokens per pass.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:N or balanced.")
@OUT
@json_option
@handle_errors
def transformers(
    model: Path,
    prompt: Path,
    context: int,
    queries: int | None,
    layers: str,
    kind: str,
    prefill_chunk: int,
    device: str,
    out: Path,
    as_json: bool,
) -> None:
    """Run a MiniMax-M3-architecture model over a text and record its sparse attention layers.

    One layer becomes the capture --out; several become --out/<prompt>-l<layer>.

    \b
    Example:
      pwbench capture transformers --model msa-30m --prompt code-a.txt.xz --context 8K --layers all \\
          --out captures/real-8k
    """
    from pwbench.capture import Target, write
    from pwbench.capture.transformers import Model, read_prompt
    from pwbench.capture.transformers import capture as run

    text = read_prompt(prompt)
    loaded = Model(model, device)
    chosen = _layers(layers, loaded.sparse_layers)
    targets = [Target(layer, queries or min(8192, context), context) for layer in chosen]
    paths = [out if len(targets) == 1 else out / f"{text.name}-l{t.layer}" for t in targets]
    _refuse_existing(paths)
    with progress(f"prefilling {text.name}", context) as task:
        done = 0

        def report(tokens: int, _total: int) -> None:
            nonlocal done
            task.advance(tokens - done)
            done = tokens

        recordings = run(loaded, text, targets, prefill_chunk=prefill_chunk, progress=report)
    for path, recording in zip(paths, recordings.values(), strict=True):
        write(path, recording.call, kind=kind, out_model=recording.out_model, facts=recording.facts)
    _show(paths, as_json)


@capture.command(context_settings=CONTEXT_SETTINGS)
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--softmax-scale", type=float, help="[default: the file's, or 1/sqrt(128)]")
@click.option("--layer", type=click.IntRange(min=0), help="The model's layer, for the record.")
@OUT
@json_option
@handle_errors
def tensors(file: Path, softmax_scale: float | None, layer: int | None, out: Path, as_json: bool) -> None:
    """Import one safetensors FILE with the operator's tensors, as any engine can dump them.

    \b
    Tensors: topk and seq_lens always; q, kv (or k and v) and page_table for a full capture; further
    cu_seqlens_q, positions, out_model, softmax_scale, k_scale, v_scale. Without q and kv the capture
    holds tables only.

    \b
    Example:
      pwbench capture tensors layer12.safetensors --layer 12 --out captures/mine/layer12
    """
    from pwbench.capture import write
    from pwbench.capture.tensors_file import read

    _refuse_existing([out])
    recording, kind = read(file, softmax_scale, layer)
    write(out, recording.call, kind=kind, out_model=recording.out_model, facts=recording.facts)
    _show([out], as_json)


@capture.command(context_settings=CONTEXT_SETTINGS)
@click.option("--context", type=TOKENS, required=True, help="Tokens of the request.")
@click.option("--queries", type=TOKENS, help="Query rows: the last N. [default: 8192 or the context]")
@click.option("--affinity", type=click.FloatRange(0, 1), default=0.9, show_default=True)
@click.option(
    "--pattern",
    type=click.Choice(["persistent", "random", "identical", "disjoint", "empty"]),
    default="persistent",
    show_default=True,
)
@click.option("--kv-heads", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--kind", type=click.Choice(["full", "tables"]), default="tables", show_default=True)
@OUT
@json_option
@handle_errors
def synthetic(
    context: int,
    queries: int | None,
    affinity: float,
    pattern: str,
    kv_heads: int,
    seed: int,
    kind: str,
    out: Path,
    as_json: bool,
) -> None:
    """Invent selections. The capture says so, and reports keep it apart from recorded ones.

    --affinity is the chance that a query resembles its predecessor and that a page stays selected;
    a trained selector at 64K lies near 0.9. The page a query sits in is always selected, except by the
    patterns disjoint and empty.

    \b
    Example:
      pwbench capture synthetic --context 64K --queries 8192 --affinity 0.95 --seed 1 --out captures/mine/high
    """
    from pwbench.capture import write
    from pwbench.capture.synthetic import generate

    _refuse_existing([out])
    recording = generate(
        context,
        queries or min(8192, context),
        pattern=pattern,
        affinity=affinity,
        seed=seed,
        kv_heads=kv_heads,
    )
    write(out, recording.call, kind=kind, seed=seed, facts=recording.facts)
    _show([out], as_json)


def _layers(text: str, sparse: Sequence[int]) -> list[int]:
    if text == "all":
        return list(sparse)
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() for part in parts):
        raise InputError(f"--layers is {text!r}, expected layer numbers such as 1,3, or all.")
    chosen = list(dict.fromkeys(int(part) for part in parts))
    for layer in chosen:
        if layer not in sparse:
            raise InputError(f"Layer {layer} does not select pages; sparse layers are {list(sparse)}.")
    return chosen


def _refuse_existing(paths: Sequence[Path]) -> None:
    """Say it before minutes of work, not after."""
    for path in paths:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise InputError(f"{path} already exists; choose another --out or remove it first.")


def _show(paths: Sequence[Path], as_json: bool) -> None:
    from pwbench.capture import load

    rows = []
    for path in paths:
        made = load(path)
        geometry = made.manifest["geometry"]
        rows.append(
            {
                "path": str(path),
                "kind": made.kind,
                "synthetic": made.synthetic,
                "layer": made.manifest["layer"],
                "queries": geometry["total_q"],
                "context": geometry["context"],
                "union8_mean": made.manifest["stats"]["union_mean"]["8"],
                "bytes": sum(entry["bytes"] for entry in made.manifest["files"]),
                "tables_sha256": made.tables_sha256,
            }
        )
    if as_json:
        emit_json({"captures": rows})
        return
    for row in rows:
        label = ", synthetic" if row["synthetic"] else ""
        click.echo(
            f"{row['path']}: {row['kind']}{label}, {row['queries']} queries of {row['context']} tokens, "
            f"mean union of 8 = {row['union8_mean']:.1f} pages, {row['bytes'] / 1e3:.0f} kB"
        )
