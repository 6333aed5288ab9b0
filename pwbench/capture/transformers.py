"""Source: a MiniMax-M3-architecture model run by Hugging Face transformers.

The model runs with an attention function of ours (`AttentionInterface`), which computes page-sparse
attention without dense masks and hands its inputs to a `Recorder`. The prompt is prefilled in chunks
and the indexer scores a few hundred queries at a time, so memory stays bounded at 128K tokens.
"""

from __future__ import annotations

import hashlib
import lzma
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from pwbench.capture.attention import dense_causal, page_sparse
from pwbench.capture.provenance import environment, model_facts
from pwbench.capture.recorder import Recorder, Recording, Target
from pwbench.errors import InputError
from pwbench.operator import GROUP_HEADS, HEAD_DIM, INVALID, PAGE, TOPK

HOOK = "transformers AttentionInterface"
ATTENTION_NAME = "pwbench_recording"
PREFILL_CHUNK = 2048
_INDEXER_SCORES = 1 << 26
"""Elements of one fp32 score matrix of the indexer: 256 MiB, of which it makes a few copies."""


@dataclass(frozen=True)
class Prompt:
    """A text and where it came from. ``sha256`` is over the uncompressed bytes."""

    name: str
    text: str
    sha256: str


def read_prompt(path: str | Path) -> Prompt:
    """Read a UTF-8 text file, ``.xz`` or plain.

    Raises:
        InputError: no such file, not xz, not UTF-8.
    """
    path = Path(path)
    try:
        raw = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
        text = raw.decode()
    except (OSError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise InputError(f"Prompt {path} cannot be read as UTF-8 text: {error}.") from None
    return Prompt(path.name.removesuffix(".xz").removesuffix(".txt"), text, hashlib.sha256(raw).hexdigest())


class Model:
    """A model directory loaded for recording.

    Args:
        directory: a transformers model directory with a tokenizer.
        device: ``auto`` (CUDA when there is one), ``cpu``, ``cuda``, ``cuda:N``, or ``balanced`` to
            spread the layers over all GPUs (needs accelerate).

    Raises:
        InputError: transformers is missing, the directory is not such a model, or its attention
            geometry is not the operator's.
    """

    def __init__(self, directory: str | Path, device: str = "auto") -> None:
        self.directory = Path(directory)
        if not (self.directory / "config.json").is_file():
            raise InputError(f"{directory} holds no config.json; expected a transformers model directory.")
        transformers = _import_transformers()
        placed = "cuda" if device == "auto" and torch.cuda.is_available() else device
        placed = "cpu" if placed == "auto" else placed
        try:
            config = transformers.AutoConfig.from_pretrained(self.directory, local_files_only=True)
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(self.directory, local_files_only=True)
            text_only = not hasattr(config, "vision_config")
            loader = (
                transformers.AutoModelForCausalLM if text_only else transformers.AutoModelForImageTextToText
            )
            options = {"device_map": "balanced"} if placed == "balanced" else {}
            # Its progress bar writes to stderr even when that is not a terminal.
            transformers.utils.logging.disable_progress_bar()
            model = loader.from_pretrained(self.directory, dtype="auto", local_files_only=True, **options)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise InputError(f"{directory} cannot be loaded by transformers: {_first_line(error)}") from None
        self.model = (model if placed == "balanced" else model.to(placed)).eval()
        self.config = config.get_text_config()
        self.attentions = sparse_attentions(self.model)
        _check_geometry(self.config, self.attentions, self.directory)

    @property
    def sparse_layers(self) -> list[int]:
        """Layers whose attention selects pages, ascending."""
        return sorted(self.attentions)

    @property
    def input_device(self) -> torch.device:
        return self.model.get_input_embeddings().weight.device

    def tokens(self, prompt: Prompt) -> torch.Tensor:
        """Token ids of the whole prompt, ``[n]`` int64, as the tokenizer gives them."""
        ids = self.tokenizer(prompt.text, verbose=False)["input_ids"]
        return torch.tensor(ids, dtype=torch.int64)

    def facts(self) -> dict[str, Any]:
        """Manifest entries about the model and its selector."""
        config = self.config
        return {
            "model": model_facts(self.directory, self.model),
            "selector": {
                "type": "learned",
                "topk": config.index_topk_blocks,
                "local_pages": config.index_local_blocks,
                "index_heads": config.index_n_heads,
                "index_dim": config.index_head_dim,
            },
        }


def record(
    model: Model,
    token_ids: torch.Tensor,
    targets: Iterable[Target],
    *,
    prefill_chunk: int = PREFILL_CHUNK,
    progress: Callable[[int, int], None] | None = None,
) -> dict[Target, Recording]:
    """Prefill one prompt once and record every target on the way.

    Args:
        model: the loaded model.
        token_ids: the prompt, ``[n]``; as many tokens as the longest target's context are run.
        targets: what to record. Contexts may differ: a shorter one is a prefix of a longer one.
        prefill_chunk: tokens per forward pass. Every target's context also ends a chunk.
        progress: called with (tokens done, tokens to do) after each chunk.

    Returns:
        each target's recording, in the order asked for.

    Raises:
        InputError: the prompt is shorter than a context, or a layer is not sparse.
    """
    recorder = Recorder(targets)
    wanted = recorder.targets
    if not wanted:
        raise InputError("Nothing to record: no target was given.")
    total = max(target.context for target in wanted)
    if len(token_ids) < total:
        raise InputError(f"The prompt has {len(token_ids)} tokens, expected at least the context of {total}.")
    for target in wanted:
        if target.layer not in model.attentions:
            raise InputError(
                f"Layer {target.layer} does not select pages; sparse layers are {model.sparse_layers}."
            )
    stops = sorted({*range(prefill_chunk, total, prefill_chunk), *(target.context for target in wanted)})
    with _Hooks(model, recorder):
        cache = None
        begin = 0
        for end in stops:
            ids = token_ids[None, begin:end].to(model.input_device)
            positions = torch.arange(begin, end, device=ids.device)[None]
            result = model.model(
                input_ids=ids,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            cache = result.past_key_values
            begin = end
            if progress is not None:
                progress(end, total)
    return recorder.take()


def provenance(model: Model, prompt: Prompt, token_ids: torch.Tensor, prefill_chunk: int) -> dict[str, Any]:
    """Manifest entries that every recording of one run shares."""
    transformers = _import_transformers()
    return {
        "source": {"engine": "transformers", "version": transformers.__version__, "hook": HOOK},
        **model.facts(),
        "prompt": {"name": prompt.name, "sha256": prompt.sha256, "tokens": len(token_ids)},
        "prefill_chunk": prefill_chunk,
        "env": environment(model.input_device),
    }


def capture(
    model: Model,
    prompt: Prompt,
    targets: Sequence[Target],
    *,
    prefill_chunk: int = PREFILL_CHUNK,
    progress: Callable[[int, int], None] | None = None,
) -> dict[Target, Recording]:
    """`record` a prompt and attach its provenance to every recording's ``facts``."""
    token_ids = model.tokens(prompt)
    recordings = record(model, token_ids, targets, prefill_chunk=prefill_chunk, progress=progress)
    shared = provenance(model, prompt, token_ids, prefill_chunk)
    for recording in recordings.values():
        recording.facts.update(shared)
    return recordings


def sparse_attentions(model: torch.nn.Module) -> dict[int, Any]:
    """Attention modules that own an indexer, by layer index."""
    modules: Iterable[Any] = model.modules()
    return {
        module.layer_idx: module
        for module in modules
        if getattr(module, "indexer", None) is not None and hasattr(module, "layer_idx")
    }


class _Hooks:
    """While entered, the model attends through ours and its indexers work in tiles."""

    def __init__(self, model: Model, recorder: Recorder) -> None:
        self.model = model
        self.recorder = recorder
        self.no_grad = torch.inference_mode()

    def __enter__(self) -> None:
        registry = _import_transformers().AttentionInterface
        registry.register(ATTENTION_NAME, _attention_function(self.recorder))
        self.previous = self.model.config._attn_implementation
        self.model.model.set_attn_implementation(ATTENTION_NAME)
        for attention in self.model.attentions.values():
            attention.indexer.forward = types.MethodType(_tiled_indexer, attention.indexer)
        self.no_grad.__enter__()

    def __exit__(self, *exc: Any) -> None:
        self.no_grad.__exit__(*exc)
        for attention in self.model.attentions.values():
            del attention.indexer.forward
        self.model.model.set_attn_implementation(self.previous)


def _attention_function(recorder: Recorder) -> Callable[..., tuple[torch.Tensor, None]]:
    def attend(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float,
        block_indices: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        if query.shape[0] != 1 or attention_mask is not None or position_ids is None:
            raise InputError("Recording takes one unpadded prompt at a time, with explicit positions.")
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        positions = position_ids.reshape(-1).to(q.device)
        if block_indices is None:
            return dense_causal(q, k, v, positions, scaling)[None], None
        topk = block_indices[0]
        out = page_sparse(q, k, v, topk, positions, scaling)
        begin = k.shape[0] - q.shape[0]
        recorder.record(module.layer_idx, begin, q, k, v, topk, scaling, out)
        return out[None], None

    return attend


def _tiled_indexer(
    self: Any,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    past_key_values: Any,
    position_ids: torch.Tensor,
) -> torch.Tensor:
    """The module's own forward, a few queries at a time.

    The index keys of a tile join the cache before it is scored and selection is causal by token, so
    the tiles choose exactly what one pass over the chunk would.
    """
    rows = hidden_states.shape[1]
    keys = int(position_ids.max()) + 1
    tile = max(16, min(rows, _INDEXER_SCORES // max(1, self.num_heads * keys)))
    cos, sin = position_embeddings
    tiles = []
    for begin in range(0, rows, tile):
        part = slice(begin, begin + tile)
        selected = type(self).forward(
            self,
            hidden_states[:, part],
            (cos[:, part], sin[:, part]),
            past_key_values,
            position_ids[:, part],
        )
        tiles.append(F.pad(selected, (0, self.topk_blocks - selected.shape[-1]), value=INVALID))
    return torch.cat(tiles, dim=2)


def _check_geometry(config: Any, attentions: dict[int, Any], directory: Path) -> None:
    if not attentions:
        raise InputError(
            f"{directory}: no layer of the model selects pages; expected layer_types with minimax_m3_sparse."
        )
    expected = {
        "head_dim": (config.head_dim, HEAD_DIM),
        "index_block_size": (config.index_block_size, PAGE),
        "query heads per KV head": (config.num_attention_heads / config.num_key_value_heads, GROUP_HEADS),
        "index_n_heads": (config.index_n_heads, config.num_key_value_heads),
    }
    for name, (seen, wanted) in expected.items():
        if seen != wanted:
            raise InputError(f"{directory}: {name} is {seen}, expected {wanted} for this operator.")
    if config.index_topk_blocks > TOPK:
        raise InputError(
            f"{directory}: the indexer selects {config.index_topk_blocks} pages, expected at most {TOPK}."
        )


def _import_transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise InputError(
            "This source needs transformers, which is not installed: pip install 'pwbench[transformers]'."
        ) from None
    return transformers


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0].rstrip(".") + "."
