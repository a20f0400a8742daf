"""A small server on paged caches: `python -m examples.serve --variant alibi`.

Requests wait, are prefilled in chunks while other requests decode, and leave when they have all their tokens. A step is
one forward pass over the tokens of all running sequences: `generated.paging.append` writes their keys and values, and
the op reads each sequence's pages. The op's plan is made once a step for all layers. On a GPU, steps in which every
sequence has one token replay a CUDA graph; there is one for each power of two of sequences.

The model has random weights: tiny, or with `--full` in the shape of Llama 3 8B in bfloat16. The script prints tokens
per second, the time to the first token and between tokens. Then it computes some sequences again without a cache. The
exit status is 1 if a served token is not the likeliest token there, apart from rounding.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from codegen.cli.options import at_least
from examples.serving_model import OWN, Model, Size
from generated import paging

TINY = Size(layers=2, heads=6, kv_heads=2, head_dim=16, width=96, inner=192, vocabulary=512, longest=256)
LLAMA_8B = Size(layers=32, heads=32, kv_heads=8, head_dim=128, width=4096, inner=14336, vocabulary=128256, longest=8192)

BOUND = {torch.float32: 1e-3, torch.bfloat16: 0.25}
"""How far a served token's logit may be below that of the likeliest token, in standard deviations of the logits."""


@dataclass(eq=False)
class Request:
    """A prompt and the tokens generated after it. `times`: when each token was generated, in seconds."""

    prompt: list[int]
    new_tokens: int
    arrival: float = 0.0
    computed: int = 0
    generated: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def next_tokens(self, most: int) -> list[int]:
        """The tokens to compute next: a part of the prompt, or the last generated token."""
        return [*self.prompt, *self.generated][self.computed : self.computed + most]


class Batch:
    """The inputs of a step in one buffer of integers, so that one copy brings them to the GPU.

    tokens, positions and slots are `[tokens]`; lengths, and last, the last row of each sequence, are `[sequences]`;
    begins is `[sequences + 1]`; the table is `[sequences, most pages]`.
    """

    def __init__(self, tokens: int, sequences: int, most_pages: int, device: str) -> None:
        self.sizes = (tokens, tokens, tokens, sequences, sequences, sequences + 1, sequences * most_pages)
        self.buffer = torch.zeros(sum(self.sizes), dtype=torch.int32, device=device)
        parts = self.buffer.split(self.sizes)
        self.tokens, self.positions, self.slots, self.lengths, self.last, self.begins = parts[:-1]
        self.table = parts[-1].view(sequences, most_pages)

    def fill(self, rows: Sequence[Sequence[int]]) -> None:
        """Write the numbers of each part. The rest of a part is filled with -1, which no kernel reads, or with 0."""
        padded = [[*row, *[rest] * (size - len(row))] for row, size, rest in zip(rows, self.sizes, _REST, strict=True)]
        self.buffer.copy_(torch.tensor([x for row in padded for x in row], dtype=torch.int32))


_REST = (0, 0, -1, 0, 0, 0, -1)


