"""The prompts of a run: every usable row of the prompt files, by index; one set for training, one per held-out file.

Invariants: indices 0 .. len - 1 number the usable rows in file order, in whatever order they are requested; a prompt
is rendered and tokenised at its first use (while loading, if a length limit is set); the same row gives the same
prompt each time; `fingerprint` changes when a usable row changes, so that a resumed run notices.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import xxhash

from configs.schema import Config
from configs.schema.data import DataConfig
from models.families.source import context_limit
from stages.chat.tokenizer import Tokenizer, load_tokenizer
from stages.data.prepare import PreparedPrompt, Preparer, converse_of, is_conversation, messages_as_json, render_of
from stages.data.rows import BadRow, BadValue, LoadReport, PromptRow, RowKeys, missing_key, parse_row, trusted_functions
from stages.data.sources import Source, open_source
from stages.errors import DataError, EmptyDataError, RowError
from stages.tools.registry import resolve_tools

_LABEL_SAMPLES = 256
_ROW_BYTES = 16 << 20  # a message of one prompt must fit into its stream with room to spare
# Tokens kept, 4 bytes each. Epochs visit prompts cyclically: then keeping the first ones is as good as any eviction.
_CACHED_TOKENS = 64 * 1024 * 1024


NO_TEMPLATE = (
    "apply_chat_template is set, but the tokenizer has no chat template; give one with --chat-template-path, or leave "
    "apply_chat_template off"
)


class PromptSet:
    """All usable prompts of the given files."""

    def __init__(
        self,
        paths: Sequence[str],
        config: DataConfig,
        prepare: Preparer,
        *,
        max_prompt_tokens: int | None = None,
        trusted: frozenset[str] | None = frozenset(),
    ) -> None:
        """Read and check all rows of `paths` (`path@[a:b]`).

        `max_prompt_tokens` is a limit of the run (its context length) beside that of the configuration: the lower one
        holds. Where `prepare` tokenises labels, rows with neither a label nor an answer in their chat are skipped.
        `trusted`: `RowKeys.trusted`. Raises DataError.
        """
        if not paths:
            raise EmptyDataError("prompt_data is empty: name at least one prompt file, as in --prompt-data train.jsonl")
        if config.apply_chat_template and prepare.render is None:
            raise DataError(NO_TEMPLATE)
        limit = min(filter(None, (config.rollout_max_prompt_len, max_prompt_tokens)), default=None)
        self.report = LoadReport()
        self._keys = RowKeys(config.input_key, config.label_key, config.metadata_key, config.tool_key, trusted)
        self._prepare, self._longest = prepare, max_prompt_tokens
        self._sources = [open_source(path, self._keys.wanted()) for path in paths]
        self._cache: dict[int, PreparedPrompt] = {}
        self._cached_tokens = 0
        self._read_all(paths, limit, config.max_bad_rows)

    def __len__(self) -> int:
        return len(self._places)

    def get(self, index: int) -> PreparedPrompt:
        """The prompt of an index. Raises RowError if its chat template fails or its file changed since loading."""
        kept = self._cache.get(index)
        if kept is not None:
            return kept
        position, row = self._places[index].tolist()
        source = self._sources[position]
        try:
            prepared = self._prepare(parse_row(source.row(row), self._keys, source.columns))
        except (BadValue, RowError) as error:
            raise RowError(f"{source.file}:{source.line(row)}: {error}") from None
        self._keep(index, prepared)
        return prepared

    def _keep(self, index: int, prepared: PreparedPrompt) -> None:
        if self._cached_tokens + len(prepared.prompt_ids) <= _CACHED_TOKENS:
            self._cached_tokens += len(prepared.prompt_ids)
            self._cache[index] = prepared

    def _read_all(self, paths: Sequence[str], limit: int | None, most_bad: int | None) -> None:
        places: list[int] = []
        digest = xxhash.xxh3_64()
        for position, (path, source) in enumerate(zip(paths, self._sources, strict=True)):
            count = self.report.add(path, len(source))
            for row in range(len(source)):
                try:
                    parsed = self._admit(source.row(row), source.columns, limit, len(places) // 2)
                    encoded = msgspec.json.encode((parsed.prompt, parsed.label, parsed.metadata, parsed.tools))
                    if len(encoded) > _ROW_BYTES:
                        raise BadValue("too large", f"the row has {len(encoded)} bytes, above {_ROW_BYTES}")
                except (BadValue, RowError) as error:
                    self._skip(source, row, error, most_bad)
                    continue
                places += (position, row)
                count.kept += 1
                digest.update(encoded)
        self._places = np.array(places, np.int64).reshape(-1, 2)  # [len, 2]: which source, which row of it
        self.fingerprint = digest.hexdigest()
        self._refuse_useless()

    def _admit(self, row: object, columns: Sequence[str] | None, limit: int | None, index: int) -> PromptRow:
        """Check one row; raise BadValue if it is not usable. Counts what the report wants to know."""
        parsed = parse_row(row, self._keys, columns)
        shown = parsed.label is None and self._prepare.tokenize_labels
        if shown and not is_conversation(parsed.prompt):
            lacking = f"no label {self._keys.label!r} and no assistant message in {self._keys.input!r}"
            raise BadValue("missing key", f"{lacking}, which is what supervised training learns")
        # The first prompt is prepared even without a limit: a chat template that always fails shows at the start.
        if limit is not None or index == 0:
            prepared = self._prepare(parsed, limit)
            n_tokens = len(prepared.prompt_ids)
            if limit is not None and n_tokens > limit:
                raise BadValue("too long", f"the prompt has {n_tokens} tokens, above the limit of {limit}")
            if self._longest is not None and n_tokens + len(prepared.label_ids) > self._longest + 1:
                whole = n_tokens + len(prepared.label_ids)
                raise BadValue("too long", f"prompt and answer have {whole} tokens, above {self._longest + 1}")
            self.report.longest_tokens = max(self.report.longest_tokens, n_tokens)
            self._keep(index, prepared)
        if parsed.label is None:
            self.report.unlabelled += not shown
        elif len(self.report.labels) < _LABEL_SAMPLES:
            self.report.labels.append(parsed.label)
        if parsed.rm_type is not None:
            self.report.rm_types[parsed.rm_type] = self.report.rm_types.get(parsed.rm_type, 0) + 1
        return parsed

    def _skip(self, source: Source, row: int, error: BadValue | RowError, most_bad: int | None) -> None:
        kind = error.kind if isinstance(error, BadValue) else "bad json"
        bad = BadRow(source.file, source.line(row), str(error), kind)
        if kind == "untrusted":
            raise RowError(str(bad))
        self.report.skip(bad)
        # A long prompt is a fact of good data, which the limit is there to filter; it is no malformed row.
        found = sum(count for why, count in self.report.skipped.items() if why != "too long")
        if most_bad is not None and found > most_bad:
            raise RowError(f"{bad}; with it {found} rows are malformed, above --max-bad-rows {most_bad}; correct them")

    def _refuse_useless(self) -> None:
        report, keys = self.report, self._keys
        if not len(self):
            first = f"; first: {report.bad_rows[0]}" if report.bad_rows else ""
            specs = ", ".join(source.spec for source in report.sources)
            raise EmptyDataError(
                f"no usable prompt in {specs}: all {report.rows} rows were skipped ({report.skip_histogram()}){first}"
            )
        if keys.label is not None and report.unlabelled == report.kept:
            position, row = self._places[0].tolist()
            source = self._sources[position]
            first_row = source.row(row)
            names = list(source.columns or (first_row if isinstance(first_row, dict) else ()))
            raise DataError(
                f"label_key is {keys.label!r}, but none of the {report.kept} usable rows has a label; "
                f"{source.file}:{source.line(row)}: {missing_key(keys.label, names).reason}"
            )


def load_train_prompts(config: Config, tokenizer: Tokenizer) -> PromptSet:
    """The prompts of `--prompt-data`. Raises DataError."""
    return _load(config, config.data, tokenizer, tokenize_labels=config.train.loss_type == "sft_loss")


def row_preparer(config: Config, tokenizer: Tokenizer) -> Preparer:
    """For rows of a data source: text is taken as it stands, messages are rendered."""
    return Preparer(False, tokenizer.encode, tokenizer.encode, render_of(config.data, tokenizer))


def eval_data(config: Config, name: str, path: str) -> DataConfig:
    """The settings with which one held-out set in `path[@[a:b]]` is read: its own over those of training."""
    evaluation, own = config.eval.of(name), msgspec.structs.asdict(config.eval.own(name))
    keys = {"input_key": evaluation.eval_input_key, "label_key": evaluation.eval_label_key} | {
        key: own[key] for key in ("metadata_key", "tool_key", "apply_chat_template", "chat_template_path")
    }
    given = {key: value for key, value in keys.items() if value is not None}
    return msgspec.structs.replace(config.data, prompt_data=(path,), **given)


def load_eval_prompts(config: Config, name: str, path: str) -> PromptSet:
    """The prompts of one held-out set. Raises DataError."""
    data = eval_data(config, name, path)
    return _load(config, data, load_tokenizer(config.train.hf_checkpoint, data.chat_template_path))


def _load(config: Config, data: DataConfig, tokenizer: Tokenizer, *, tokenize_labels: bool = False) -> PromptSet:
    """Plain text gets special tokens (BOS), a rendered chat has its own."""
    context = context_limit(config)  # a longer prompt would leave no token for a response
    if config.environment:
        return _load_tasks(config, data)
    prepare = Preparer(
        data.apply_chat_template,
        lambda text: tokenizer.encode(text, add_special_tokens=True),
        tokenizer.encode,
        render_of(data, tokenizer),
        [tool.schema for tool in resolve_tools(config.tools.tools).values()],
        tokenize_labels,
        converse_of(data, tokenizer) if tokenize_labels and tokenizer.has_chat_template else None,
    )
    longest = None if context is None else context - 1
    return PromptSet(data.prompt_data, data, prepare, max_prompt_tokens=longest, trusted=trusted_functions(config))


def refuse_long(config: Config, data: DataConfig, prompts: PromptSet, tokenizer: Tokenizer) -> None:
    """For prompts whose length is not known yet: at least one is short enough. Raises DataError."""
    context = context_limit(config)
    limit = min(filter(None, (data.rollout_max_prompt_len, context and context - 1)), default=None)
    lengths = (len(tokenizer.encode(prompts.get(index).prompt)) for index in range(len(prompts)))
    if limit is not None and all(length > limit for length in lengths):
        raise DataError(
            f"no prompt of {' '.join(data.prompt_data)} has at most {limit} tokens, which --rollout-max-prompt-len and "
            "the context (--rollout-max-context-len, else the model's) leave for it; raise them, or shorten the prompts"
        )


def _load_tasks(config: Config, data: DataConfig) -> PromptSet:
    """Rows that environments turn into prompts: they travel as messages, and the agents stage makes the tokens."""
    rows = msgspec.structs.replace(data, apply_chat_template=True, rollout_max_prompt_len=None)
    prepare = Preparer(True, lambda _: (0,), lambda _: (0,), messages_as_json)
    return PromptSet(data.prompt_data, rows, prepare, trusted=trusted_functions(config))
