"""``pwbench inspect``: a capture's geometry, provenance and union sizes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pwbench.cli._common import CONTEXT_SETTINGS, emit_json, handle_errors, json_option

if TYPE_CHECKING:
    import numpy as np

    from pwbench.capture import Capture

GROUPS = (2, 4, 8, 16, 32)
BAR = 44


@click.command(context_settings=CONTEXT_SETTINGS)
@click.argument("capture", type=click.Path(path_type=Path))
@click.option(
    "--window",
    type=click.IntRange(min=1),
    default=128,
    show_default=True,
    help="Rows that one regroup search sees.",
)
@json_option
@handle_errors
def inspect(capture: Path, window: int, as_json: bool) -> None:
    """Show what CAPTURE holds: geometry, who made it, and how far neighbouring queries agree.

    U_g is the number of distinct pages that g queries need together: once in the original order, once in
    the order that regrouping (groups of 8) finds.

    \b
    Example:
      pwbench inspect captures/real-8k/code-a-l3
    """
    from pwbench.capture import load
    from pwbench.capture.statistics import summary, union_sizes
    from pwbench.grouping import regroup

    loaded = load(capture)
    tables = loaded.tables
    order = regroup(tables.pages, tables.cu_seqlens_q, window=window, group=8)
    unions = {
        str(group): {
            "original": summary(union_sizes(tables, group)),
            "regrouped": summary(union_sizes(tables, group, order)),
        }
        for group in GROUPS
    }
    if as_json:
        manifest = {k: v for k, v in loaded.manifest.items() if k != "files"}
        emit_json({"path": str(capture), **manifest, "window": window, "unions": unions})
        return
    _print_facts(loaded)
    _print_unions(unions, window)
    _print_histogram(union_sizes(tables, 8), union_sizes(tables, 8, order))


def _print_facts(loaded: Capture) -> None:
    manifest = loaded.manifest
    geometry, env = manifest["geometry"], manifest.get("env") or {}
    source, model = manifest.get("source") or {}, manifest.get("model") or {}
    prompts = manifest.get("prompt") or {}
    prompts = [p for p in (prompts if isinstance(prompts, list) else [prompts]) if isinstance(p, dict)]
    kind = (
        f"{loaded.kind} ("
        + ("tensors stored" if loaded.kind == "full" else "Q and KV seeded at replay")
        + ")"
    )
    counts = loaded.tables.counts
    lines: dict[str, Any] = {
        "capture": f"{loaded.suite}/{loaded.name}, {kind}",
        "synthetic": _pairs(manifest["synthetic"]) if loaded.synthetic else None,
        "geometry": f"{geometry['total_q']} queries of {geometry['requests']} request(s), context up to "
        f"{geometry['context']}, {geometry['q_heads']} query heads on {geometry['kv_heads']} KV head(s)",
        "selections": f"{counts.sum()} pages, {counts.mean():.1f} a query, {(counts == 0).sum()} rows empty",
        "layer": manifest.get("layer"),
        "source": " ".join(str(source[k]) for k in ("engine", "version", "hook") if source.get(k)),
        "model": _model(model),
        "weights": next((str(v)[:16] for k, v in model.items() if k.startswith("weights_")), None),
        "prompt": ", ".join(f"{p['name']} ({str(p.get('sha256'))[:12]})" for p in prompts if "name" in p)
        or None,
        "made": f"{manifest.get('created_utc')} on {env.get('gpu') or env.get('device')}, "
        f"torch {env.get('torch')}",
        "scales": f"k {manifest['quant']['k_scale']:g}, v {manifest['quant']['v_scale']:g}, softmax "
        f"{manifest['softmax_scale']:g} ({manifest['quant'].get('convention')})",
        "tables": loaded.tables_sha256[:16],
    }
    for name, value in lines.items():
        if value is not None:
            click.echo(f"{name:12} {value}")


def _model(model: dict[str, Any]) -> str | None:
    if not model:
        return None
    size = model.get("parameters")
    millions = f"{size / 1e6:.1f} M parameters" if isinstance(size, int | float) else "size unknown"
    return f"{model.get('name', 'unnamed')} ({model.get('architecture', 'unknown')}, {millions})"


def _print_unions(unions: dict[str, Any], window: int) -> None:
    click.echo(f"\npages that a group needs together (regrouped: window {window}, groups of 8)")
    head = f"{'mean':>7} {'p10':>6} {'p50':>6} {'p90':>6}"
    click.echo(f"{'group':>6}   original {head[8:]}   regrouped {head[9:]}     cut")
    for group, both in unions.items():
        cells = "   ".join(
            f"{s['mean']:8.1f} {s['p10']:6.0f} {s['p50']:6.0f} {s['p90']:6.0f}" for s in both.values()
        )
        before, after = both["original"]["mean"], both["regrouped"]["mean"]
        cut = 100 * (1 - after / before) if before else 0.0
        click.echo(f"{group:>6} {cells} {cut:6.1f} %")


def _print_histogram(original: np.ndarray, regrouped: np.ndarray) -> None:
    import numpy as np

    low, high = (int(f(np.concatenate([original, regrouped]))) for f in (np.min, np.max))
    edges = np.unique(np.linspace(low, high + 1, min(high - low + 1, 16) + 1).astype(int))
    before, after = (np.histogram(sizes, edges)[0] for sizes in (original, regrouped))
    most = max(int(before.max()), int(after.max()), 1)
    click.echo("\ngroups of 8 by pages needed (█ original, ░ regrouped)")
    for index, (first, last) in enumerate(zip(edges, edges[1:] - 1, strict=False)):
        label = f"{first}" if first == last else f"{first}-{last}"
        for mark, count in (("█", int(before[index])), ("░", int(after[index]))):
            bar = mark * max(round(BAR * count / most), 1 if count else 0)
            click.echo(f"{label if mark == '█' else '':>9} {bar} {count}")


def _pairs(facts: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in facts.items() if value is not None)
