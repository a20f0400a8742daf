"""The kernel that adds up rows by a table: it packs keys for other ranks, and unpacks what comes from them."""

import triton
import triton.language as tl


@triton.jit
def add_rows(
    table_ptr, first, rows, terms, x_ptr, stride_row, stride_b, stride_h, stride_d,
    came_ptr, came_width, out_ptr, out_width,
    HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write the rows from `first` on of one tensor, as `row_sums` does for two."""
    row = first + tl.arange(0, ROWS)
    inside = row < rows
    table = table_ptr + row.to(tl.int64) * terms
    own = tl.load(table, mask=inside, other=-1).to(tl.int64)
    target = out_ptr + row[:, None].to(tl.int64) * out_width
    for start in tl.static_range(0, WIDTH, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        b, h, d = column // (HEADS * DIM), column // DIM % HEADS, column % DIM
        place = own[:, None] * stride_row + (b * stride_b + h * stride_h + d * stride_d)[None, :]
        is_column = (column < WIDTH)[None, :]
        total = tl.load(x_ptr + place, mask=(own >= 0)[:, None] & is_column, other=0.0).to(tl.float32)
        for term in range(1, terms):
            came = tl.load(table + term, mask=inside, other=-1).to(tl.int64)
            place = came[:, None] * came_width + column[None, :]
            total += tl.load(came_ptr + place, mask=(came >= 0)[:, None] & is_column, other=0.0).to(tl.float32)
        tl.store(target + column[None, :], total.to(out_ptr.dtype.element_ty), mask=inside[:, None] & is_column)


@triton.jit(do_not_specialize=["rows", "terms"])
def row_sums(
    table_ptr, rows, terms, k_ptr, v_ptr, came_ptr, k_out_ptr, v_out_ptr,
    stride_kr, stride_kb, stride_kh, stride_kd, stride_vr, stride_vb, stride_vh, stride_vd, k_out_width, v_out_width,
    HEADS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr,
    K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, V_FIRST: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write rows that are sums of rows of k and of what came from other ranks, and the same for v, in float32.

    table  [rows, terms]  int32: a row of k and v, then rows of `came`, added up in this order; -1 for none
    k, v   [local, B, H, D]
    came   [received, K_WIDTH + V_WIDTH]: rows of k, each followed by the row of v
    out    rows of k_out_width and v_out_width elements; those of v begin at element V_FIRST

    K_WIDTH and V_WIDTH are the elements of a row, B * H * D.
    """
    first = tl.program_id(0) * ROWS
    came_width: tl.constexpr = K_WIDTH + V_WIDTH
    add_rows(
        table_ptr, first, rows, terms, k_ptr, stride_kr, stride_kb, stride_kh, stride_kd,
        came_ptr, came_width, k_out_ptr, k_out_width, HEADS, K_DIM, K_WIDTH, ROWS, COLUMNS,
    )  # fmt: skip
    add_rows(
        table_ptr, first, rows, terms, v_ptr, stride_vr, stride_vb, stride_vh, stride_vd,
        came_ptr + K_WIDTH, came_width, v_out_ptr + V_FIRST, v_out_width, HEADS, V_DIM, V_WIDTH, ROWS, COLUMNS,
    )  # fmt: skip
