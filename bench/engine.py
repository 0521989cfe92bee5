"""The embedded engine beside `transformers.generate`, in tokens per CPU-second: `python -m bench.engine`.

Both answer the same prompts of the quickstart's model (3 layers, hidden 96, random weights) in this process with one
thread of torch, in turns: the one as the engine's server does, with its own thread and with log-probs, the other one as
a left-padded batch with its KV cache, sdpa and no log-probs. Answers have 2 to 4 tokens, as in the quickstart, or 128
each; a batch of `generate` goes on to its longest answer, and only tokens that were asked for count. Samples of one
prompt share its prefill in the engine. CPU time is that of the whole process.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.report import Series, arguments, finish, machine
from bench.rigs.train_work import quiet
from configs.schema.rollout import EngineConfig
from models.engines.core import Completion
from models.engines.embedded.engine import EmbeddedEngine
from models.engines.intake import Intake
from models.engines.protocol import GenerateRequest, SamplingParams
from models.engines.text import TextCodec
from models.tiny import TinyRecipe, make_tiny_checkpoint

BASELINE, ENGINE = "transformers.generate", "embedded engine"
SHAPES = ((1, 1), (8, 1), (32, 1), (256, 1), (64, 4))  # prompts and samples of each; the quickstart has 64 x 4
LENGTHS = {"2 to 4": (2, 3, 4), "128": (128,)}
PAD, CONTEXT = 0, 256

Answer = Callable[[], object]  # answers all prompts once


def request_of(count: int, samples: int, lengths: Sequence[int]) -> GenerateRequest:
    """`count` different prompts of 4 to 6 tokens, as sums have, and answers of `lengths` in turn."""
    prompts = [[1 + n % 11, 1 + n // 11 % 11, 12, 1 + n // 121, *[13, 14][: n % 3]] for n in range(count)]
    rules = [
        SamplingParams(max_new_tokens=lengths[n % len(lengths)], temperature=1.0, ignore_eos=True, n=samples)
        for n in range(count)
    ]
    return GenerateRequest(input_ids=list(prompts), sampling_params=rules, return_logprob=True)


def by_engine(path: Path, request: GenerateRequest) -> Iterator[Answer]:
    """With a slot for each answer."""
    codec = TextCodec.load(path)
    config = EngineConfig(engine="embedded", engine_device="cpu", engine_slots=request.samples)
    engine = EmbeddedEngine(config, str(path), max_context_len=CONTEXT, codec=codec)
    intake = Intake(engine.facts, codec, lambda: 0)
    done: queue.SimpleQueue[Sequence[Completion]] = queue.SimpleQueue()
    engine.start(done.put, lambda error: None)

    def answer() -> None:
        engine.submit(intake.expand(request)[0])
        left = request.samples
        while left:
            left -= len(done.get())

    yield answer
    asyncio.run(engine.stop())


def by_generate(path: Path, request: GenerateRequest) -> Answer:
    from transformers import AutoModelForCausalLM, GenerationConfig

    rules: Any = request.sampling_params
    rows = [prompt for prompt in request.prompts for _ in range(rules[0].n)]
    width, longest = max(map(len, rows)), max(rule.max_new_tokens for rule in rules)
    ids = torch.tensor([[PAD] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa").eval()
    # Without an end of sequence, so that each answer has its length.
    model.generation_config = GenerationConfig(
        pad_token_id=PAD, max_new_tokens=longest, use_cache=True, do_sample=True, temperature=1.0, top_k=0
    )

    def answer() -> torch.Tensor:
        with torch.inference_mode():
            made: torch.Tensor = model.generate(ids, attention_mask=mask)
        return made

    return answer


def compare(setting: str, path: Path, request: GenerateRequest, rounds: int, least_s: float) -> list[Series]:
    """Both contenders in turns, after a first answer of each that is not counted."""
    rules: Any = request.sampling_params
    tokens = sum(rule.max_new_tokens * rule.n for rule in rules)
    engine = by_engine(path, request)
    contenders = {BASELINE: by_generate(path, request), ENGINE: next(engine)}
    values: dict[str, list[float]] = {name: [] for name in contenders}
    for number, (name, answer) in itertools.product(range(rounds + 1), contenders.items()):
        answers, began, spent = 0, time.process_time(), 0.0
        while spent < (least_s if number else 1e-6):
            answer()
            answers, spent = answers + 1, time.process_time() - began
        values[name] += [answers * tokens / spent] if number else []
    next(engine, None)
    return [Series(setting, name, "tokens/CPU-s", found) for name, found in values.items()]


def main() -> None:
    options = arguments(__doc__, "engine", "1 round of 0.1 CPU-s for each contender, not 5 of 0.5 s").parse_args()
    rounds, least_s = options.rounds or (1 if options.quick else 5), 0.1 if options.quick else 0.5
    about = machine(["torch", "transformers", "numpy"])
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    quiet()
    series: list[Series] = []
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as home:
        path = make_tiny_checkpoint(Path(home, "model"), TinyRecipe(tokenizer="arithmetic"))
        for (answers, lengths), (prompts, samples) in itertools.product(LENGTHS.items(), SHAPES):
            setting = f"{prompts} prompts x {samples}, {answers} tokens"
            print(setting, flush=True)
            series += compare(setting, path, request_of(prompts, samples, lengths), rounds, least_s)
    remarks = [f"{rounds} rounds of at least {least_s:g} CPU-s, contenders alternate, one thread of torch", about.load]
    finish(options.output, about, remarks, series, baseline=BASELINE)


if __name__ == "__main__":
    main()
