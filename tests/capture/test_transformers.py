"""A tiny random MiniMax-M3 model through the recorder."""

import json

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers")

from pwbench import reference  # noqa: E402
from pwbench.capture import Recorder, Target, failures, load, verify, write  # noqa: E402
from pwbench.capture import transformers as source  # noqa: E402
from pwbench.errors import InputError  # noqa: E402

CONTEXT = 900
TINY = {
    "vocab_size": 256,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "index_n_heads": 1,
    "index_head_dim": 128,
    "index_block_size": 128,
    "index_topk_blocks": 4,
    "index_local_blocks": 1,
    "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
    "mlp_layer_types": ["dense"] * 3,
    "dense_intermediate_size": 128,
    "intermediate_size": 128,
    "shared_intermediate_size": 128,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "max_position_embeddings": 8192,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
}


def save_model(directory, dtype=torch.float32, **changes):
    """A random model with a tokenizer that gives one token per character."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    torch.manual_seed(0)
    config = transformers.models.minimax_m3_vl.MiniMaxM3VLTextConfig(**(TINY | changes))
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            # Larger weights than the initialiser's make attention choose instead of averaging.
            if parameter.dim() == 2:
                parameter.normal_(0.0, 0.08)
    model.save_pretrained(directory)
    tokenizer = Tokenizer(models.WordLevel({chr(i): i for i in range(256)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def model(directory):
    return source.Model(directory, "cpu")


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(2, 256, (CONTEXT,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def recordings(model, tokens):
    """One run: two layers, two chunk lengths that several prefill chunks make up, and a shorter context."""
    targets = [Target(1, 400, CONTEXT), Target(2, 400, CONTEXT), Target(2, 64, CONTEXT), Target(1, 300, 500)]
    return source.record(model, tokens, targets, prefill_chunk=256)


def dense_check(model, tokens, layer):
    """The unmodified model's input to o_proj at ``layer``, from transformers' own eager attention."""
    seen = {}
    handle = model.attentions[layer].o_proj.register_forward_pre_hook(
        lambda _m, inputs: seen.update(out=inputs[0][0].view(-1, 16, 128))
    )
    model.model.set_attn_implementation("eager")
    with torch.inference_mode():
        model.model(input_ids=tokens[None], use_cache=True, logits_to_keep=1)
    handle.remove()
    return seen["out"]


def test_outputs_are_those_of_the_unmodified_model(model, tokens, recordings):
    """fp32, so no rounding decides a near-tied page: chunking, tiles and our attention change nothing."""
    for target, recording in recordings.items():
        if target.queries == 64 or target.context < CONTEXT:
            continue
        want = dense_check(model, tokens[: target.context], target.layer)[target.begin :]
        accuracy = reference.compare(recording.out_model.float(), want.float())
        # out_model is stored as bfloat16: half a unit in the last of 8 bits.
        assert accuracy.rel_l2 < 3e-3, target


def test_outputs_agree_with_the_reference_recomputed_from_what_was_recorded(recordings):
    for target, recording in recordings.items():
        rows = np.linspace(0, target.queries - 1, 24).astype(int)
        ref = reference.attend(recording.call, rows)
        accuracy = reference.compare(recording.out_model[torch.from_numpy(rows)].float(), ref.float())
        assert 0 < accuracy.rel_l2 < 0.06, (target, accuracy)


def test_chunks_are_joined_in_order(recordings):
    long = recordings[Target(2, 400, CONTEXT)].call
    short = recordings[Target(2, 64, CONTEXT)].call
    assert long.positions.tolist() == list(range(CONTEXT - 400, CONTEXT))
    assert torch.equal(long.q[-64:], short.q)
    assert torch.equal(long.topk[:, -64:], short.topk)
    assert torch.equal(long.kv.view(torch.uint8), short.kv.view(torch.uint8))


def test_a_shorter_context_is_a_prefix_of_a_longer_one(model, tokens, recordings):
    alone = source.record(model, tokens, [Target(1, 300, 500)], prefill_chunk=256)
    a, b = alone[Target(1, 300, 500)].call, recordings[Target(1, 300, 500)].call
    assert torch.equal(a.topk, b.topk)
    assert a.seq_lens.tolist() == b.seq_lens.tolist() == [500]
    assert torch.equal(a.kv.view(torch.uint8), b.kv.view(torch.uint8))


def test_every_row_selects_the_page_it_sits_in(recordings):
    for recording in recordings.values():
        call = recording.call
        assert (call.topk[0] == call.positions[:, None] // 128).any(dim=1).all()


def test_the_indexer_in_tiles_selects_the_same_pages(model, tokens, recordings, monkeypatch):
    monkeypatch.setattr(source, "_INDEXER_SCORES", 16 * CONTEXT)
    tiled = source.record(model, tokens, [Target(1, 400, CONTEXT)], prefill_chunk=256)
    ours, plain = (r[Target(1, 400, CONTEXT)].call.topk.sort(-1).values for r in (tiled, recordings))
    assert torch.equal(ours, plain)


def test_the_model_is_left_as_it_was(model, tokens, recordings):
    assert model.config._attn_implementation != source.ATTENTION_NAME
    assert all("forward" not in vars(a.indexer) for a in model.attentions.values())


def test_a_capture_says_which_model_text_and_run_it_is(model, tmp_path):
    text = "".join(chr(c) for c in range(40, 120)) * 4
    (tmp_path / "abc.txt").write_text(text)
    prompt = source.read_prompt(tmp_path / "abc.txt")
    (recording,) = source.capture(model, prompt, [Target(1, 100, 300)], prefill_chunk=128).values()
    path = write(tmp_path / "one", recording.call, out_model=recording.out_model, facts=recording.facts)
    assert failures(verify(path)) is None
    manifest = load(path).manifest
    assert manifest["model"]["name"] == "tiny"
    assert len(manifest["model"]["weights_sha256"]) == 64
    assert manifest["model"]["config"]["index_topk_blocks"] == 4
    assert manifest["prompt"] == {"name": "abc", "sha256": prompt.sha256, "tokens": 320}
    assert manifest["chunk"] == {"begin": 200, "queries": 100, "context": 300}
    assert manifest["source"]["hook"] == source.HOOK
    assert manifest["selector"]["local_pages"] == 1
    assert manifest["quant"]["who"] == "pwbench"


def test_xz_and_plain_prompts_are_the_same_prompt(tmp_path):
    import lzma

    (tmp_path / "a.txt").write_text("héllo")
    (tmp_path / "a.txt.xz").write_bytes(lzma.compress("héllo".encode()))
    assert source.read_prompt(tmp_path / "a.txt") == source.read_prompt(tmp_path / "a.txt.xz")


@pytest.mark.parametrize("content", [None, b"\xff\xfe\xfa", b"not xz"])
def test_a_prompt_that_cannot_be_read_is_refused(tmp_path, content):
    path = tmp_path / ("a.txt.xz" if content == b"not xz" else "a.txt")
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match="cannot be read as UTF-8"):
        source.read_prompt(path)


def test_impossible_targets_are_refused(model, tokens):
    with pytest.raises(InputError, match="Layer 0 does not select pages; sparse layers are"):
        source.record(model, tokens, [Target(0, 10, 100)])
    with pytest.raises(InputError, match="900 tokens, expected at least the context of 4000"):
        source.record(model, tokens, [Target(1, 10, 4000)])
    with pytest.raises(InputError, match="no target"):
        source.record(model, tokens, [])
    with pytest.raises(InputError, match="asks for 200 queries of a context of 100"):
        Recorder([Target(1, 200, 100)])


def test_directories_that_are_no_model_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"no config\.json"):
        source.Model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no-such-model"}))
    with pytest.raises(InputError, match="cannot be loaded by transformers"):
        source.Model(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention"] * 3}, "no layer of the model selects pages"),
        ({"num_attention_heads": 8}, "query heads per KV head is 8"),
        ({"index_block_size": 64}, "index_block_size is 64, expected 128"),
        ({"index_topk_blocks": 32}, "selects 32 pages, expected at most 16"),
    ],
)
def test_another_attention_geometry_is_refused(tmp_path, changes, message):
    with pytest.raises(InputError, match=message):
        source.Model(save_model(tmp_path / "m", **changes), "cpu")
