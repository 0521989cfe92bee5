"""Options that are passed on to SGLang, its router and Megatron-core, and what is refused about engines."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from configs.command_line import parse
from configs.layers import ConfigError
from configs.load import dump_toml, read_recipe
from models.errors import TrainConfigInvalid
from models.train.megatron import option_fields
from models.train.megatron.option_fields import DATACLASSES, fields_of
from models.train.megatron.options import option_faults, options_of
from tests.configs.config_rig import BASE, faults_of, read, recipe, warnings_of

SGLANG = f"{BASE} --engine sglang"
ADDRESSES = "--rollout-external-engine-addrs http://127.0.0.1:31000 http://127.0.0.1:31001"


def values(argv: str) -> dict[str, Any]:
    return dict(parse(argv.split()).layer.values)


def test_all_ways_of_writing_an_option_meet(tmp_path: Path) -> None:
    mine = recipe(tmp_path, '[sglang.sglang_args]\ndtype = "auto"\nmax_total_tokens = 4096\n')
    config = read(f"--config {mine} sglang.sglang_args.page_size=16 --sglang-dtype float32").config
    assert config.sglang.sglang_args == {"dtype": "float32", "max_total_tokens": 4096, "page_size": 16}


def test_options_survive_the_run_directory(tmp_path: Path) -> None:
    """A resumed run reads them from its config.toml."""
    argv = "--sglang-lora-paths a b --sglang-disable-radix-cache --router-prefill http://p:1 9000"
    config = read(SGLANG, argv).config
    again = read_recipe(recipe(tmp_path, dump_toml(config))).values
    assert again["sglang.sglang_args"] == config.sglang.sglang_args
    assert config.router.router_args == {"prefill": ["http://p:1 9000"]}


def test_a_repeated_option_counts_once_but_prefill_and_decode_add_up() -> None:
    argv = "--router-prefill http://p:1 9000 --router-prefill http://q:1 --router-decode http://d:1"
    found = values(argv)["router.router_args"]
    assert found == {"prefill": ["http://p:1 9000", "http://q:1"], "decode": ["http://d:1"]}
    assert values("--sglang-dtype auto --sglang-dtype half")["sglang.sglang_args"] == {"dtype": "half"}


@pytest.mark.parametrize(("argv", "sentence"), [
    ("--sglang-pyton x", "--sglang-pyton is no flag; did you mean --sglang-python?"),
    ("--router-polcy random", "--router-polcy is no flag; did you mean --router-policy?"),
    ("--router-adress http://h:1", "--router-adress is no flag; did you mean --router-address?"),
    ("--sgalng-python x", "--sgalng-python is no flag; did you mean --sglang-python?"),
    ("--no-sglang-enable-metrics", "is passed on; leave it out, or write sglang.sglang_args.enable_metrics=false"),
    ("--router-no-enable-igw", "or write router.router_args.enable_igw=false"),
    ("--sglang_page_size 1", "--sglang_page_size is no flag, for names are written with dashes; write --sglang-pa"),
    ("--sglang- 3", "--sglang- is no flag"),
])  # fmt: skip
def test_slips_near_a_flag_of_our_own_are_refused(argv: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse([*argv.split(), "--seed", "1"])
    (fault,) = caught.value.faults
    assert sentence in fault


def test_right_combinations_pass() -> None:
    for argv in (
        SGLANG, f"{SGLANG} --router none --router-policy session",
        f"{SGLANG} --router none --router-policy least_loaded",
        f"{SGLANG} {ADDRESSES} --router-address http://[::1]:30000/",
        f"{BASE} --router sglang",  # a router in front of the embedded engine
        f"{BASE} --router-policy least_loaded", f"{BASE} --group-deadline-secs 5 --sample-deadline-secs 9",
        f"{SGLANG} --update-weight-transport distributed --rollout-num-gpus 4",
        f"{BASE} --update-weight-transport delta --update-weight-delta-dir /shared",
    ):  # fmt: skip
        assert warnings_of(argv) == ()


@pytest.mark.parametrize(("argv", "sentence"), [
    ("--rollout-num-gpus 7 --rollout-num-gpus-per-engine 2", "for an engine takes whole GPUs; set it to 6"),
    ("--rollout-num-gpus 1 --rollout-num-gpus-per-engine 2", "set it to 2"),
    ("--rollout-num-gpus 4 --scale engine=3", "gives 4 engines of 1 GPUs, but --scale says engine=3"),
    ("--rollout-external-engine-addrs 127.0.0.1:31000", "holds '127.0.0.1:31000', but an address must have the"),
    ("--rollout-external-engine-addrs http://h", "holds 'http://h', but an address must have the form"),
    ("--rollout-external-engine-addrs http://localhost:99999", "holds 'http://localhost:99999', but an address"),
    ("--rollout-external-engine-addrs http://localhost:1/ http://localhost:1",
     "holds 'http://localhost:1' 2 times, but each is one"),
    (f"{ADDRESSES} --engine embedded", "whose engines are started with the run; add --engine"),
    (f"{ADDRESSES} --rollout-num-gpus 2", "no engine is started; leave one of them out"),
    (f"{ADDRESSES} --scale engine=3", "--scale engine=3 contradicts the 2 addresses"),
    (f"{ADDRESSES} --mode sync --colocate", "but engines that run already keep theirs; leave out --colocate"),
    ("--router-address h:1", "--router-address holds 'h:1', but an address must have the form http://host:port"),
    ("--router-address http://localhost:1 --router none", "--router is none, but --router-address names one"),
    ("--rollout-external-engine-addrs http://10.0.0.1:1", "is another machine without TLS: anyone who can read"),
    ("--router-address http://h:1", "give an https:// address, or --allow-plain-engines on a network"),
    ("--frozen-engine judge=http://h:1", "--frozen-engine http://h:1 is another machine without TLS"),
    ("--router-policy least_loaded", "but a router (sglang) stands in front of the engines; add --router none"),
    ("--engine simulated --update-weight-transport tensor", "takes weights by disk and delta only; choose"),
    ("--engine embedded --update-weight-transport distributed", "but the embedded engine takes weights by"),
    ("--engine sglang --update-weight-transport tensor --runner ray --rollout-num-gpus 2",
     "copies to each engine's own GPUs, but with --runner ray"),
    ("--update-weight-delta-dir /d", "is /d, but only --update-weight-transport delta reads it"),
    ("--group-deadline-secs 9 --sample-deadline-secs 9", "is 9, but must be less than --sample-deadline"),
])  # fmt: skip
def test_each_refusal_in_its_words(argv: str, sentence: str) -> None:
    (fault,) = faults_of(SGLANG, argv)
    assert sentence in fault


@pytest.mark.parametrize(("argv", "sentence"), [
    (f"{BASE} --sglang-dtype half", "--sglang-dtype has no effect: --engine is embedded"),
    (f"{SGLANG} {ADDRESSES} --sglang-dtype half", "--sglang-dtype has no effect: the engines run already"),
    (f"{BASE} --rollout-num-gpus 2", "have no effect with --engine embedded; use --scale engine=N"),
    (f"{BASE} --router-dp-aware", "--router-dp-aware has no effect: this run has no router"),
    (f"{SGLANG} --router-address http://localhost:1 --router-dp-aware", "has no effect: the router runs"),
    (f"{SGLANG} --router-address http://localhost:1 --router-policy random", "--router-address has its own policy"),
    (f"{SGLANG} --allow-plain-engines --rollout-external-engine-addrs http://10.0.0.1:1",
     "memory, which http://10.0.0.1:1 cannot read"),
    (f"{SGLANG} --mode sync --colocate --update-weight-transport distributed",
     "cannot join two processes on one GPU; with --colocate use tensor"),
    (f"{SGLANG} --update-weight-rolling 2", "--update-weight-rolling 2 lets all 1 engines stand still at once"),
])  # fmt: skip
def test_each_warning_in_its_words(argv: str, sentence: str) -> None:
    (warning,) = warnings_of(argv)
    assert sentence in warning


needs_megatron = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")
ROOT = Path(__file__).resolve().parents[2]


def given(argv: str) -> dict[str, Any]:
    """The object of options that a command line makes."""
    found: dict[str, Any] = values(argv)["megatron.megatron_args"]
    return found


@needs_megatron
def test_options_by_dataclass_and_type() -> None:
    args = given(
        "--megatron-bucket-size 40000000 --megatron-fp8 none --megatron-moe-router-dtype fp32 "
        "--megatron-recompute-modules core_attn moe --megatron-cp-comm-type p2p --megatron-tp-comm-overlap "
        "--megatron-moe-expert-capacity-factor 1 --megatron-delay-wgrad-compute true --megatron-cuda-graph-impl none"
    )
    transformer = {"fp8": None, "moe_router_dtype": "fp32", "recompute_modules": ["core_attn", "moe"]}
    transformer |= {"cp_comm_type": "p2p", "moe_expert_capacity_factor": 1.0, "tp_comm_overlap": True}
    transformer |= {"delay_wgrad_compute": True, "cuda_graph_impl": "none"}
    ddp = {"bucket_size": 40_000_000, "delay_wgrad_compute": True}
    assert [options_of(args, group) for group in DATACLASSES] == [transformer, {}, ddp]
    assert [options_of({}, group) for group in DATACLASSES] == [{}, {}, {}]


@needs_megatron
def test_typed_values_of_a_recipe() -> None:
    assert option_faults({"bucket_size": 4, "tp_comm_overlap": False, "recompute_modules": ["mlp"]}) == ()
    assert options_of({"fp8": None}, "transformer") == {"fp8": None}
    wrong = [("bucket_size", 4.5), ("bucket_size", True), ("tp_comm_overlap", 1), ("fp8_margin", "x")]
    for name, value in (*wrong, ("fp8_margin", None)):
        assert len(option_faults({name: value})) == 1, name
    assert len(option_faults({"lr": "1", "bucket_size": "x", "nothing": "1", "overlap_p2p_comm": "true"})) == 3


@needs_megatron
@pytest.mark.parametrize(("argv", "words"), [
    ("--megatron-atention-backend flash", "did you mean --megatron-attention-backend?"),
    ("--megatron-qqq 1", "is no field of the installed megatron-core's TransformerConfig, OptimizerConfig or"),
    ("--megatron-attention-backend flas", "is flas, but must be flash or fused or unfused or local or"),
    ("--megatron-bucket-size big", "is big, but must be a whole number or none; give for example 1"),
    ("--megatron-exp-avg-dtype int4", "is int4, but must be fp32, bf16, fp16 or fp8; give for example bf16"),
    ("--megatron-fp8-margin 1 2", "--megatron-fp8-margin is ['1', '2'], but must be a whole number"),
    ("--megatron-tp-comm-overlap 1", "is 1, but must be true or false; give for example true"),
    ("--megatron-hidden-size 64", "is 64, but that is what the model is, and comes from its config.json"),
    ("--megatron-kv-lora-rank 64", "comes from its config.json; leave it out"),
    ("--megatron-lr 1", "is 1, but Sluice has a flag of its own for it; use --lr"),
    ("--megatron-bf16", "--megatron-bf16 is true, but Sluice has a flag of its own for it; use --train-dtype"),
    ("--megatron-params-dtype bf16", "use --train-dtype"),
    ("--megatron-use-megatron-fsdp", "use --train-backend fsdp"),
    ("--megatron-hidden-dropout 0.1", "dropout is 0"),
    ("--megatron-moe-aux-loss-coeff 0.01", "an auxiliary loss would get a wrong weight"),
    ("--megatron-average-in-collective", "gradients are sums that the trainer itself divides"),
    ("--megatron-grad-scale-func f", "takes an object of Python, not text; leave it out"),
])  # fmt: skip
def test_refusals(argv: str, words: str) -> None:
    (fault,) = option_faults(given(argv))
    assert words in fault
    with pytest.raises(TrainConfigInvalid, match="--megatron-"):
        options_of(given(argv), "ddp")


@needs_megatron
def test_without_megatron_core(monkeypatch: pytest.MonkeyPatch) -> None:
    fields_of.cache_clear()
    option_fields._module.cache_clear()
    monkeypatch.setattr(option_fields.importlib.util, "find_spec", lambda name: None)
    (fault,) = option_faults({})
    assert "--train-backend is megatron, but megatron-core is not installed in this environment" in fault


@needs_megatron
def test_nothing_of_megatron_is_imported() -> None:
    """It takes seconds, and without a GPU must not happen before the shim is in place."""
    code = "import sys; from models.train.megatron.options import option_faults; "
    code += "option_faults({'fp8': 'none'}); "
    code += "print([name for name in sys.modules if name.startswith(('megatron.core', 'torch'))])"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def rules_of(annotation: str) -> list[str]:
    return [kind.rule for kind in option_fields._kinds(ast.parse(annotation, mode="eval").body)]


@needs_megatron
def test_annotations() -> None:
    assert rules_of("Optional[int]") == ["a whole number", "none"]
    assert rules_of("int | None") == ["a whole number", "none"]
    assert rules_of("Union[int, List[str]]") == ["a whole number", "a list of text"]
    assert rules_of("Literal['a', 'b']") == ["a or b"]
    assert rules_of("Tuple[int, int]") == ["a list of a whole number"]
    assert rules_of("Callable[[int], int]") == []
    assert rules_of("'Optional[torch.dtype]'") == ["fp32, bf16, fp16 or fp8", "none"]


@needs_megatron
def test_an_option_that_is_passed_on_is_not_turned_off() -> None:
    (fault,) = faults_of("--no-megatron-tp-comm-overlap")
    assert "write megatron.megatron_args.tp_comm_overlap=false" in fault


@needs_megatron
def test_options_of_megatron_lm_without_a_prefix() -> None:
    args = given("--moe-permute-fusion --attention-backend flash --accumulate-allreduce-grads-in-fp32")
    assert args == {"moe_permute_fusion": True, "attention_backend": "flash", "grad_reduce_in_fp32": True}
    assert given("megatron.megatron_args.masked_softmax_fusion=false") == {"masked_softmax_fusion": False}


@needs_megatron
@pytest.mark.slow
def test_the_fields_are_those_of_the_dataclasses() -> None:
    """The source says what the imported classes are, and the converted values are what they take."""
    code = """
import dataclasses, json, warnings
from models.train.megatron.processes import install_shim
install_shim()
warnings.simplefilter("ignore")
from megatron.core.distributed import DistributedDataParallelConfig as D
from megatron.core.optimizer import OptimizerConfig as O
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import MLATransformerConfig as T
import torch
from models.train.megatron.options import options_of
args = {"attention_backend": "flash", "exp_avg_dtype": "bf16", "main_grads_dtype": "fp32"}
assert (got := options_of(args, "transformer")) == {"attention_backend": AttnBackend.flash}, got
assert (got := options_of(args, "optimizer")) == {"exp_avg_dtype": torch.bfloat16, "main_grads_dtype": torch.float32}
print(json.dumps([[f.name for f in dataclasses.fields(c) if not f.name.startswith("_")] for c in (T, O, D)]))
"""
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr[-2000:]
    names = ast.literal_eval(found.stdout.strip().splitlines()[-1])
    for group, expected in zip(DATACLASSES, names, strict=True):
        assert set(fields_of(group)) == set(expected), group
