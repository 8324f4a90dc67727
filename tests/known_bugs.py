"""Public bug reports of this field, and the tests that show they do not apply here.

The reports are those of the project's design notes under "Ownership, layout, communication",
"Routing and maths", "Checkpoint", "FP8" and "Added". M is NVIDIA/Megatron-LM. A report without a
test has the reason instead.
"""

from __future__ import annotations

UNTESTABLE = "not testable here: "

_EDGES = "tests/distributed/test_training_edges.py::"
_BUGS = "tests/distributed/test_known_bugs.py::"
_RESUME = "tests/distributed/test_resume.py::"
_SAVING = "tests/distributed/test_checkpoint_saving.py::"
_CASES = "tests/distributed/test_checkpoint_cases.py::"
_ANY = "tests/distributed/test_any_layout.py::"
_LAYOUTS = "tests/distributed/test_layouts.py::"
_EQUAL = "tests/distributed/test_training_equality.py::"
_OFFLINE = "tests/distributed/test_offline.py::"
_TOOL = "tests/unit/checkpoint/"
_ADAPTERS = "tests/distributed/test_adapters.py::"
_ALONE = "tests/distributed/test_rule_alone.py::"
_MODEL = "tests/unit/integration/test_model_parameters.py::"
_RUNNER = "tests/unit/exchange/test_runner.py::"
_PLAN = "tests/unit/placement/test_plan.py::"
_SCHULZ = "tests/unit/linalg/test_newton_schulz.py::"
_REST = _MODEL + "TestTheRest::"
_ARGUMENTS = "tests/unit/integration/test_arguments.py::"
_SCHEDULE = "tests/distributed/test_schedule_at_load.py::"
_SETTINGS = "tests/unit/integration/test_api_settings.py::"
_ELSEWHERE = "tests/distributed/test_weights_from_elsewhere.py::"
_LOGICAL = "tests/unit/matrices/test_logical.py::"
_FP8 = "tests/distributed/test_fp8_training.py::"
_FP8_SAVES = "tests/distributed/test_fp8_checkpoints.py::"
_MOMENTUM = "tests/distributed/test_momentum_dtype.py::"
_BALANCE = "tests/unit/placement/test_owners.py::"

