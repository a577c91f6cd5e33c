"""What the models are that parity with transformers is shown on: the fields of their configurations."""

from __future__ import annotations

from typing import Any

SHAPE: dict[str, Any] = dict(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=56,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    bos_token_id=1,
    eos_token_id=None,
    pad_token_id=0,
)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=500000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=64)
MIXED = ["sliding_attention", "full_attention"]
VISION: dict[str, Any] = dict(
    hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
)
QWEN_VISION: dict[str, Any] = dict(depth=1, hidden_size=16, intermediate_size=24, patch_size=2, spatial_merge_size=1)
QWEN3_VISION: dict[str, Any] = dict(
    QWEN_VISION, num_heads=2, out_hidden_size=32, num_position_embeddings=4, deepstack_visual_indexes=[0]
)
MROPE: dict[str, Any] = dict(rope_type="default", rope_theta=50000.0, mrope_interleaved=True)
LATENT: dict[str, Any] = dict(
    num_key_value_heads=4,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=6,
    first_k_dense_replace=1,
    n_routed_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=16,
    rope_parameters=dict(YARN, mscale=1.0, mscale_all_dim=1.0),
)
GLM_EOS = [151329, 151336, 151338]  # which transformers puts where a configuration has none
#: Configurations whose name is not that of the architecture.
CONFIGS = {"Gemma3": "Gemma3TextConfig"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", dict(tie_word_embeddings=True)),
    "llama-mha-wide-heads": ("Llama", dict(num_key_value_heads=4, head_dim=12, rms_norm_eps=1e-3)),
    "llama-llama3-rope": ("Llama", dict(rope_parameters=LLAMA3)),
    "llama-linear-rope": (
        "Llama",
        dict(rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=4.0)),
    ),
    "llama-biases": ("Llama", dict(attention_bias=True, mlp_bias=True)),
    "qwen2": ("Qwen2", {}),
    "qwen2-tied": ("Qwen2", dict(tie_word_embeddings=True)),
    "qwen3": ("Qwen3", dict(head_dim=16)),
    "qwen3-biases": ("Qwen3", dict(head_dim=8, attention_bias=True)),
    "qwen3-window": (
        "Qwen3",
        dict(head_dim=16, use_sliding_window=True, sliding_window=11, max_window_layers=1),
    ),
    "llama-yarn": ("Llama", dict(rope_parameters=dict(YARN, beta_fast=16.0))),
    "llama-yarn-mscale": (
        "Llama",
        dict(rope_parameters=dict(YARN, mscale=0.8, mscale_all_dim=0.5, truncate=False)),
    ),
    "llama-dynamic": ("Llama", dict(rope_parameters=dict(rope_type="dynamic", rope_theta=10000.0, factor=4.0))),
    "mistral-window": ("Mistral", dict(sliding_window=13)),
    "ministral": ("Ministral", dict(sliding_window=9, layer_types=MIXED, head_dim=12)),
    "smollm3": ("SmolLM3", dict(num_hidden_layers=3, no_rope_layers=[1, 0, 1], tie_word_embeddings=False)),
    "olmo2": ("Olmo2", {}),
    "olmo3": (
        "Olmo3",
        dict(
            sliding_window=9,
            layer_types=MIXED,
            rope_parameters=dict(full_attention=YARN, sliding_attention=dict(rope_type="default", rope_theta=10000.0)),
        ),
    ),
    "granite": (
        "Granite",
        dict(embedding_multiplier=3.0, attention_multiplier=0.4, residual_multiplier=0.7, logits_scaling=1.5),
    ),
    "phi3": ("Phi3", dict(sliding_window=17, original_max_position_embeddings=256)),
    "phi3-longrope": (
        "Phi3",
        dict(
            original_max_position_embeddings=10,
            rope_parameters=dict(
                original_max_position_embeddings=10,
                rope_type="longrope",
                rope_theta=10000.0,
                partial_rotary_factor=0.5,
                short_factor=[1.0, 1.5],
                long_factor=[1.1, 4.0],
            ),
        ),
    ),
    "phi3-longrope-short": (
        "Phi3",
        dict(
            original_max_position_embeddings=256,
            rope_parameters=dict(
                original_max_position_embeddings=256,
                rope_type="longrope",
                rope_theta=10000.0,
                partial_rotary_factor=0.75,
                short_factor=[1.0, 1.5, 2.0],
                long_factor=[1.1, 4.0, 8.0],
            ),
        ),
    ),
    "glm": ("Glm", dict(head_dim=8, eos_token_id=GLM_EOS)),
    "glm4": ("Glm4", dict(head_dim=12, attention_bias=True, eos_token_id=GLM_EOS)),
    "mixtral": ("Mixtral", dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=19)),
    "qwen2-moe": (
        "Qwen2Moe",
        dict(
            num_experts=6,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=40,
            num_hidden_layers=3,
            decoder_sparse_step=2,
            norm_topk_prob=False,
        ),
    ),
    "qwen2-moe-dense-first": (
        "Qwen2Moe",
        dict(
            num_experts=5,
            num_experts_per_tok=3,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=40,
            mlp_only_layers=[0],
            norm_topk_prob=True,
            use_sliding_window=True,
            sliding_window=11,
            max_window_layers=2,
        ),
    ),
    "qwen3-moe": (
        "Qwen3Moe",
        dict(num_local_experts=8, num_experts_per_tok=3, moe_intermediate_size=16, head_dim=16, norm_topk_prob=True),
    ),
    "gpt-oss": (
        "GptOss",
        dict(
            num_local_experts=5,
            num_experts_per_tok=2,
            head_dim=16,
            sliding_window=9,
            rope_parameters=dict(YARN, beta_fast=32.0, truncate=False),
        ),
    ),
    "mistral3-images": (
        "Mistral3",
        dict(
            text_config=dict(model_type="mistral", head_dim=12, sliding_window=None),
            vision_config=dict(VISION, model_type="pixtral", head_dim=8),
            tie_word_embeddings=False,
        ),
    ),
    "gemma3-images": (
        "Gemma3",
        dict(
            text_config=dict(
                num_hidden_layers=3,
                head_dim=12,
                sliding_window=9,
                query_pre_attn_scalar=20,
                layer_types=[MIXED[0], *MIXED],
            ),
            vision_config=VISION,
            mm_tokens_per_image=4,
            tie_word_embeddings=False,
        ),
    ),
    "qwen2.5-vl": (
        "Qwen2_5_VL",
        dict(
            text_config=dict(rope_parameters=dict(rope_type="default", rope_theta=5e4, mrope_section=[1, 2, 1])),
            vision_config=dict(QWEN_VISION, num_heads=2, fullatt_block_indexes=[0], out_hidden_size=32),
            tie_word_embeddings=False,
        ),
    ),
    "qwen3-vl": (
        "Qwen3VL",
        dict(
            text_config=dict(head_dim=12, rope_parameters=dict(MROPE, mrope_section=[2, 2, 2])),
            vision_config=QWEN3_VISION,
            tie_word_embeddings=False,
        ),
    ),
    "qwen3-vl-moe": (
        "Qwen3VLMoe",
        dict(
            text_config=dict(
                head_dim=12,
                num_local_experts=8,
                num_experts_per_tok=3,
                moe_intermediate_size=12,
                rope_parameters=dict(MROPE, mrope_section=[2, 2, 2]),
                tie_word_embeddings=False,
            ),
            vision_config=QWEN3_VISION,
            tie_word_embeddings=False,
        ),
    ),
    "deepseek-v2": (
        "DeepseekV2",
        dict(LATENT, q_lora_rank=None, rope_parameters=dict(YARN, mscale=0.7, mscale_all_dim=0.7)),
    ),
    "deepseek-v2-groups": (
        "DeepseekV2",
        dict(
            LATENT,
            q_lora_rank=24,
            n_shared_experts=1,
            first_k_dense_replace=0,
            n_group=4,
            topk_group=2,
            topk_method="group_limited_greedy",
            routed_scaling_factor=3.0,
        ),
    ),
    "deepseek-v3": ("DeepseekV3", dict(LATENT, q_lora_rank=24, n_group=4, topk_group=2)),
    "deepseek-v3-halves": (
        "DeepseekV3",
        dict(
            LATENT,
            q_lora_rank=None,
            n_group=1,
            topk_group=1,
            n_shared_experts=2,
            norm_topk_prob=False,
            rope_interleave=False,
            rope_parameters=dict(rope_type="default", rope_theta=50000.0),
        ),
    ),
    "glm4-moe": (
        "Glm4Moe",
        dict(
            head_dim=12,
            attention_bias=True,
            use_qk_norm=True,
            n_routed_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=16,
            n_group=4,
            topk_group=2,
            routed_scaling_factor=2.5,
        ),
    ),
    "glm4-moe-lite": (
        "Glm4MoeLite",
        dict(
            {k: v for k, v in LATENT.items() if k != "first_k_dense_replace"},
            q_lora_rank=24,
            n_group=2,
            topk_group=1,
            mlp_layer_types=["dense", "sparse"],
        ),
    ),
    "minimax-m2": (
        "MiniMaxM2",
        dict(intermediate_size=20, head_dim=12, rotary_dim=6, num_local_experts=8, num_experts_per_tok=3),
    ),
    "seed-oss": ("SeedOss", dict(head_dim=12, mlp_bias=True)),
    "exaone4": ("Exaone4", dict(sliding_window=9, layer_types=MIXED, rope_parameters=LLAMA3)),
    "ernie4.5": ("Ernie4_5", dict(head_dim=12, use_bias=True, tie_word_embeddings=False)),
    "ernie4.5-moe": (
        "Ernie4_5_Moe",
        dict(moe_num_experts=8, moe_k=3, moe_intermediate_size=12, tie_word_embeddings=False),
    ),
    "olmoe": ("Olmoe", dict(intermediate_size=20, num_experts=8, num_experts_per_tok=3)),
    "dots1": (
        "Dots1",
        dict(
            n_routed_experts=8,
            n_shared_experts=2,
            num_experts_per_tok=3,
            moe_intermediate_size=12,
            first_k_dense_replace=1,
            routed_scaling_factor=2.5,
            sliding_window=11,
            max_window_layers=1,
        ),
    ),
    "gemma2": (
        "Gemma2",
        dict(
            head_dim=12,
            sliding_window=9,
            query_pre_attn_scalar=20,
            attn_logit_softcapping=4.0,
            final_logit_softcapping=6.0,
            tie_word_embeddings=False,  # tied, so small a model repeats its last token
        ),
    ),
    "gemma3": (
        "Gemma3",
        dict(
            num_hidden_layers=3,
            head_dim=12,
            sliding_window=9,
            query_pre_attn_scalar=20,
            layer_types=[*MIXED, MIXED[0]],
            tie_word_embeddings=False,
            rope_parameters=dict(
                full_attention=dict(rope_type="linear", factor=8.0, rope_theta=1000000.0),
                sliding_attention=dict(rope_type="default", rope_theta=10000.0),
            ),
        ),
    ),
}
