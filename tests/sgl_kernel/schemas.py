"""The schemas of `sgl_kernel`'s ops for processors that models are traced through, as the library declares them."""

from __future__ import annotations

SCHEMAS = (
    "silu_and_mul_cpu(Tensor input) -> Tensor",
    "gelu_tanh_and_mul_cpu(Tensor input) -> Tensor",
    "gelu_and_mul_cpu(Tensor input) -> Tensor",
    "fused_sigmoid_mul_cpu(Tensor(a!) input, Tensor gate) -> ()",
    "rmsnorm_cpu(Tensor input, Tensor weight, float eps) -> Tensor",
    "gemma_rmsnorm_cpu(Tensor input, Tensor weight, float eps) -> Tensor",
    "gemma3_rmsnorm_cpu(Tensor input, Tensor weight, float eps) -> Tensor",
    "gemma4_rmsnorm_cpu(Tensor input, Tensor weight, float eps, float scale_shift, bool with_scale) -> Tensor",
    "layernorm_cpu(Tensor input, Tensor weight, Tensor? bias, float eps) -> Tensor",
    "l2norm_cpu(Tensor input, float eps) -> Tensor",
    "fused_rmsnorm_gated_cpu(Tensor input, Tensor weight, Tensor gate, float eps) -> Tensor",
    "fused_add_rmsnorm_cpu(Tensor(a!) input, Tensor(a!) residual, Tensor weight, float eps) -> ()",
    "gemma_fused_add_rmsnorm_cpu(Tensor(a!) input, Tensor(a!) residual, Tensor weight, float eps) -> ()",
    "fused_add_layernorm_cpu(Tensor input, Tensor residual, Tensor weight, Tensor? bias, float eps) -> Tensor",
    "fused_dual_residual_rmsnorm_cpu(Tensor x, Tensor residual, Tensor weight1, Tensor weight2, float eps) -> "
    "(Tensor, Tensor)",
    "fused_qk_rmsnorm_cpu(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, float eps) -> (Tensor, Tensor)",
    "fused_qk_rmsnorm_sumsq_cpu(Tensor q, Tensor k) -> Tensor",
    "fused_qk_rmsnorm_apply_from_stats_cpu(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, Tensor sum_sq, int"
    " tp_world_size, float eps) -> (Tensor, Tensor)",
    "fused_qk_gemma_rmsnorm_cpu(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, float eps, int head_dim) -> "
    "(Tensor, Tensor)",
    "fused_qk_gemma_rmsnorm_with_gate_cpu(Tensor q_gate, Tensor k, Tensor q_weight, Tensor k_weight, float eps, int"
    " head_dim, int num_head) -> (Tensor, Tensor, Tensor)",
    "topk_sigmoid_cpu(Tensor hidden_states, Tensor gating_output, int topk, bool renormalize, Tensor? "
    "correction_bias=None) -> (Tensor, Tensor)",
    "topk_softmax_cpu(Tensor hidden_states, Tensor gating_output, int topk, bool renormalize, Tensor? "
    "correction_bias=None) -> (Tensor, Tensor)",
    "grouped_topk_cpu(Tensor hidden_states, Tensor gating_output, int topk, bool renormalize, int num_expert_group,"
    " int topk_group, int num_fused_shared_experts, float? routed_scaling_factor, Tensor? num_token_non_padded) -> "
    "(Tensor, Tensor)",
    "biased_grouped_topk_cpu(Tensor hidden_states, Tensor gating_output, Tensor correction_bias, int topk, bool "
    "renormalize, int num_expert_group, int topk_group, int num_fused_shared_experts, float? routed_scaling_factor,"
    " Tensor? num_token_non_padded) -> (Tensor, Tensor)",
    "fused_moe_router_cpu(float moe_softcapping, Tensor hidden_states, Tensor gating_output, int topk, bool "
    "renormalize, Tensor? correction_bias=None) -> (Tensor, Tensor)",
    "decode_attention_cpu(Tensor query, Tensor k_cache, Tensor v_cahce, Tensor(a!) output, Tensor? key, Tensor? "
    "value, Tensor loc, Tensor attn_logits, Tensor req_to_token, Tensor req_pool_indices, Tensor seq_lens, float "
    "sm_scale, float logit_cap, bool is_cross_attn, int sliding_window_size, Tensor? encoder_lens, Tensor? sinks) "
    "-> ()",
    "extend_attention_cpu(Tensor q_extend, Tensor? k_extend, Tensor? v_extend, Tensor(a!) o_extend, Tensor "
    "k_buffer, Tensor v_buffer, Tensor req_to_token, Tensor req_pool_indices, Tensor seq_lens, Tensor "
    "extend_seq_lens, Tensor extend_start_loc, int max_len_extend, float sm_scale, float logit_cap, bool "
    "is_cross_attn, int sliding_window_size, Tensor? encoder_lens, Tensor? sinks, Tensor? tree_mask=None) -> ()",
    "chunk_gated_delta_rule_cpu(Tensor query, Tensor key, Tensor value, Tensor g, Tensor beta, Tensor "
    "initial_state, bool output_final_state, Tensor cu_seqlens, bool head_first, bool use_qk_l2norm_in_kernel, "
    "Tensor initial_state_indices, float eps=1e-6) -> (Tensor, Tensor)",
    "per_token_quant_int8_cpu(Tensor A) -> (Tensor, Tensor)",
    "int8_scaled_mm_cpu(Tensor mat1, Tensor mat2, Tensor scales1, Tensor scales2, Tensor? bias, ScalarType "
    "out_dtype, bool is_vnni) -> Tensor",
    "int8_scaled_mm_with_quant(Tensor mat1, Tensor mat2, Tensor scales2, Tensor? bias, ScalarType out_dtype, bool "
    "is_vnni) -> Tensor",
    "fp8_per_tensor_scaled_mm_cpu(Tensor mat1, Tensor mat2, Tensor scale2, Tensor? bias, ScalarType out_dtype, bool"
    " is_vnni) -> Tensor",
    "fp8_scaled_mm_cpu(Tensor mat1, Tensor mat2, Tensor scales2, int[] block_size, Tensor? bias, ScalarType "
    "out_dtype, bool is_vnni) -> Tensor",
    "mxfp4_scaled_mm_cpu(Tensor mat1, Tensor mat2, Tensor scales2, Tensor? bias, bool is_vnni) -> Tensor",
    "int4_scaled_mm_cpu(Tensor x, Tensor w, Tensor w_zeros, Tensor w_scales, Tensor? bias) -> Tensor",
    "weight_packed_linear(Tensor mat1, Tensor mat2, Tensor? bias, bool is_vnni) -> Tensor",
    "fused_linear_sigmoid_mul(Tensor mat1, Tensor mat2, Tensor? bias, bool is_vnni, Tensor post_mul_mat) -> Tensor",
    "bmm_cpu(Tensor(a!) out, Tensor mat1, Tensor mat2, bool is_vnni, Tensor? scale) -> ()",
    "fused_experts_cpu(Tensor hidden_states, Tensor w1, Tensor w2, Tensor topk_weights, Tensor topk_ids, bool "
    "inplace, int moe_comp_method, Tensor? w1_scale, Tensor? w2_scale, Tensor? w1_zero, Tensor? w2_zero, int[]? "
    "block_size, Tensor? w1_bias, Tensor? w2_bias, float? alpha, float? limit, bool is_vnni, str? activation=None) "
    "-> Tensor",
    "shared_expert_cpu(Tensor hidden_states, Tensor w1, Tensor w2, Tensor? fused_experts_out, float? "
    "routed_scaling_factor, bool inplace, bool use_int8_w8a8, bool use_fp8_w8a16, Tensor? w1_scale, Tensor? "
    "w2_scale, int[]? block_size, bool is_vnni) -> Tensor",
    "qkv_proj_with_rope(Tensor hidden_states, Tensor q_a_proj_weight, Tensor q_b_proj_weight, Tensor "
    "kv_a_proj_weight, Tensor w_kc, Tensor q_a_layernorm_weight, Tensor kv_a_layernorm_weight, Tensor positions, "
    "Tensor cos_sin_cache, float eps, bool use_int8_w8a8, bool use_fp8_w8a16, Tensor? q_a_proj_scale, Tensor? "
    "q_b_proj_scale, Tensor? kv_a_proj_scale, Tensor? w_scale, bool is_vnni, int[]? block_size) -> (Tensor, Tensor,"
    " Tensor)",
    "qkv_proj_with_rope_fused_weight(Tensor hidden_states, Tensor qkv_a_proj_weight, Tensor q_b_proj_weight, Tensor"
    " w_kc, Tensor q_a_layernorm_weight, Tensor kv_a_layernorm_weight, Tensor positions, Tensor cos_sin_cache, "
    "float eps, bool use_int8_w8a8, bool use_fp8_w8a16, Tensor? qkv_a_proj_scale, Tensor? q_b_proj_scale, Tensor? "
    "w_scale, bool is_vnni, int[]? block_size, int q_lora_rank, int kv_lora_rank, int qk_rope_head_dim) -> (Tensor,"
    " Tensor, Tensor)",
    "causal_conv1d_fwd_cpu(Tensor x, Tensor weight, Tensor? bias, Tensor? conv_states, Tensor? query_start_loc, "
    "Tensor? cache_indices, Tensor? has_initial_state, bool silu_activation, int pad_slot_id, bool is_vnni) -> "
    "Tensor",
    "causal_conv1d_update_cpu(Tensor x, Tensor(a!) conv_states, Tensor weight, Tensor? bias, bool silu_activation, "
    "Tensor? cache_seqlens, Tensor? conv_state_indices, int pad_slot_id, bool is_vnni) -> Tensor",
    "shm_allreduce(Tensor(a!) data, int reduce_op) -> ()",
    "shm_allgather(Tensor data, int dim) -> Tensor",
    "rotary_embedding_cpu(Tensor positions, Tensor query, Tensor key, int head_size, Tensor cos_sin_cache, bool "
    "is_neox) -> (Tensor, Tensor)",
    "apply_rotary_pos_emb_cpu(Tensor query, Tensor key, Tensor cos, Tensor sin) -> (Tensor, Tensor)",
    "apply_multidimensional_rope_cpu(Tensor(a!) query, Tensor(b!) key, Tensor cos, Tensor sin) -> ()",
    "multimodal_rotary_embedding_cpu(Tensor positions, Tensor(a!) query, Tensor(b!) key, int head_size, Tensor "
    "cos_sin_cache, int[]? mrope_section, bool mrope_interleaved, bool is_neox) -> ()",
    "fused_sigmoid_gating_delta_rule_update_cpu(Tensor A_log, Tensor dt_bias, Tensor q, Tensor k, Tensor v, Tensor "
    "a, Tensor b, Tensor(a!) initial_state_source, Tensor initial_state_indices, Tensor cu_seqlens, bool "
    "use_qk_l2norm_in_kernel, float softplus_beta=1.0, float softplus_threshold=20.0) -> Tensor",
    "fused_gdn_gating_cpu(Tensor A_log, Tensor a, Tensor b, Tensor dt_bias) -> (Tensor, Tensor)",
    "fused_qkvzba_split_reshape_cat_cpu(Tensor mixed_qkvz, Tensor mixed_ba, int num_heads_qk, int num_heads_v, int "
    "head_qk, int head_v) -> (Tensor, Tensor, Tensor, Tensor)",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu(Tensor mixed_qkvz, Tensor mixed_ba, int num_heads_qk, int "
    "num_heads_v, int head_qk, int head_v) -> (Tensor, Tensor, Tensor, Tensor)",
    "fused_input_proj_cpu(Tensor hidden_states, Tensor qkvz_weight, Tensor ba_weight, bool is_vnni) -> (Tensor, "
    "Tensor)",
)
"""Each with the name of its op."""