REPORTS: dict[str, tuple[str, ...]] = {
    # ---- ownership, layout, communication
    "M#6920 resume continues from a different model": (
        _RESUME + "test_resumed_run_is_bit_equal",
        _BUGS + "test_steps_save_and_load_give_the_same_bits",
    ),
    "M#5479 owners differ between ranks": (
        _PLAN + "test_plan_does_not_depend_on_the_order_of_its_inputs",
        _EDGES + "test_ranks_with_different_plans_do_not_start",
    ),
    "M#6048 more shards than the group": (_BUGS + "test_buffers_of_another_group_are_refused",),
    "M#6379 M#2162 M#2163 one owner dominates time or memory": (
        _BALANCE + "test_time_and_memory_are_balanced_on_dense_and_moe_shapes",
    ),
    "M#4138 expert-DP 1; dion#74 ranks that hold nothing": (
        _BUGS + "test_steps_save_and_load_give_the_same_bits",
        _RUNNER + "test_ranks_that_hold_nothing_enter_every_message",
        _ALONE + "test_more_ranks_than_matrices",
    ),
    "M#4840 M#4889 parameters off 64-element boundaries": (
        _BUGS + "test_no_parameter_moves_in_its_buffer",
    ),
    "M#6740 padding enters the orthogonalization": (
        _BUGS + "test_padding_of_buckets_never_reaches_a_matrix",
    ),
    "M#4609 overlapped gather pollutes gradients": (
        _BUGS + "test_overlap_on_and_off_give_the_same_bits",
    ),
    "M#6754 a gather runs before the other optimizer stepped": (
        _LAYOUTS + "test_every_update_equals_the_reference",
    ),
    "xtuner#2069 exchange buffer by global expert count": (
        "tests/unit/placement/test_waves.py::test_bound_is_kept_or_the_model_refused",
        _RUNNER + "test_buffers_are_those_counted_and_stay_from_step_to_step",
    ),
    "nanochat#843 buffers of asynchronous collectives freed early": (
        _RUNNER + "test_every_holder_gets_the_update_of_the_whole_matrix",
    ),
    "M#6719 one monolithic all-to-all": (
        _RUNNER + "test_two_waves_are_on_their_way_while_one_is_computed",
    ),
    "muon-fsdp2, DMuon: handles never waited for, order of one group": (
        _RUNNER + "test_every_message_is_waited_for_once_and_all_have_been",
        _RUNNER + "test_every_rank_starts_the_same_messages_in_the_same_order",
    ),
    "10,000 ranks: object gathers per param group at save": (
        _SAVING + "test_collectives_of_a_save_do_not_grow_with_the_model",
    ),
    # ---- checkpoints
    "M#2625 M#5060 M#4705 resume with another learning rate or PP finds no group": (
        _RESUME + "test_resume_with_other_rates_and_rules",
        _ANY + "test_every_dense_layout_continues_others",
    ),
    "M#3885 M#2255 a rank without parameters breaks save or load": (
        _BUGS + "test_steps_save_and_load_give_the_same_bits",
        _ANY + "test_every_layout_of_experts_continues_others",
    ),
    "Megatron-Bridge#2307 Megatron-Bridge#2805 legacy format collides under CP": (
        _ANY + "test_every_model_continues_elsewhere",
        _ARGUMENTS + "test_an_unsupported_flag_is_refused_with_what_to_type",
    ),
    "M#2956 M#2126 verl#5154 flattened_range rejected": (
        _RESUME + "test_other_sharding_types_are_refused_by_name",
        _CASES + "test_a_rule_on_one_layer_is_saved_and_loaded",
    ),
    "M#659 M#552 M#1490 M#1508 TP, PP or DP change fails": (
        _ANY + "test_every_dense_layout_continues_others",
        "tests/distributed/test_pretrain.py::test_resume_at_another_layout",
    ),
    "M#6666 quantized weights drift at save and load": (
        _CASES + "test_bf16_weights_are_their_masters_on_every_replica",
    ),
    "DeepSpeed#7746 DeepSpeed#8433 state dtype changes on resume": (
        _RESUME + "test_resumed_run_is_bit_equal",
        _CASES + "test_bf16_weights_are_their_masters_on_every_replica",
    ),
    "speculators#1066 routing changed and the old checkpoint became unreadable": (
        _CASES + "test_a_rule_on_one_layer_is_saved_and_loaded",
        _CASES + "test_a_rule_added_or_removed_on_one_layer_is_reported",
    ),
    "M#5898 odd DP sizes, padding at the end of a bucket": (
        _ANY + "test_every_dense_layout_continues_others",
    ),
    "M#1820 M#1842 M#1359 precision-aware states scaled twice on resume": (
        UNTESTABLE + "precision-aware state is refused",
    ),
    "M#1533 M#1284 scheduler flags ignored at load": (
        _SCHEDULE + "test_rates_of_the_checkpoint",
        _SCHEDULE + "test_without_a_flag_other_rates_are_refused",
    ),
    "M#5212 M#963 override must change max and min learning rate": (
        _SCHEDULE + "test_rates_of_this_run",
    ),
    # ---- routing and maths
    "M#4728 M#4731 gated attention": (
        _MODEL + "TestAttention::test_gated_attention",
        _LAYOUTS + "test_every_update_equals_the_reference",
    ),
    "M#7117 M#6326 M#7085 QKV split skipped when query groups < TP": (
        _MODEL + "TestAttention::test_groups_fewer_than_tp_are_decided_on_the_global_shape",
        "tests/unit/matrices/test_logical.py::test_blocks_of_the_shards_give_the_rows_of_the_whole",
        _LAYOUTS + "test_every_update_equals_the_reference",
    ),
    "M#6688 M#7077 M#7078 gate and up as one matrix": (
        _BUGS + "test_a_loud_gate_leaves_up_its_update",
        _MODEL + "TestExperts::test_gate_and_up_of_experts_are_two_matrices",
    ),
    "M#7395 replicated weights treated as shards": (
        _MODEL + "TestMultiLatentAttention::test_replicated_down_projections_are_not_shards",
        _LAYOUTS + "test_every_update_equals_the_reference",
    ),
    "M#5015 M#4091 packed rows of MLA and Mamba": (
        _MODEL + "TestMultiLatentAttention::test_kinds_are_the_matrices_of_the_paper",
        _MODEL + "TestStateSpace::test_mamba_in_proj_is_its_five_parts",
    ),
    "M#4641 M#4642 M#5034 tied embedding or MTP head reaches Muon": (
        _BUGS + "test_embeddings_and_heads_go_to_adam_on_every_stage",
        _EDGES + "test_both_copies_of_a_tied_embedding_follow_one_rule",
    ),
    "M#6642 per-parameter override ignored": (
        _EDGES + "test_rules_come_before_defaults",
        "tests/distributed/test_wrong_inputs.py::test_wrong_flags",
    ),
    "learned positions and routers go to Muon": (
        _REST + "test_routers_positions_and_thin_matrices_are_adams_unless_a_rule_says_else",
    ),
    "3-D grouped experts go to Adam; MaxText#4798 the expert axis": (
        _MODEL + "TestExperts::test_a_stack_of_experts_is_a_matrix_each",
        _LOGICAL + "test_one_expert_is_one_matrix_under_its_global_number",
        _ALONE + "test_equals_one_process",
    ),
    "old GroupedMLP [h, E·f] as one matrix": (
        UNTESTABLE + "megatron-core 0.19 has no GroupedMLP any more, and 0.16 is refused",
    ),
    "M#5394 M#5395 M#5431 EO#229 a tiny gradient vanishes": (
        _SCHULZ + "test_the_size_of_the_gradient_does_not_matter",
        _SCHULZ + "test_zero_gives_zero",
        _EDGES + "test_a_matrix_with_zero_gradient_only_decays",
    ),
    "M#6099 M#5916 M#6470 M#3024 gradient norm counts copies": (
        _LAYOUTS + "test_every_update_equals_the_reference",
    ),
    "DeepSpeed#7776 clips the orthogonal update": (
        _EQUAL + "test_every_update_equals_the_reference",
    ),
    "KellerJordan/Muon#25 Moonlight#24 Primus#729 scale modes confused": (
        "tests/unit/linalg/test_scales.py::test_the_rms_is_that_of_the_table",
    ),
    "M#3715 width scaling twice with muP": (
        _ARGUMENTS + "test_an_unsupported_flag_is_refused_with_what_to_type",
    ),
    "DeepSpeed#8432 DeepSpeed#8435 an overflow step poisons momentum": (
        _EDGES + "test_a_gradient_that_is_not_finite_skips_the_step_everywhere",
        _EDGES + "test_a_loss_scaler_skips_the_step_as_for_adam",
    ),
    "DeepSpeed#8443 DeepSpeed#8442 ISEEKYAN#130 number of orthogonalizations": (
        _LAYOUTS + "test_every_update_equals_the_reference",
    ),
    "gram-newton-schulz normalizes its argument in place": (
        _SCHULZ + "test_the_input_keeps_every_bit",
    ),
    "M#1428 Newton-Schulz on each holder": (_ALONE + "test_counts_equal_the_prediction",),
    "OneTrainer#1314 miles#1761 M#4691 low-rank factors sent to Muon": (
        "tests/unit/matrices/test_adapters.py::test_both_factors_of_every_naming_at_every_rank",
        _ADAPTERS + "test_adapters_are_trained_as_by_adam_whatever_their_rank",
    ),
    "M#7382 M#4109 QK-clip with the distributed optimizer": (
        _ARGUMENTS + "test_an_unsupported_flag_is_refused_with_what_to_type",
        _SETTINGS + "test_every_refusal_by_flag_is_one_by_api",
    ),
    "ms-swift#9599 verl#7120 settings dropped between layers of configuration": (
        _SETTINGS + "test_every_field_of_both_configurations_is_used_or_refused",
        _SETTINGS + "test_megatrons_settings_of_muon_are_used",
    ),
    "M#174 Megatron-Bridge#3949 stale masters after a load of weights alone": (
        _ELSEWHERE + "test_masters_follow_weights_that_were_loaded_alone",
    ),
    "pytorch#192225 pytorch#192224 optimizer state in a form that a reader does not know": (
        _TOOL + "test_containers.py::test_state_is_found_in_every_container",
    ),
    "Megatron-Bridge#1514 M#6003 M#6004 checkpoints without arguments": (
        _OFFLINE + "test_without_arguments_run_config_defines_fused_weights",
    ),
    "Megatron-Bridge#4199 Megatron-Bridge#4657 a router's bias is lost in conversion": (
        _TOOL + "test_importing.py::test_missing_untrained_weights_are_reported",
    ),
    "M#2016 SkyRL#1403 step counts after migration": (
        _OFFLINE + "test_a_restarted_adam_restarts_its_step_count",
        _TOOL + "test_conversion.py::test_the_step_count_of_torchs_adam_is_found",
    ),
    "Moonlight#27 Newton-Schulz on the local shard": (
        _EQUAL + "TestAWrongVariantFails::test_blockwise_per_tp_shard",
    ),
    # ---- FP8
    "M#5707 new masters never reach the quantized weights": (
        _FP8 + "test_quantized_weights_follow_the_masters",
        _FP8 + "test_what_is_wrong_is_found",
    ),
    "M#4987 masters from dequantized weights": (
        _FP8 + "test_quantized_weights_follow_the_masters",
    ),
    "owner-only quantization leaves stale scales": (_FP8 + "test_what_is_wrong_is_found",),
    "M#6666 quantize, dequantize, quantize is another value": (
        _FP8_SAVES + "test_a_resumed_run_is_bit_equal",
    ),
    "M#2272 M#4769 M#3461 M#4800 MXFP8 and the reused gradient buffer": (
        _FP8 + "test_overlap_changes_no_bit",
        _FP8_SAVES + "test_a_skipped_step_changes_no_byte",
    ),
    "a rank without a shard skips the collective quantization": (
        _FP8 + "test_quantized_weights_follow_the_masters",
    ),
    "TE#3207 TE#3212 TE#3318 empty tensors in multi-tensor kernels": (
        UNTESTABLE + "the kernels of Transformer Engine need a GPU (tools/gpu_check.py)",
    ),
    "DeepSpeed#7748 DeepSpeed#8483 bf16 momentum changes its type on resume": (
        _MOMENTUM + "test_a_resumed_run_is_bit_equal",
        _MOMENTUM + "test_a_checkpoint_loads_into_either_element_type",
    ),
}
