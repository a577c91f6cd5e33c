"""The server's configuration: every field from flags and files, refused by name where it is wrong, and printed back."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxspec.config import EngineConfig, SpeculationConfig
from jaxspec.tier import Tier, parse_tier
from serve import config
from serve.__main__ import main, parser, resolve
from serve.config import GROUPS, PARTS, ServerConfig, descriptions, field_types, merged, read_file

ROOT = Path(__file__).resolve().parents[2]
OWNERS = (ServerConfig, SpeculationConfig, EngineConfig)


def config_of(*flags: str) -> Any:
    return resolve(vars(parser().parse_args(flags)))


@pytest.mark.parametrize("owner", OWNERS)
def test_every_field_is_described(owner: type[Any]):
    known = descriptions(owner)
    for field in dataclasses.fields(owner):
        assert len(known.get(field.name, "")) > 5, field.name


def test_every_field_has_a_flag_and_a_group():
    assert {f.metadata["group"] for f in dataclasses.fields(ServerConfig) if f.name not in PARTS} == set(GROUPS)
    flags = set(parser()._option_string_actions)
    names = [field.name for owner in OWNERS for field in dataclasses.fields(owner) if field.name not in PARTS]
    assert len(names) == len(set(names)), "two configurations share a field's name, so one flag is two"
    for name in names:
        assert "--" + name.replace("_", "-") in flags


def test_a_flag_is_a_field_and_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    fields = [("shoe_size", float, config._flag(40.0, config.WHERE, 1, 60))]
    wider = dataclasses.make_dataclass("Wider", fields, bases=(ServerConfig,), frozen=True)
    wider.__doc__ = (ServerConfig.__doc__ or "").replace("      host:", "      shoe_size: of the host.\n      host:")
    monkeypatch.setattr("serve.__main__.ServerConfig", wider)
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "--shoe-size X of the host (default: 40.0)" in " ".join(capsys.readouterr().out.split())
    path = tmp_path / "server.yaml"
    path.write_text("shoe_size: 41\n")
    assert [config_of(*flags).shoe_size for flags in ([], ["--config", str(path)])] == [40.0, 41.0]
    assert config_of("--config", str(path), "--shoe-size", "43.5").to_yaml().endswith("shoe_size: 43.5\n")
    for flags, message in (
        (["--shoe-size", "70"], r"shoe_size must lie in \[1, 60\], got 70.0"),
        (["--shoe-size", "inf"], "shoe_size must be a finite number, got inf"),
    ):
        with pytest.raises(ValueError, match=message):
            config_of(*flags)


def test_help_says_groups_units_and_defaults(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert end.value.code == 0
    for title in (*GROUPS, *PARTS):
        assert title in shown
    assert "(default: 50051)" in shown and "in seconds (default: 60.0)" in shown and "in MiB (default: 16)" in shown
    assert "batches cost as much with it and the warm-up half (default: not set)" in " ".join(shown.split())
    assert "which is what benchmarks want (default: background)" in " ".join(shown.split())
    assert "nothing for requests without one (default: on)" in shown


def test_flags_reach_all_three_configurations():
    config = config_of(
        "--model", "demo", "--port", "0", "--metrics-port", "none", "--max-batch-size", "3", "--candidate-steps",
        "1,2", "--reflection", "--no-enable-prefix-caching", "--compile-cache", "false", "--queue-seconds", "2",
        "--variants", "greedy", "--log-format", "text", "--batch-buckets", "1,3", "--drafter", "none",
    )  # fmt: skip
    assert (config.port, config.metrics_port, config.reflection, config.queue_seconds) == (0, None, True, 2.0)
    assert config.engine == EngineConfig(
        max_batch_size=3, enable_prefix_caching=False, compile_cache=False, variants=("greedy",), batch_buckets=(1, 3),
        structured_output=True, keep_learnt=True,
    )  # fmt: skip
    assert config.speculation == SpeculationConfig(candidate_steps=(1, 2))
    assert (config.drafter, config.log_format, config.served_name) == ("none", "text", "demo")


def test_flags_of_numbers_and_of_lists():
    schedule = ["--policy", "schedule", "--num-speculative-tokens-per-batch-size", "[[1,4,5],[5,16,2]]"]
    assert config_of(*schedule).speculation.num_speculative_tokens_per_batch_size == ((1, 4, 5), (5, 16, 2))
    for text, budgets in (("1,2.5", (1.0, 2.5)), ("()", ()), ("none", None)):
        assert config_of("--candidate-budgets", text).speculation.candidate_budgets == budgets


def test_tiers_go_by_name():
    assert config_of("--tiers", "chain-1,tree-3x2/7").speculation.tiers == (Tier(0), Tier(1), Tier(3, 2, 7))
    for tier in (Tier(0), Tier(4), Tier(4, 3, 16)):
        assert parse_tier(tier.name) == tier
    with pytest.raises(ValueError, match="a tier must be a depth, or a name .* got 'branch-3'"):
        config_of("--tiers", "branch-3")


def test_flags_win_over_the_file(tmp_path: Path):
    path = tmp_path / "server.yaml"
    path.write_text("port: 1234\nhost: localhost\nengine: {max_batch_size: 2, page_size: 32}\nmetrics_port: 9\n")
    config = config_of("--config", str(path), "--port", "4321", "--page-size", "16", "--metrics-port", "none")
    assert (config.port, config.host, config.metrics_port) == (4321, "localhost", None)
    assert (config.engine.max_batch_size, config.engine.page_size) == (2, 16)
    assert merged({"engine": {"seed": 1}}, {"engine": {"page_size": 2}}) == {"engine": {"seed": 1, "page_size": 2}}


@pytest.mark.parametrize(
    ("text", "flags", "on"),
    [
        (None, [], True),
        (None, ["--max-batch-size", "2"], True),
        (None, ["--no-structured-output"], False),
        (None, ["--structured-output"], True),
        ("engine: {max_batch_size: 3}", [], True),
        ("engine: {structured_output: false}", [], False),
        ("engine: {structured_output: false, max_batch_size: 3}", ["--max-batch-size", "2"], False),
        ("engine: {structured_output: false}", ["--structured-output"], True),
        ("engine: {max_batch_size: 3}", ["--no-structured-output"], False),
        ("port: 1", ["--page-size", "32"], True),
    ],
)
def test_structured_output_is_on_unless_somebody_says_else(
    text: str | None, flags: list[str], on: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "server.yaml"
    path.write_text(text or "")
    given = [*flags, *(["--config", str(path)] if text else [])]
    config = config_of(*given)
    assert config.engine.structured_output is on
    assert config.engine.max_batch_size == (2 if "--max-batch-size" in flags else 3 if "3" in (text or "") else 8)
    assert main([*given, "--print-config"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["engine"]["structured_output"] is on


def test_a_configuration_in_python_has_the_same_default():
    engine = EngineConfig(structured_output=True, keep_learnt=True)
    assert ServerConfig().engine == engine == ServerConfig.of({"engine": {}}).engine
    assert not ServerConfig(engine=EngineConfig()).engine.structured_output


def test_yaml_and_json_say_the_same(tmp_path: Path):
    values = {"port": 7, "speculation": {"policy": "static", "depth": 2}, "engine": {"batch_buckets": [1, 8]}}
    yaml_path, json_path, empty = (tmp_path / name for name in ("a.yaml", "a.json", "empty.yaml"))
    yaml_path.write_text(yaml.safe_dump(values))
    json_path.write_text(json.dumps(values))
    empty.write_text("# nothing\n")
    assert read_file(yaml_path) == read_file(json_path) == values
    assert ServerConfig.of(read_file(json_path)).engine.batch_buckets == (1, 8)
    assert read_file(empty) == {}


def test_off_is_a_word(tmp_path: Path):
    path = tmp_path / "server.yaml"
    path.write_text("speculation:\n  policy: off\nreflection: true\n")
    config = config_of("--config", str(path))
    assert config.speculation.policy == "off" and config.reflection is True


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0), ("-12", -12), ("1_000", 1000), ("0x1F", 31), ("0o17", 15), ("1e3", 1000.0), ("-1.5E-2", -0.015),
        (".5", 0.5), ("2.", 2.0), (".inf", float("inf")), ("null", None), ("~", None), ("", None), ("True", True),
        ("010000", "010000"), ("1:30", "1:30"), ("2024-01-01", "2024-01-01"), ("0b1", "0b1"), ("yes", "yes"),
        ("trueish", "trueish"), ("1e3x", "1e3x"), ("=", "="),
    ],
)  # fmt: skip
def test_plain_values_are_those_of_yaml_1_2(text: str, value: Any, tmp_path: Path):
    path = tmp_path / "server.yaml"
    path.write_text(f"model: {text}\n")
    found = read_file(path)["model"]
    assert found == value and type(found) is type(value)


def test_a_port_with_a_leading_zero_is_refused(tmp_path: Path):
    path = tmp_path / "server.yaml"
    path.write_text("port: 010000\n")
    with pytest.raises(ValueError, match="port must be .*'010000'"):
        config_of("--config", str(path))


@pytest.mark.parametrize(
    "config",
    [
        ServerConfig(),
        *(ServerConfig(model=name) for name in ("1e3", "010", "off", "2024-01-01", "1:30", "0x1", "~", "true")),
        ServerConfig(
            port=0, metrics_port=None, drafter="ngram", max_waiting=3, run_seconds=1.5, served_model_name="größe: 7",
            speculation=SpeculationConfig(tiers=(Tier(1), Tier(3, 2, 7))),
            engine=EngineConfig(batch_buckets=(2, 8), compile_cache="/tmp/x", max_seq_len=64, variants=("greedy",)),
        ),
        ServerConfig(speculation=SpeculationConfig(policy="off")),
    ],
)  # fmt: skip
def test_what_is_printed_is_read_back(config: ServerConfig, tmp_path: Path):
    path = tmp_path / "printed.yaml"
    path.write_text(config.to_yaml(), encoding="utf-8")
    assert ServerConfig.of(read_file(path)) == config
    printed = yaml.safe_load(config.to_yaml())
    assert set(printed) == {f.name for f in dataclasses.fields(ServerConfig)}
    assert set(printed["engine"]) == {f.name for f in dataclasses.fields(EngineConfig)}


def test_print_config_prints_and_exits(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["--port", "0", "--policy", "static", "--depth", "2", "--print-config"]) == 0
    path = tmp_path / "printed.yaml"
    path.write_text(capsys.readouterr().out)
    assert main(["--config", str(path), "--print-config"]) == 0
    assert capsys.readouterr().out == path.read_text()
    assert ServerConfig.of(read_file(path)) == ServerConfig(
        port=0, speculation=SpeculationConfig(depth=2, policy="static")
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot: 5", r"unknown key prot \(with the value 5\); for 'prot' say 'port'; known are \['admin_token_file'"),
        ("max_model_len: 5", r"for 'max_model_len' say 'engine: \{max_seq_len: \.\.\.\}'; known are"),
        ("engine: {enforce_eager: true}", r"'enforce_eager': leave it out, rounds are always compiled, .*; known are"),
        ("quantization: fp8", r"unknown key quantization .*; 'quantization': leave it out, a checkpoint says how"),
        ("engine: {batch: 5}", r"unknown key engine\.batch \(with the value 5\).*; known are \['batch_buckets'"),
        ("engine: 5", "engine must be a mapping with fields of EngineConfig, got 5"),
        ("engine: {page_size: big}", "engine: EngineConfig.page_size must be an int in .*, got 'big'"),
        ("speculation: {depth: 99}", "speculation: SpeculationConfig.depth must be an int in .*, got 99"),
        ("port: high", "port must be an integer, got 'high'"),
        ("port: 70000", r"port must lie in \[0, 65535\], got 70000"),
        ("port: true", "port must be an integer, got True"),
        ("metrics_port: 1.5", "metrics_port must be an integer or null, got 1.5"),
        ("port: 9400", "port and metrics_port must differ, got 9400 for both"),
        ("host: 0.0.0.0:80", r"host must be an address alone, .*, got '0.0.0.0:80'; say host 0.0.0.0 and port 80"),
        ("host: http://[::]:9/", r"got 'http://\[::\]:9/'; say host \[::\] and port 9"),
        ("queue_seconds: .nan", "queue_seconds must be a finite number, got nan"),
        ("queue_seconds: 0", r"queue_seconds must lie in \[0.001, 1e\+09\], got 0"),
        ("reflection: yes", "reflection must be true or false, got 'yes'"),
        ("log_format: xml", r"log_format must be one of \('json', 'text'\), got 'xml'"),
        ("model: ''", "model must not be empty, got ''"),
        ("drafter: ''", "drafter must not be empty"),
        ("admin_token_file: ''", "admin_token_file must not be empty"),
        ("tls_cert: a.pem", "tls_cert and tls_key must be given together, got tls_cert 'a.pem', tls_key None"),
        ("tls_client_ca: a.pem", "tls_client_ca 'a.pem' needs tls_cert and tls_key"),
        ("otlp_endpoint: localhost:4317", "otlp_endpoint must begin with http:// or https://, got 'localhost:4317'"),
        ("max_message_mib: 4000", r"max_message_mib must lie in \[1, 2047\], got 4000"),
        ("port: 1\nport: 2", "the key 'port' is given twice: 1 and 2"),
        ("- 1", "must hold a mapping of fields to values, got list"),
        ("a: [", "while parsing"),
        ("? [1]\n: 2", "unhashable"),
    ],
)
def test_what_is_wrong_is_named(text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "server.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        config_of("--config", str(path))
    assert main(["--config", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {path}") and error.count("\n") == 1


@pytest.mark.parametrize("host", ["::", "::1", "[::1]", "fe80::1", "localhost", "10.0.0.1"])
def test_addresses_are_taken_as_they_are(host: str):
    assert ServerConfig(host=host).host == host


def test_a_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["--config", str(tmp_path / "none.yaml")]) == 2
    assert "cannot read the configuration file" in capsys.readouterr().err
    (tmp_path / "twice.json").write_text('{"port": 1, "port": 2}')
    with pytest.raises(ValueError, match="given twice"):
        read_file(tmp_path / "twice.json")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--port", "x"], "argument --port: must be an integer, got 'x'"),
        (["--queue-seconds", "soon"], "argument --queue-seconds: must be a number, got 'soon'"),
        (["--batch-buckets", "1,two"], "argument --batch-buckets: must be an integer, got 'two'"),
        (["--candidate-budgets", "1,two"], "argument --candidate-budgets: must be a number, got 'two'"),
        (
            ["--num-speculative-tokens-per-batch-size", "1,4,5"],
            "must be lists in JSON, such as [[1,4,5],[5,16,2]], got",
        ),
        (["--nonsense"], "unrecognized arguments: --nonsense"),
    ],
)
def test_a_wrong_flag_is_named(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        main(flags)
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_types_are_checked_in_python_too():
    with pytest.raises(ValueError, match="engine must be a EngineConfig, got None"):
        ServerConfig(engine=None)  # type: ignore[arg-type]
    assert ServerConfig(model=Path("/models/llama")).served_name == "llama"  # type: ignore[arg-type]
    assert isinstance(ServerConfig(queue_seconds=5).queue_seconds, float)
    assert set(field_types(ServerConfig)) == {f.name for f in dataclasses.fields(ServerConfig)}


def test_help_and_errors_do_not_load_jax():
    code = (
        "import sys, serve.__main__ as m, contextlib\n"
        "assert m.main(['--print-config', '--port', '0']) == 0\n"
        "assert m.main(['--topk', '0']) == 2\n"
        "print([name for name in ('jax', 'grpc') if name in sys.modules])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=300
    )
    assert out.stdout.splitlines()[-1] == "[]"
