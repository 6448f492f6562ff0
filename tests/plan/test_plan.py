"""`plan` on the published shapes, from configs alone."""

import json

import pytest
from transformers import GPT2Config, LlamaConfig, Phi3Config

from hybridize.plan import plan
from hybridize.plan.plan import LENGTHS, plan_config
from hybridize.recipe import Recipe, load_recipe


def smollm2():
    return LlamaConfig(
        hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, intermediate_size=1536,
        vocab_size=49152, tie_word_embeddings=True,
    )  # fmt: skip


def llama3_8b():
    return LlamaConfig(
        hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, intermediate_size=14336,
        vocab_size=128256, tie_word_embeddings=False,
    )  # fmt: skip


def test_llama3_8b_has_the_papers_parameter_counts():
    result = plan_config(llama3_8b(), load_recipe("lolcats-llama3-8b"))
    assert result.parameters == 8_030_261_248
    assert result.map_parameters == 16_777_216  # "16.8M" in LoLCATs, App. A.1
    transfer, finetune = result.stages
    assert transfer.trainable == 16_777_216 + 32 * 32
    assert finetune.trainable == 32 * 8 * ((4096 + 4096) + 2 * (4096 + 1024) + (4096 + 4096))
    assert finetune.trainable / result.parameters < 0.0009
    assert transfer.optimizer_steps is None and transfer.epochs == 2


def test_smollm2_tied_weights_count_once_and_steps_follow_from_tokens():
    result = plan_config(smollm2(), load_recipe("lolcats-smollm2-135m"))
    assert result.parameters == 134_515_008
    assert [stage.optimizer_steps for stage in result.stages] == [611, 611]
    assert [row.length for row in result.states] == list(LENGTHS)
    assert result.states[0].teacher == 30 * 1024 * 2 * 3 * 64 * 2
    assert len({row.student for row in result.states}) == 1


def test_memory_adds_up():
    result = plan_config(smollm2(), load_recipe("lolcats-smollm2-135m"))
    for stage in result.stages:
        memory = stage.memory
        assert memory.gradients == 4 * stage.trainable and memory.optimizer == 8 * stage.trainable
        assert memory.total == memory.weights + memory.gradients + memory.optimizer + memory.activations
    assert result.peak_memory == max(stage.memory.total for stage in result.stages)


def test_full_finetuning_and_checkpointing_move_the_memory():
    recipe = load_recipe("lolcats-smollm2-135m")
    raw = recipe.to_dict()
    raw["steps"] = [
        {"finetune": {"tokens": 1000}},
        {"finetune": {"tokens": 1000, "activation_checkpointing": True}},
        {"finetune": {"tokens": 1000, "full": True}},
        {"finetune": {"tokens": 1000, "full": True, "train_maps": True}},
    ]
    lora, checkpointed, full, everything = plan_config(smollm2(), Recipe.from_dict(raw)).stages
    assert checkpointed.memory.activations < lora.memory.activations / 5
    assert full.trainable == 134_515_008 and full.memory.optimizer == 8 * 134_515_008
    assert everything.trainable == full.trainable + 1_105_920 + 270


def test_fused_qkv_is_one_lora_target():
    config = Phi3Config(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96,
        vocab_size=128, pad_token_id=0,
    )  # fmt: skip
    raw = {
        "spec": {"all": {"attention": "softmax"}},
        "data": {"length": 32},
        "steps": [{"finetune": {"tokens": 64}}],
    }
    (stage,) = plan_config(config, Recipe.from_dict(raw)).stages
    assert stage.trainable == 2 * 8 * ((64 + 128) + (64 + 64))


def test_control_recipe_adds_nothing():
    result = plan_config(smollm2(), load_recipe("control-smollm2-135m"))
    assert result.map_parameters == result.mix_parameters == 0
    assert all(row.student == row.teacher for row in result.states)


def test_405b_is_planned_and_its_refusals_are_named():
    config = LlamaConfig(
        hidden_size=16384, num_hidden_layers=126, num_attention_heads=128, num_key_value_heads=8,
        intermediate_size=53248, vocab_size=128256, tie_word_embeddings=False,
    )  # fmt: skip
    result = plan_config(config, load_recipe("lolcats-llama3.1-405b"))
    assert result.parameters == 405_853_388_800
    assert len(result.unsupported) == 2


def test_unsupported_family_is_refused_from_its_config_folder(tmp_path):
    GPT2Config().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="gpt2"):
        plan(str(tmp_path), "lolcats-smollm2-135m")


def test_heads_that_do_not_fit_are_refused():
    raw = load_recipe("lolcats-smollm2-135m").to_dict()
    raw["spec"] = {
        "all": {"groups": [{"heads": "3/4", "attention": "softmax"}, {"heads": "1/4", "attention": "linear"}]}
    }
    with pytest.raises(ValueError, match="whole KV groups"):
        plan_config(smollm2(), Recipe.from_dict(raw))


def test_plan_of_a_folder_is_json(tmp_path):
    smollm2().save_pretrained(tmp_path)
    result = plan(str(tmp_path), "demo").to_dict()
    assert json.loads(json.dumps(result))["stages"][0]["memory"]["total"] > 0
