"""The documentation: links, flags, names, metrics, and code blocks that run."""

from __future__ import annotations

import ast
import asyncio
import importlib
import re
import tomllib
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench.plan import Job
from bench.report import rendered
from configs.command_line import RESERVED, RETIRED, parse
from configs.flags import flags
from configs.load import load_arguments
from configs.schema import Config, EnvironmentConfig, TrainConfig
from configs.slime_options import ALIASES, MODEL_ARGS, NOT_HERE, TAKEN
from configs.translate import RULES
from models.tiny import TinyRecipe, make_tiny_checkpoint
from stages.agents.environment import Task, Turn
from stages.agents.worker import Hosted, answers
from stages.chat.messages import Message, ToolCall
from tests.docs.pages import FENCE, LINK, PAGES, ROOT, blocks, page_id

FLAG = re.compile(r"(?<![\w-])--([a-z][a-z0-9-]*)")

# Flags of other programs, of the engine server's own command line, and of `launch.py samples` and `status`.
FOREIGN = {f.name.replace("_", "-") for f in msgspec.structs.fields(Job)} | {
    "logdir", "quick", "strict", "local-dir", "model-path", "port", "hf", "megatron", "out", "published", "in-flight",
    "replicas", "reward-s", "system-prompt", "output-format", "host", "token-file", "step", "group", "reward", "failed",
    "untrained", "json", "toml", "best", "to", "trl", "plot", "rounds", "late", "far", "address", "head", "labels",
    "working-dir", "repo-type", "steer", "open", "output", "sizes", "receivers", "engines",
}  # fmt: skip
# Written on purpose as mistakes, or as a value that looks like a flag.
WRONG = {"rollout-batch-sise", "rollout-batch", "end", "no-rope-fusion"}
WRONG |= {*MODEL_ARGS, *ALIASES, *TAKEN, *NOT_HERE, *RULES}

GROUPS = ("train", "rollout", "staleness", "reward", "filter", "perf", "ledger", "eval", "axis", "stage")
NOT_METRICS = {"eval/released", "eval/", "staleness/token_hist/"}  # a topic key, prefixes


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_relative_links_resolve(page: Path) -> None:
    text = page.read_text()
    for target in LINK.findall(FENCE.sub("", text)):
        if re.match(r"[a-z]+://", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page_id(page)} links to {target}, which does not exist"
        if anchor:
            assert anchor in anchors(file.read_text()), f"{page_id(page)} links to {target}, which has no such heading"


def test_links_by_name_have_a_target() -> None:
    text = (ROOT / "README.md").read_text()
    targets = re.findall(r"^\[([\w-]+)\]: https://\S+$", text, re.MULTILINE)
    assert sorted(set(re.findall(r"\]\[([\w-]+)\]", text))) == sorted(targets)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_files_that_are_named_exist(page: Path) -> None:
    folders = "tests|stages|pipeline|transport|models|configs|bench|docs"
    for name in re.findall(rf"`((?:{folders})/[\w./-]*)`", page.read_text()):
        assert (ROOT / name).exists(), f"{page_id(page)} names {name}, which does not exist"


def test_every_page_is_reached_from_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        assert page_id(page) in readme, f"README.md does not link to {page_id(page)}"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_flags_exist(page: Path) -> None:
    names = {flag.name for flag in flags() if flag.name is not None}
    known = names | {f"no-{flag.name}" for flag in flags() if flag.negatable} | set(RESERVED) | FOREIGN | WRONG
    if page.name == "CHANGELOG.md":
        known |= {key.partition(".")[2].replace("_", "-") for key in RETIRED}
    sections = {flag.key for flag in flags()}
    for name in FLAG.findall(page.read_text()):
        passed_on = name.startswith(("sglang-", "router-", "megatron-"))  # options of the installed program
        assert name in known or passed_on or any(key.startswith(f"{name}.") for key in sections), (
            f"{page_id(page)} mentions --{name}, which is no flag"
        )


def source_names() -> tuple[set[str], set[str], str]:
    """Literal metric names in the source, patterns of computed ones (`eval/*`), and all of the source."""
    text = "\n".join(
        path.read_text() for package in ("models", "stages", "pipeline") for path in (ROOT / package).rglob("*.py")
    )
    prefix = "|".join(GROUPS)
    found = set(re.findall(rf'f?"((?:{prefix})/[A-Za-z0-9_/{{}}-]*)"', text)) - NOT_METRICS
    literal = {name for name in found if "{" not in name}
    patterns = {re.sub(r"\{\w+\}", "*", name) for name in found if "{" in name}
    return literal, patterns, text


def test_metric_names_of_the_source_and_of_the_page_are_the_same() -> None:
    literal, patterns, text = source_names()
    documented = set(re.findall(rf"`((?:{'|'.join(GROUPS)})/[^`\s]+)`", (ROOT / "docs" / "metrics.md").read_text()))
    assert literal - documented == set(), "docs/metrics.md lacks these"
    assert len(literal) > 50, "the pattern of this test finds no names any more"
    for name in documented - literal:
        generic = re.sub(r"<\w+>", "*", name)
        if "*" in generic:
            assert generic in patterns, f"docs/metrics.md has {name}, which nothing in the source writes"
            continue
        # A computed name such as f"ledger/{name}": its last part must then stand in the source as a word of its own.
        last = name.rpartition("/")[2]
        assert any(fnmatch(name, pattern) for pattern in patterns), f"docs/metrics.md has {name}, not in the source"
        assert f'"{last}"' in text, f"docs/metrics.md has {name}, but {last!r} is nowhere in the source"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_code_blocks_are_closed_and_named_and_those_of_python_parse_and_import_what_is_there(page: Path) -> None:
    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block, filename=page_id(page))):
            if isinstance(node, ast.ImportFrom) and node.module and (ROOT / node.module.partition(".")[0]).is_dir():
                module = importlib.import_module(node.module)
                assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == [], node.module
    fences = re.findall(r"^```(\w*)$", page.read_text(), re.MULTILINE)
    assert len(fences) % 2 == 0, f"{page_id(page)} has a code block that is not closed"
    for opening, closing in zip(fences[::2], fences[1::2], strict=True):
        assert opening, f"{page_id(page)} has a code block without a language"
        assert not closing


