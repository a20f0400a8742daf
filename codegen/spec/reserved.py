"""Names that generated code uses itself. `codegen.spec.symbols` renames an argument or op that has such a name.

`tests/unit/spec/test_reserved.py` compares the list with what `generated/` uses.
"""

from __future__ import annotations

import re

_FAMILIES = re.compile(
    r"(stride|bwd|grad|GRAD|ahead)_\w+|(term|gap|full_gap)(_\d+)?|table_\d+"
    r"|\w+_(ptrs?|base|tile|begin|end|first|last|len|stop|val|q|kv|qk|pos|seq|min|max|size_\d)(_\d+)?"
)
"""Patterns of names that the generator composes: of pointers and values derived from them, bounds, subexpressions."""

_WORDS = """
    args keywords out self

    acc alpha batch block decay delta dk dlse do dp dq ds dtype dv finite fwd gap group_size head
    head_dim head_dim_v in_rows keep keys last logit lse max_new max_ref member num_blocks num_heads num_kv_heads o
    p qk qk_scale q_shift row_max row_offs row_offset row_offsets row_sum rows run start_m start_n step tile tiles
    total values

    backward behind_full block_extremes block_list block_range block_tables blocks by_keys call_key
    chunk_first each fill_lists has_full in_parts is_full is_partial kv_values launch_lists least_block
    list_batch list_begin list_end list_entries list_entry list_heads made num_keys num_kv num_others num_q
    num_rows other_blocks own_blocks own_room part part_idx part_offs partial_end parts pass_name
    program programs q_values query_programs ranges span spans table_kernel their_part_idx
    their_part_offs tile_blocks visits

    ddecay_cols ddecay_rows has_key lag share sums unrounded p_sink

    added bands bands_of call_mode common distance_tile ds_distances first_band first_block is_factor is_kept lag_axis
    lag_origin least line most num_bands num_lags num_parts own_band part_blocks store_diagonals RATIO
    ds_far far_behind far_parts is_before is_behind is_far lag_grid lag_sums lags near own_offset
    own_part side square SUMS_FAR

    check_dropout_p drop dropout dropout_mask dropout_seed keep_numbers keep_scale p_dropped probs threshold
    dropped
    all_heads dropout_coordinates first_head first_row head_index key_origin minus_delta p_kept p_scale philox
    row_origin without_dropped dropped_signs kept_gradients kept_weights signs

    add_diagonals add_dot aligned apply at_least autocast_inputs batch_row cdiv check_float
    check_flag check_inputs check_int check_tensor clamp_index grid_extremes grid_run keep_range options diagonal_sums
    dot_rows
    empty_like_layout floor_div floor_div_any floor_mod has_tanh_instruction host_number interpreter_dtype is_nvidia
    known_origin
    launches_directly load_grid load_pairs load_vector next_power_of_2 place_pairs place_sums
    distance_sums head_sums positive_scale query_offset reduce_gradient reference row_products runs_reference
    unit_strides

    keyless replayed_op

    check_unscheduled check_whole first_keys ops

    Any BLOCK_D BLOCK_DV BLOCK_M BLOCK_N DROPOUT FLOAT_DTYPES FP32 GRID_RUN HARDWARE_TANH HAS_DLSE HEAD_DIM
    HEAD_DIM_V LN2 LOG2E NAME Q_OFFSET_PER_BATCH RAGGED Schedule Tensor Tile Tiles UNIT

    CHUNK FILL OWN_ROOM PART PARTS POSITIONS PTX NARROW block_lists block_ranges call_sizes call_options list_blocks
    schedule schedule_tables scheduled

    apart first_plain num_masked num_plain numbers o_len o_row
    produce_keys produce_rows store_rows
    change_turns first_turn o_start

    DTYPE KEY LANES Q_BLOCKS ROW ROWS SCORES STAGES SUMS WEIGHTS add_lanes
    begin_block describe_rows end_block
    gluon hopper_fwd inv_sum k_desc k_ring kv_head kv_heads kv_turn lane_layout last_full
    launch_hopper make_barriers make_ring mbarrier multiprocessors nth num_full num_partial num_taken
    p_pairs product_layout q_desc q_head
    q_ring row_sums row_term tile_columns tma turn v_desc
    v_ring warpgroup_mma_wait

    LINE add_rows block_term column_sums key_term make_ones of_lines ones own_start_m
    OWN_KEY OWN_ROW own_col own_key own_position own_q_row own_row own_segment row_start row_turn sums_layout unscaled

    KEYS LINES WITH_DQ as_operand begin_addition begin_sums delta_desc describe_parts
    describe_vector do_desc do_ring dq_descs dq_ring dq_sums dq_tiles fence_async_shared first_row fused
    head_parts hopper_bwd hopper_delta in_fragments k_lap lse_desc
    num_key_blocks own_start q_turn row_delta row_lse sum_index

    inverse_scale key_terms make_key_terms produce_keys_and_terms term_layout

    at_columns columns_before run_bits run_end run_first run_gap_end run_gap_first

    FIXED REFERENCE add_columns exp2_of_tanh p_dscore

    HEAD_GROUPS HeadGroups head_group head_groups num_head_groups split_heads

    ADDERS CHUNK CHUNK_STAGES COLS OWN_DIM SUMS_DK V_PIECES add_keys add_weighted begin_dp begin_scores
    copied dkv dkv_start dq_start end_dp hopper_split is_split make_row_stream make_split_key_ring make_weights
    on_hopper own_rows q_stream score_keys score_rows scorer send_chunks send_keys store_sums summed summer sums_dk
    wait_for_scores

    SWIZZLE_COLS add_values adder compute_scores compute_weights count_pieces has_split_tile make_weight_ring
    make_wide_key_ring make_wide_paged_ring no_half_sums weigher weight_ring

    add_block dk_start dq_part ds_ring dv_start has_wide_tile hopper_bwd_wide
    is_wide make_hand_over near_heads p_ring row_block

    CONSTANTS V_PARTS add_tiles adder begin_dropped_block begin_exchange concat describe_input drain_dq end_wide_block
    balanced_blocks count_key_items count_items fetch_first_blocks_first first_blocks_first from_end head_row
    hand_over heads_in_cache inputs load_dq_rows load_sequence locate_key_blocks locate_keys nth_block single_heads
    pointers produce_wide send_packed_rows send_rows store_dq_rows strides visited_keys visited_rows

    head_seqs num_row_blocks row_first row_seqs work_counter work_ring work_turn

    CallOptions
    Attention PASSES dense kernels make_tables segmented tables tiles_of

    computed key_lengths round_even size_of

    FIRST_ENTRY KV_LEN KV_START LSE_START NUM_BLOCKS Q_LEN Q_START RECORD
    block_seqs block_sequences check_sequences cols first_entry key_block_list key_block_seqs key_ranges key_spans
    kv_parts kv_start kv_total launched num_entries num_others_most num_seqs packed_row q_parts q_row
    q_start q_total record row_stride sequence_of_rows sequences slots sums_by_sequence table_row

    cu_seqlens_k cu_seqlens_q kv_lengths kv_positions kv_segment_ids padding_id q_positions q_segment_ids

    BY_ROW ByRow Tokens check_alone check_order check_packed check_tokens first_batch kv_ids kv_row lse_parts
    mark_disorder marked o_parts packed packed_offset
    choices packed_reference packed_sequences packed_sizes q_ids q_row scalar_math sequence tokens

    AttentionModule Backend Sequence axis backend dim_size
    constants delta_constants dq_rows_constants name packed_strides
    packed_unit_strides passes shape strides sums_shape table_kernels tables_of tile_constants torch_reference

    Arguments Array DENSE INT32 Kernels PACKED SCALARS_LOADED SEGMENTED arguments attention forward heads is_loaded jax
    SequenceArguments checked_options jax_reference jnp launch lengths mode running_sums schedule_of

    Ring RowRing HeadRows SequenceRows Work accumulate add_dq aggregate arguments begin_pv consume consumer
    PIECES PIECE_COLS SUM_COLS V_PIECES V_PIECE_COLS describe_packed_rows end_pv exchange first item kv_ring kv_rows
    make_exchange make_key_ring make_row_ring make_work_ring no_sums num_items pack_pairs piece_columns
    produce producer q_rows q_stage query_stages raise_maximum rescale rescale_part rings run_zeros scorer
    sequence_item store_rest store_second store_through sum_parts summer unpack_pairs v_rows v_start work

    Run empty_gradients fill_decay give_backward words
    PAGED PagedKernels beside check_decay_caches check_dense_plan check_without_base decay_caches g_base
    by_query in_rows most_keys results_of split_call splits_keys
    autocast_queries call check_beside_pages check_caches check_without_pages own_tensor
    page_starts page_table paged refuse_pages splits max_seqlen_q max_seqlen_k
    all_keys entries entry final_step first_step is_row is_served last_step least merge most next_n next_page
    FOLDED WAVES Q_AT_END SCANNED first_seen last_seen
    all_acc all_max all_sum gdc_launch_dependents join_parts keys lse parts share split_end splits taken
    nth num_items num_seqs num_tiles page pages q_head seen seqs span step tile_rows
    CacheArguments PAGED PageArguments PagedKernels cached check_page_layout paged_attention plan_of
    load_cache load_heads load_pages merge_splits page_of slot_of store_heads kv_page kv_slot
    FLAT_TABLE FULL_BLOCKS HOPPER PAGE_SIZE PageRows copied_strides describe_pages end_seen k_page_rows
    make_paged_key_ring paged_ring place_prompts prompt_blocks q_batch_rows rows_apart v_page_rows
    K_SCALE SHARED_KV V_SCALE first_columns head_scale k_scale scales shares_values softmax_scale token_scales unit_new
    ONE_TILE PAIRS add_values dot_keys in_columns merges pairs q_unit split_columns split_tile split_tiles value_unit
    zero_sums
    v_scale v_unit with_scales
    CacheCall FOLDS GROUP OVERLAPS PLANNERS is_seq o_rows part_rows partial_rows plan planner start_row table_stride
    FIRST_COL HALF HOPPER_WARPS REST alpha_even begin_others begin_own compute_scores end_others end_own found
    load_queries load_record make_latent_ring make_queries max_even numbers pair_n queries rescaling ring
    row_alpha runs_latent store_half weights
    ByteRows CONVERTS as_words convert_keys in_units largest_elements make_byte_ring raise_unit scale_weights
    score_factors unit_even
    OPTIONS lse_start packed_forward results run_blocks runs
    BackwardRuns backward_runs gradients_of_runs num_run_blocks pad_rows query_gradients_of_runs run_rows store_dq
    columns output_dtype q_scale result_dtype scaled_run value_columns
"""
WORDS = frozenset(_WORDS.split())
"""Fixed names of variables, parameters, functions and modules of generated code."""

LAUNCH_OPTIONS = frozenset(
    (
        "num_warps",
        "num_stages",
        "num_ctas",
        "maxnreg",
        "launch_pdl",
        "launch_cooperative_grid",
        "debug",
        "grid",
        "warmup",
        "instrumentation_mode",
        "sanitize_overflow",
    )
)
"""Keywords of a launch, of the generated code or of Triton itself. A kernel's parameter of that name would get both."""


def is_reserved(name: str) -> bool:
    """Whether generated code uses the name.

    >>> is_reserved("alpha"), is_reserved("q_ptr"), is_reserved("slope")
    (True, True, False)
    """
    return is_word(name) or name in LAUNCH_OPTIONS or _FAMILIES.fullmatch(name) is not None


def is_word(name: str) -> bool:
    """Whether it is a fixed name. The names of a generated module's own functions are among these."""
    return name in WORDS
