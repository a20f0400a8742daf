"""`codegen port`: which functions of a file are mods, and what their names stand for."""

from __future__ import annotations

from pathlib import Path

from tests.unit.port.reports import port_text


def test_integers_that_are_converted_to_integers_stay_integers(tmp_path: Path) -> None:
    report = port_text(
        tmp_path,
        """
        def halves(b, h, q_idx, kv_idx):
            return (q_idx.to(torch.int64) * 3) // 2 >= kv_idx
        def make_sides(table, half: int):
            return lambda score, b, h, q, kv: score + table[(q < kv).to(torch.int32) * half, h]
        """,
    )
    assert report.failures == ()
    assert "mask: q_idx * 3 // 2 >= kv_idx" in report.text
    assert "score: score + table[where(q_idx < kv_idx, 1, 0) * half, h]" in report.text


def test_functions_that_only_look_like_mods_are_left_out(tmp_path: Path) -> None:
    report = port_text(
        tmp_path,
        """
        @functools.lru_cache
        def create_block_mask_cached(score_mod, B, H, M, N, device="cuda"):
            return create_block_mask(score_mod, B, H, M, N, device=device)
        def cached(mask_mod, bsz, head, M, N):
            return create_block_mask(mask_mod, bsz, head, M, N)
        def dense(batch, heads, q_len, kv_len):
            return torch.ones(batch, heads, q_len, kv_len).tril()
        def expand(batch_indices, head_indices, q_indices, kv_indices):
            return batch_indices[:, None], head_indices[:, None], q_indices[None], kv_indices[None]
        def causal(b, h, q_idx, kv_idx):
            return q_idx >= kv_idx
        """,
    )
    assert report.ported == ("causal",)
    assert report.failures == ()


def test_objects_of_classes_may_be_mods(tmp_path: Path) -> None:
    report = port_text(
        tmp_path,
        """
        class Frames:
            def __init__(self, size):
                self.size = size
            def __call__(self, b, h, q_idx, kv_idx):
                return q_idx // self.size >= kv_idx // self.size
        class Near:
            def __call__(self, b, h, q_idx, kv_idx):
                return q_idx - kv_idx < self.reach
        blocks = create_block_mask(Frames(8), None, None, 64, 64)
        """,
    )
    assert report.failures == ()
    assert report.ported == ("Frames", "Near")


def test_values_that_differ_between_branches_are_given_by_the_call(tmp_path: Path) -> None:
    report = port_text(
        tmp_path,
        """
        def make(ids, is_long, has_tail):
            if is_long:
                size = 512
                ids = ids.squeeze(0)
            else:
                size = 64
            if has_tail:
                def tail(kv_idx):
                    return kv_idx < 7
            def near(b, h, q_idx, kv_idx):
                return ((q_idx - kv_idx < size) & (ids[q_idx] == ids[kv_idx])) | tail(kv_idx)
            return near
        """,
    )
    assert report.failures == ()
    assert "mask: (q_idx - kv_idx < size and ids[q_idx] == ids[kv_idx]) or kv_idx < 7" in report.text
    assert "size: int" in report.text


def test_mods_that_defaults_of_arguments_do_not_choose_are_ported(tmp_path: Path) -> None:
    report = port_text(
        tmp_path,
        """
        def blocky(b, h, q_idx, kv_idx, size=None, start=None):
            return (q_idx >= start) & ((q_idx - start) // size == kv_idx // size)
        class Model:
            def masks(self, length, size, backend="sdpa"):
                if backend == "flex" and AVAILABLE:
                    self.mask = create_block_mask(partial(blocky, size=size, start=length), None, None, 64, 64)
                elif backend == "sdpa":
                    self.mask = torch.ones(length, length).tril()
            def forward(self, x, use_flex=False):
                if use_flex:
                    def near(b, h, q_idx, kv_idx):
                        return q_idx - kv_idx < 4
                    return flex_attention(x, x, x, block_mask=create_block_mask(near, None, None, 64, 64))
                return x
        """,
    )
    assert report.failures == ()
    assert "mask: q_idx >= length and (q_idx - length) // size == kv_idx // size" in report.text
    assert "mask: q_idx - kv_idx < 4" in report.text
    assert "its default" not in report.text


def test_what_is_compared_with_none_is_taken_to_be_given(tmp_path: Path) -> None:
    report = port_text(
        tmp_path,
        """
        def make(pad, bias):
            def padded(b, h, q_idx, kv_idx):
                keep = q_idx >= kv_idx
                if pad is not None:
                    keep = keep & pad[b, kv_idx].bool()
                return keep
            return padded
        """,
    )
    assert report.failures == ()
    assert "mask: q_idx >= kv_idx and pad[b, kv_idx]" in report.text
    assert "# pad is taken to be given: where it is None, port a mod without it" in report.text


def test_a_name_of_one_function_says_nothing_about_the_same_name_elsewhere(tmp_path: Path) -> None:
    report = port_text(
        tmp_path,
        """
        class Other(nn.Module):
            def forward(self, places, table, size: float):
                places = places.unsqueeze(-1)
                table = nn.Parameter(torch.zeros(3))
                return table * 0.5 + places + size * 2 + table * size
        def make(places, table, size):
            def biased(score, b, h, q_idx, kv_idx):
                return score + table[places[b, q_idx] + kv_idx % size]
            return biased
        """,
    )
    assert report.failures == ()
    assert "table: {dims: [table_size], dtype: float32}" in report.text
    assert "the file computes it" not in report.text
    assert "size: int" in report.text