def ran(page: Path, scope: dict[str, Any]) -> dict[str, Any]:
    """The names that a page's blocks leave, run one after the other."""
    for block in blocks(page, "python"):
        exec(compile(block, page_id(page), "exec"), scope)
    return scope


def test_custom_stage_examples_run(tmp_path: Path) -> None:
    """The page's blocks in one namespace; its test, its loop stage and README's stage through memory ports."""
    scope = ran(ROOT / "docs" / "custom_stages.md", {"__name__": "custom_stages_page"})
    scope["test_length_penalty"]()
    make_tiny_checkpoint(tmp_path / "tiny", TinyRecipe(tokenizer="arithmetic", seed=0))
    check = {**scope, "CONFIG": Config(train=TrainConfig(hf_checkpoint=str(tmp_path / "tiny")))}
    exec(LOOP_CHECK, check)
    ran(ROOT / "README.md", scope)
    exec("(result,) = asyncio.run(run_stage(LengthPenalty, [a_slice(4)])); reward = result.samples[0].reward", scope)
    assert scope["reward"] == pytest.approx(0.96)


# Runs in the page's namespace, where AskAgain, run_stage and a_slice are.
LOOP_CHECK = """
class WithTokenizer(AskAgain):
    def __init__(self, context):
        super().__init__(context)
        self.config = CONFIG

message = a_slice(n_tokens=3)
assert AskAgain.wants(CONFIG, {}, message)
(result,) = asyncio.run(run_stage(WithTokenizer, [message]))
(sample,) = result.samples
assert sample.response == "xxx10+0="
assert sample.response_length == 8 and int(sample.loss_mask.sum()) == 3
assert sample.fault() is None

assert Game.wants(CONFIG, {}, message)
for turn in range(3):
    assert not message.samples[0].done
    (message,) = asyncio.run(run_stage(Game, [message], moves=3))
(sample,) = message.samples
assert sample.done and sample.reward == 1.0 and [one.reward for one in sample.turn_rewards] == [0.1] * 3
assert sample.response == "xxx" + "your move" * 2
assert sample.fault() is None
"""


PAGE = ROOT / "docs" / "agents.md"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The modules of the page, as files of the names that stand in them."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_project").mkdir()
    for block in blocks(PAGE, "python"):
        if block.startswith("# my_project/"):
            (tmp_path / block.splitlines()[0].removeprefix("# ")).write_text(block)
    return tmp_path


def test_the_environments_of_the_page_are_such(project: Path) -> None:
    assert list(answers(["check", "my_project.coins:Coins", '{"most": 40}'])) == [Hosted("environment", tasks=True)]
    assert list(answers(["check", "my_project.library:Library", '{"max_calls": 2}'])) == [Hosted("environment")]
    tasks: Any = list(islice(answers(["tasks", "my_project.coins:Coins", '{"most": 3}', "train", "1", "20"]), 30))
    assert {task["amount"] for task in tasks} == {1, 2, 3}
    assert len(tasks) == 20


def test_the_test_of_the_page_passes_and_its_tool_answers(project: Path) -> None:
    scope = ran(PAGE, {"__name__": "agents_page"})
    scope["test_coins"]()

    async def ask() -> Any:
        library = scope["Library"]()
        await library.reset(Task())
        calls = tuple(ToolCall("shelf", {"title": title}) for title in ("Emma", "Ema"))
        return await library.step(Turn(0, Message("assistant", tool_calls=calls), ""))

    assert [message.content for message in asyncio.run(ask()).messages] == ["A3", "error: KeyError: 'Ema'"]


def test_the_recipe_of_the_page_loads(project: Path) -> None:
    recipe, mixed = [body for language, body in FENCE.findall(PAGE.read_text()) if language == "toml"]
    (project / "coins.toml").write_text(recipe)
    config = load_arguments(parse(["--config", str(project / "coins.toml"), "--num-rollout", "1"])).config
    (table,) = config.environment
    assert (table.class_path, table.options) == ("my_project.coins:Coins", {"most": 40})
    assert config.rollout.max_turns == tomllib.loads(recipe)["rollout"]["max_turns"]

    (project / "mixed.toml").write_text(mixed)
    both = load_arguments(parse(["--config", str(project / "mixed.toml"), "--num-rollout", "1"])).config
    assert [table.name for table in both.environment] == ["guess_number", "maze"]


def test_the_keys_of_the_table_are_on_the_page() -> None:
    section = PAGE.read_text().partition("## The table")[2].partition("\n## ")[0]
    reported = [line.split("`")[1] for line in section.splitlines() if line.startswith("| `")]
    assert reported == list(EnvironmentConfig.__struct_fields__)


def test_tables_of_benchmarks_are_those_of_the_stored_documents() -> None:
    """`python -m bench.report` writes them again."""
    page, documents = ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "benchmarks"
    named = re.findall(r"^<!-- (\w+) -->$", page.read_text(), re.MULTILINE)
    assert sorted(set(named) - {"end"}) == sorted(path.stem for path in documents.iterdir())
    assert rendered(page.read_text(), documents) == page.read_text()
