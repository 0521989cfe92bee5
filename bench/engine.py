"""The embedded engine beside `transformers.generate`, in tokens per CPU-second: `python -m bench.engine`.

Both answer the same prompts of a random Qwen3 (hidden 96) in this process with one thread of torch, in turns: the one
as the engine's server does, with its own thread and with log-probs, the other one as a left-padded batch with its KV
cache, sdpa and no log-probs. Answers have 2 to 4 tokens, as in the quickstart, or 128 each; a batch of `generate` goes
on to its longest answer, and only tokens that were asked for count. Samples of one prompt share its prefill in the
engine. CPU time is that of the whole process.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import queue
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bench.report import Series, arguments, finish, machine
from configs.schema.rollout import EngineConfig
from models.engines.core import Completion
from models.engines.embedded.engine import EmbeddedEngine
from models.engines.intake import Intake
from models.engines.protocol import GenerateRequest, SamplingParams
from models.engines.text import TextCodec
from models.tiny import TokenizerKind, make_tiny_checkpoint

BASELINE, ENGINE = "transformers.generate", "embedded engine"
# Tokenizer of the checkpoint: "arithmetic" is the quickstart's model, with 32 ids; "bytes" has 264.
MODELS: dict[str, TokenizerKind] = {"quickstart": "arithmetic", "bytes": "bytes"}
SHAPES = ((1, 1), (8, 1), (32, 1), (256, 1), (64, 4))  # prompts and samples of each; the quickstart has 64 x 4
LENGTHS, TEMPERATURES = {"2 to 4": (2, 3, 4), "128": (128,)}, (1.0, 0.0)
CONTEXT = 256
PAD = 0

Answer = Callable[[], int]  # answers all prompts once; returns the number of tokens that were asked for


class OperationCount(TorchDispatchMode):  # type: ignore[misc]  # torch has no types for it
    """Counts the operations that torch dispatches in this thread, views among them."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def prompts_of(count: int) -> list[list[int]]:
    """`count` different prompts of 4 to 6 tokens, as sums have."""
    return [[1 + n % 11, 1 + n // 11 % 11, 12, 1 + n // 121, *[13, 14][: n % 3]] for n in range(count)]


@dataclass(frozen=True)
class Work:
    """What both answer: `samples` answers of `lengths` tokens to each prompt."""

    prompts: list[list[int]]
    lengths: list[int]
    samples: int
    temperature: float

    @property
    def answers(self) -> int:
        return len(self.prompts) * self.samples

    @property
    def tokens(self) -> int:
        return sum(self.lengths) * self.samples


def by_engine(path: Path, work: Work) -> Iterator[Answer]:
    """One request for all prompts, to an engine with a slot for each answer."""
    codec = TextCodec.load(path)
    config = EngineConfig(engine="embedded", engine_device="cpu", engine_slots=work.answers)
    engine = EmbeddedEngine(config, str(path), max_context_len=CONTEXT, codec=codec)
    intake = Intake(engine.facts, codec, lambda: 0)
    done: queue.SimpleQueue[Sequence[Completion]] = queue.SimpleQueue()
    engine.start(done.put, lambda error: None)
    rules = [
        SamplingParams(max_new_tokens=length, temperature=work.temperature, ignore_eos=True, n=work.samples)
        for length in work.lengths
    ]
    request = GenerateRequest(input_ids=list(work.prompts), sampling_params=rules, return_logprob=True)

    def answer() -> int:
        engine.submit(intake.expand(request)[0])
        answers: list[Completion] = []
        while len(answers) < work.answers:
            answers += done.get()
        return sum(len(completion.output_ids) for completion in answers)

    yield answer
    asyncio.run(engine.stop())


def by_generate(path: Path, work: Work) -> Answer:
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa").eval()
    width, longest = max(map(len, work.prompts)), max(work.lengths)
    rows = [prompt for prompt in work.prompts for _ in range(work.samples)]
    ids = torch.tensor([[PAD] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    sampling: dict[str, Any] = {"do_sample": work.temperature > 0.0, "use_cache": True}
    if work.temperature > 0.0:
        sampling |= {"temperature": work.temperature, "top_k": 0}
    # Without an end of sequence, so that each answer has its length.
    model.generation_config = GenerationConfig(pad_token_id=PAD, max_new_tokens=longest, **sampling)

    def answer() -> int:
        with torch.inference_mode():
            made = model.generate(ids, attention_mask=mask)
        if made.shape != (work.answers, width + longest):
            raise RuntimeError(f"generate made {tuple(made.shape)}")
        return work.tokens

    return answer


def tokens_per_cpu_second(answer: Answer, least_s: float) -> float:
    tokens, began = 0, time.process_time()
    while (spent := time.process_time() - began) < least_s:
        tokens += answer()
    return tokens / spent


def operations(path: Path, requests: int = 8) -> int:
    """Operations of torch in one decode step."""
    codec = TextCodec.load(path)
    config = EngineConfig(engine="embedded", engine_device="cpu", engine_slots=requests)
    engine = EmbeddedEngine(config, str(path), max_context_len=CONTEXT, codec=codec)
    rule = SamplingParams(max_new_tokens=8, ignore_eos=True)
    request = GenerateRequest(input_ids=list(prompts_of(requests)), sampling_params=rule)
    engine.stepper.submit(Intake(engine.facts, codec, lambda: 0).expand(request)[0])
    engine.stepper.step()
    with OperationCount() as count:
        engine.stepper.step()
    return sum(count.counts.values())


def main() -> None:
    parser = arguments(__doc__, "engine", "1 round of 0.1 s for each contender, not 5 of 0.5 s")
    options = parser.parse_args()
    rounds, least_s = options.rounds or (1 if options.quick else 5), 0.1 if options.quick else 0.5
    about = machine(["torch", "transformers", "numpy"])
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    series: list[Series] = []
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as home:
        paths = {
            name: make_tiny_checkpoint(Path(home) / name, tokenizer=tokenizer) for name, tokenizer in MODELS.items()
        }
        shallow = make_tiny_checkpoint(Path(home) / "shallow", tokenizer="arithmetic", num_layers=2)
        deep, less = operations(paths["quickstart"]), operations(shallow)
        for name, path in paths.items():
            shapes = itertools.product(LENGTHS.items(), TEMPERATURES, SHAPES)
            for (answers, cycle), temperature, (prompts, samples) in shapes:
                work = Work(prompts_of(prompts), [cycle[n % len(cycle)] for n in range(prompts)], samples, temperature)
                drawn = "sampled" if temperature else "greedy"
                setting = f"{name}, {prompts} prompts x {samples}, {answers} tokens, {drawn}"
                print(setting, flush=True)
                series += compare(setting, path, work, rounds, least_s)
    remarks = [
        f"{rounds} rounds of at least {least_s:g} CPU-s, contenders alternate, one thread of torch",
        f"a decode step of the engine: {deep - less} operations of torch per layer, {3 * less - 2 * deep} beside them",
        about.load,
    ]
    finish(options.output, about, remarks, series, baseline=BASELINE)


def compare(setting: str, path: Path, work: Work, rounds: int, least_s: float) -> list[Series]:
    """Both contenders in turns, after a first answer of each that is not counted."""
    engine = by_engine(path, work)
    contenders = {BASELINE: by_generate(path, work), ENGINE: next(engine)}
    values: dict[str, list[float]] = {name: [] for name in contenders}
    for answer in contenders.values():
        answer()
    for _ in range(rounds):
        for name, answer in contenders.items():
            values[name].append(tokens_per_cpu_second(answer, least_s))
    next(engine, None)
    return [Series(setting, name, "tokens/CPU-s", found) for name, found in values.items()]


if __name__ == "__main__":
    main()