class Server:
    """Continuous batching.

    Args:
        model: the model to serve.
        pages: the number of pages of the caches.
        page_size: tokens of a page.
        longest: the most tokens of a sequence, answer included.
        batch_tokens: the most tokens of a step.
        most_running: the most sequences that run at once.
        graphs: whether steps of one token for each sequence replay CUDA graphs.
    """

    def __init__(
        self,
        model: Model,
        *,
        pages: int,
        page_size: int,
        longest: int,
        batch_tokens: int,
        most_running: int,
        graphs: bool,
    ) -> None:
        if min(batch_tokens, most_running) < 1:
            got = f"{batch_tokens} and {most_running}"
            raise ValueError(f"batch_tokens and most_running: expected at least 1 each, got {got}")
        self.model, self.page_size, self.graphs = model, page_size, graphs
        self.batch_tokens, self.most_running = batch_tokens, most_running
        self.most_pages, self.pages = -(-longest // page_size), pages
        size, weight = model.size, model.head.weight
        shape = (2, size.layers, pages, page_size, size.kv_heads, size.head_dim)
        self.k_caches, self.v_caches = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
        self.pool, self.unpromised = paging.Pool(pages, page_size), pages
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.captured: dict[int, tuple[Batch, Callable[[], Tensor]]] = {}
        self.mixed_steps = self.decode_steps = 0

    def add(self, request: Request) -> None:
        if not request.prompt or request.new_tokens < 1:
            got = f"{len(request.prompt)} and {request.new_tokens}"
            raise ValueError(f"expected a prompt of at least one token, and at least one new token, got {got}")
        if request.arrival:
            raise ValueError("expected a request that was not added before, got one that was; make another Request")
        most = min(self.most_pages, self.pages)
        if self._pages(request) > most:
            raise MemoryError(f"expected a request of at most {most} pages, got one of {self._pages(request)}")
        request.arrival = time.perf_counter()
        self.waiting.append(request)

    @torch.inference_mode()
    def warm_up(self, requests: Sequence[Request]) -> None:
        """Compile kernels, by serving some requests, and capture the graphs of all numbers of sequences."""
        for request in requests:
            self.add(request)
        self.run()
        if self.graphs:
            for count in range((self.most_running - 1).bit_length() + 1):
                self._decoding(1 << count)
        self.mixed_steps = self.decode_steps = 0

    def run(self) -> list[Request]:
        """Serve until no request waits or runs; returns the requests in the order in which they ended."""
        ended = []
        while self.waiting or self.running:
            ended += self.step()
        return ended

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """One forward pass over a token of each decoding sequence and parts of prompts. Returns the ended requests."""
        self._admit()
        parts = list(self._parts())
        is_decode = all(len(tokens) == 1 for _, tokens in parts)
        next_tokens = (self._decode if is_decode else self._mixed)(parts)
        now = time.perf_counter()
        for (request, tokens), token in zip(parts, next_tokens, strict=False):
            request.computed += len(tokens)
            if request.computed == len(request.prompt) + len(request.generated):
                request.generated.append(token)
                request.times.append(now)
        ended = [request for request in self.running if len(request.generated) == request.new_tokens]
        for request in ended:
            self.running.remove(request)
            self.pool.free(request)
            self.unpromised += self._pages(request)
        return ended

    def _pages(self, request: Request) -> int:
        return -(-(len(request.prompt) + request.new_tokens) // self.page_size)

    def _admit(self) -> None:
        """Start waiting requests while there are enough pages for all tokens of each, up to its last one."""
        while self.waiting and len(self.running) < self.most_running:
            if self._pages(self.waiting[0]) > self.unpromised:
                return
            self.unpromised -= self._pages(self.waiting[0])
            self.running.append(self.waiting.popleft())

    def _parts(self) -> Iterator[tuple[Request, list[int]]]:
        """The requests of a step and their tokens: decoding requests come first, prompts take the rest of the step."""
        room = self.batch_tokens
        for request in sorted(self.running, key=lambda each: not each.generated):
            tokens = request.next_tokens(room)
            if tokens:
                room -= len(tokens)
                yield request, tokens

    def _rows(self, parts: Sequence[tuple[Request, list[int]]]) -> list[list[int]]:
        """The numbers of each part of a Batch."""
        requests = [request for request, _ in parts]
        begins = [0]
        for _, tokens in parts:
            begins.append(begins[-1] + len(tokens))
        slots = [slot for request, tokens in parts for slot in self.pool.extend(request, len(tokens))]
        table = self.pool.page_table(requests, self.most_pages)
        return [
            [token for _, tokens in parts for token in tokens],
            [request.computed + i for request, tokens in parts for i in range(len(tokens))],
            slots,
            self.pool.lengths(requests),
            [end - 1 for end in begins[1:]],
            begins,
            [page for row in table for page in row],
        ]

    def _mixed(self, parts: Sequence[tuple[Request, list[int]]]) -> list[int]:
        self.mixed_steps += 1
        longest = max(len(tokens) for _, tokens in parts)
        batch = Batch(sum(len(tokens) for _, tokens in parts), len(parts), self.most_pages, self._device)
        batch.fill(self._rows(parts))
        found: list[int] = self._forward(batch, longest).tolist()
        return found

    def _decode(self, parts: Sequence[tuple[Request, list[int]]]) -> list[int]:
        """A step of one token each. Rows that pad it to a power of two have length 0: they read and write nothing."""
        self.decode_steps += 1
        batch, forward = self._decoding(1 << (len(parts) - 1).bit_length())
        batch.fill(self._rows(parts))
        found: list[int] = forward().tolist()
        return found

    def _decoding(self, count: int) -> tuple[Batch, Callable[[], Tensor]]:
        """The decoding step of `count` sequences: its inputs, and a function that computes their next tokens."""
        if count not in self.captured:
            batch = Batch(count, count, self.most_pages, self._device)
            self.captured[count] = batch, self._capture(batch) if self.graphs else lambda: self._forward(batch, 1)
        return self.captured[count]

    def _capture(self, batch: Batch) -> Callable[[], Tensor]:
        """The step as a CUDA graph. The GPU also makes its plan in each replay, from the lengths of that replay."""
        batch.fill([[]] * len(batch.sizes))
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._forward(batch, 1)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            tokens = self._forward(batch, 1)

        def replay() -> Tensor:
            graph.replay()
            return tokens

        return replay

    @property
    def _device(self) -> str:
        return str(self.model.head.weight.device)

    def _forward(self, batch: Batch, most_queries: int) -> Tensor:
        """The next token of each sequence, `[sequences]`."""
        op, plan = self.model.op, None
        pages: dict[str, Any] = {"page_table": batch.table, "kv_lengths": batch.lengths}
        decodes = most_queries == 1
        if not decodes:
            pages |= {"cu_seqlens_q": batch.begins, "max_seqlen_q": most_queries}

        def attend(number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            nonlocal plan
            k_cache, v_cache, own = self.k_caches[number], self.v_caches[number], self.model.own[number]
            paging.append(k, v, k_cache, v_cache, batch.slots)
            q = q[:, :, None] if decodes else q
            if plan is None:
                plan = op.plan(q, k_cache, **pages, **own)
            o: Tensor = op(q, k_cache, v_cache, schedule=plan, **pages, **own)
            return o[:, :, 0] if decodes else o

        hidden = self.model(batch.tokens, batch.positions, attend)
        tokens: Tensor = self.model.head(hidden[batch.last]).argmax(-1)
        return tokens


# ------------------------------------------------------------------------------------------------------------- figures


def report(requests: Sequence[Request], seconds: float) -> None:
    """Print the figures that users of a server see: throughput and latencies."""
    first = sorted(request.times[0] - request.arrival for request in requests)
    between = sorted(b - a for each in requests for a, b in zip(each.times, each.times[1:], strict=False))
    generated, prompts = sum(len(r.generated) for r in requests), sum(len(r.prompt) for r in requests)
    print(f"{generated} tokens for {len(requests)} requests with {prompts} prompt tokens in {seconds:.2f} s")
    print(f"  throughput     {generated / seconds:10.1f} tokens/s, with prompts {(generated + prompts) / seconds:.1f}")
    for name, times in (("first token", first), ("between tokens", between)):
        if times:
            mean = sum(times) / len(times)
            shown = ", ".join(f"p{at} {1e3 * times[(len(times) - 1) * at // 100]:.2f}" for at in (50, 99))
            print(f"  {name:14} {1e3 * mean:10.2f} ms, {shown}")


@torch.inference_mode()
def largest_miss(model: Model, requests: Sequence[Request]) -> float:
    """The largest distance of a served token's logit below the likeliest token's, computed without a cache.

    It is in standard deviations of the logits.
    """
    most = 0.0
    for request in requests:
        tokens = torch.tensor([*request.prompt, *request.generated[:-1]], device=model.head.weight.device)
        logits = model.alone(tokens)[len(request.prompt) - 1 :].float()
        served = logits.gather(1, torch.tensor(request.generated, device=tokens.device)[:, None])[:, 0]
        most = max(most, ((logits.amax(-1) - served) / logits.std(-1)).max().item())
    return most


def drawn_requests(count: int, prompt: int, new_tokens: int, vocabulary: int) -> list[Request]:
    """Requests with random prompts of `prompt / 2` to `prompt` tokens."""
    lengths = torch.randint((prompt + 1) // 2, prompt + 1, (count,)).tolist()
    return [Request(torch.randint(vocabulary, (length,)).tolist(), new_tokens) for length in lengths]


def main() -> int:
    """Serve, print the figures, check; returns 0 if all tokens are right."""
    parser = argparse.ArgumentParser(prog="python -m examples.serve", description=__doc__.splitlines()[0])
    parser.add_argument("--variant", choices=sorted(OWN), default="causal", help="attention (default: causal)")
    parser.add_argument("--full", action="store_true", help="serve a model of the size of Llama 3 8B, for a GPU")
    parser.add_argument("--requests", type=at_least(1), help="number of requests; default 12, with --full 64")
    parser.add_argument(
        "--prompt", type=at_least(1), help="length of the longest prompt; default 100, with --full 2048"
    )
    parser.add_argument("--new", type=at_least(1), help="tokens to generate per request; default 12, with --full 256")
    parser.add_argument("--page-size", type=at_least(1), help="tokens per cache page; default 16, with --full 64")
    parser.add_argument("--batch-tokens", type=at_least(1), help="most tokens per step; default 64, with --full 4096")
    parser.add_argument(
        "--running", type=at_least(1), help="most sequences that run at once; default 8, with --full 64"
    )
    parser.add_argument(
        "--no-graphs", action="store_true", help="launch the kernels of every step instead of replaying CUDA graphs"
    )
    args = parser.parse_args()
    defaults = (64, 2048, 256, 64, 4096, 64) if args.full else (12, 100, 12, 16, 64, 8)
    chosen = (args.requests, args.prompt, args.new, args.page_size, args.batch_tokens, args.running)
    count, prompt, new_tokens, page_size, batch_tokens, running = (
        default if value is None else value for value, default in zip(chosen, defaults, strict=True)
    )
    size = LLAMA_8B if args.full else TINY
    if prompt + new_tokens > size.longest:
        parser.error(f"--prompt and --new: expected {size.longest} tokens at most, got {prompt} + {new_tokens}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if args.full else torch.float32
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    with torch.device(device):
        model = Model(size, args.variant)
    torch.set_default_dtype(torch.float32)
    longest = prompt + new_tokens
    graphs = device == "cuda" and not args.no_graphs
    server = Server(
        model,
        pages=running * -(-longest // page_size),
        page_size=page_size,
        longest=longest,
        batch_tokens=batch_tokens,
        most_running=running,
        graphs=graphs,
    )
    if device == "cuda":
        server.warm_up(drawn_requests(running, prompt, min(new_tokens, 4), size.vocabulary))
        torch.cuda.synchronize()
    requests = drawn_requests(count, prompt, new_tokens, size.vocabulary)
    begin = time.perf_counter()
    for request in requests:
        server.add(request)
    server.run()
    seconds = time.perf_counter() - begin
    print(f"{args.variant} on {device}, {dtype}, pages of {page_size} tokens, CUDA graphs {'on' if graphs else 'off'}:")
    print(f"  {server.mixed_steps} steps with prompts, {server.decode_steps} of one token each")
    report(requests, seconds)
    miss = largest_miss(model, requests[:4])
    right = miss <= BOUND[dtype]
    print(f"Served tokens are the likeliest without a cache but for {miss:.1e} standard deviations of the logits.")
    print("All is well." if right else f"FAILED: that is above {BOUND[dtype]:.0e}.")
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())
