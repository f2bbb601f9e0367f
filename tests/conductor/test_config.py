"""The configuration: which layer wins, where a value came from, and what a mistake is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from conductor.config import Config, ConfigError, all_keys, load
from conductor.core.types import Priority


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "conductor.yaml"
    file.write_text(text)
    return file


def test_defaults_are_in_force_without_any_layer() -> None:
    """Nothing given: every value is a default and says so."""
    loaded = load()
    assert loaded.config == Config()
    assert {setting.source for setting in loaded.settings()} == {"default"}


def test_settings_list_every_key_once() -> None:
    """`config show` prints each valid key exactly once."""
    assert [setting.key for setting in load().settings()] == all_keys()


def test_environment_overrides_the_file_and_flags_override_both(tmp_path: Path) -> None:
    """File < environment < flags, each value remembering its layer."""
    file = write(tmp_path, "gateway: {port: 1001, host: 0.0.0.0}\nworkers: {prefill: 3, decode: 4}\n")
    environment = {"CONDUCTOR__GATEWAY__PORT": "1002", "CONDUCTOR__WORKERS__PREFILL": "5", "HOME": "/"}
    loaded = load(file, environment, {"gateway.port": 1003, "workers.decode": None})
    values = {s.key: (s.value, s.source) for s in loaded.settings()}
    assert values["gateway.port"] == (1003, "flag")
    assert values["workers.prefill"] == (5, "environment CONDUCTOR__WORKERS__PREFILL")
    assert values["workers.decode"] == (4, f"file {file}")
    assert values["gateway.host"] == ("0.0.0.0", f"file {file}")


def test_environment_values_are_yaml_scalars() -> None:
    """`null` and `true` in the environment mean what they mean in the file."""
    environment = {"CONDUCTOR__SCHEDULER__SLO__TTFT_S": "null", "CONDUCTOR__CLUSTER__DASHBOARD": "true"}
    config = load(None, environment).config
    assert config.scheduler.slo.ttft_s is None
    assert config.cluster.dashboard is True


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            {"CONDUCTOR__GATEWAY__PROT": "1"},
            r"unknown configuration key gateway.prot \(environment CONDUCTOR__GATEWAY__PROT\); did you mean gateway.port\?",
        ),
        ({"CONDUCTOR__XQZJW": "1"}, r"unknown configuration key xqzjw .*; allowed sections: cluster, model"),
        (
            {"CONDUCTOR__GATEWAY__PORT": "70000"},
            r"gateway.port = 70000 \(environment CONDUCTOR__GATEWAY__PORT\) is not allowed: .* less than or equal to 65535",
        ),
        ({"CONDUCTOR__WORKERS__PREFILL": "many"}, r"workers.prefill = 'many' .* valid integer"),
        (
            {"CONDUCTOR__WORKERS__PREFILL_STAGES": "[2, 0]"},
            r"workers.prefill_stages.1 = 0 \(environment CONDUCTOR__WORKERS__PREFILL_STAGES\) is not allowed: .* or equal to 1",
        ),
        (
            {"CONDUCTOR__WORKERS__PREFILL_STAGES": "2,1,1"},
            r"workers: prefill_stages is \[2, 1, 1\] and prefill is 2; allowed: one number for all prefill workers, or a list",
        ),
        (
            {"CONDUCTOR__SCHEDULER__ADMISSION": "never"},
            r"scheduler: admission is .never.; it must be one of none, on",
        ),
        (
            {"CONDUCTOR__SCHEDULER__SLO__TTFT_S": "-1"},
            r"scheduler: slo.ttft_s is -1.0; it must be a finite number of at least 0",
        ),
        (
            {"CONDUCTOR__SCHEDULER__QUEUE__MAX_WAIT_S": ".inf"},
            r"scheduler: queue.max_wait_s is inf; it must be a finite number",
        ),
        (
            {"CONDUCTOR__SCHEDULER__REJECTION_BIAS__1": ".nan"},
            r"scheduler: rejection_bias.1 is nan; it must be a finite number",
        ),
        ({"CONDUCTOR__SCHEDULER__QUEUE": "5"}, r"scheduler.queue = 5 .* expected a mapping with the keys dispatch_ahead_s, "),
        ({"CONDUCTOR__SCHEDULER__REJECTION_BIAS__1": "high"}, r"scheduler.rejection_bias.1 = 'high' .* valid number"),
        ({"CONDUCTOR__WORKERS__PREFILL": "[1"}, r"CONDUCTOR__WORKERS__PREFILL = '\[1' is not a valid YAML value"),
        ({"CONDUCTOR_WORKERS__PREFILL": "1"}, r"CONDUCTOR_WORKERS__PREFILL is no setting; did you mean CONDUCTOR__WORKERS__"),
    ],
)
def test_a_mistake_names_the_key_the_value_its_origin_and_what_is_allowed(environment: dict[str, str], message: str) -> None:
    """Errors are enough to correct the value without looking anything up."""
    with pytest.raises(ConfigError, match=message):
        load(None, environment)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n", "holds list; expected a mapping"),
        ("gateway: 8000\n", r"gateway = 8000 .* is not allowed; expected a mapping"),
        ("gatway: {port: 1}\n", "unknown configuration key gatway.port .* did you mean gateway.port"),
        ("a: [\n", "is not valid YAML: expected the node content, .* at line 2, column 1$"),
        ("workers: {prefill: 2}\nworkers: {decode: 1}\n", "has the key 'workers' twice in the mapping at line 1"),
        ("workers:\n  decode: 1\n  prefill: 2\n  decode: 3\n", "has the key 'decode' twice in the mapping at line 2"),
        ("{a: " * 3000, "is nested too deeply"),
    ],
)
def test_a_malformed_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    """The file's own faults are told apart from bad values."""
    with pytest.raises(ConfigError, match=message):
        load(write(tmp_path, text))


def test_a_nested_value_leaves_its_neighbours_at_their_defaults() -> None:
    """Setting one weight of a table does not drop the others."""
    config = load(None, {"CONDUCTOR__SCHEDULER__REJECTION_BIAS__2": "2.5"}).config
    assert config.scheduler.rejection_bias == {**Config().scheduler.rejection_bias, Priority.LOW: 2.5}


def test_stages_are_given_for_all_prefill_workers_or_for_each() -> None:
    """One number, several with commas, or a list; CPUs and memory are counted by actors."""
    found = [load(None, None, {"workers.prefill_stages": given}).config.workers for given in (3, "3", "2,1", [2, 1])]
    assert [(workers.stages, workers.actors) for workers in found] == [((3, 3), 7)] * 2 + [((2, 1), 4)] * 2


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    """A file that was asked for must exist."""
    with pytest.raises(ConfigError, match=r"cannot read the configuration file .*: No such file"):
        load(tmp_path / "none.yaml")


def test_every_error_is_reported_at_once() -> None:
    """Two bad values give two lines."""
    with pytest.raises(ConfigError) as caught:
        load(None, {"CONDUCTOR__GATEWAY__PORT": "-1", "CONDUCTOR__WORKERS__DECODE": "-2"})
    assert sorted(line.split(" = ")[0] for line in str(caught.value).splitlines()) == ["gateway.port", "workers.decode"]


def test_a_policy_that_does_not_exist_is_told_with_its_source() -> None:
    """The mistake is found when the configuration is read, not when the Conductor starts."""
    with pytest.raises(ConfigError, match=r"scheduler.policy is 'fastest'; allowed: .*\(from flag\)"):
        load(flags={"scheduler.policy": "fastest"})


def test_a_policy_may_be_a_function_of_ones_own() -> None:
    loaded = load(flags={"scheduler.policy": "conductor.core.policies.baselines:place_random"})
    assert loaded.config.scheduler.policy == "conductor.core.policies.baselines:place_random"


def test_attaching_needs_an_address() -> None:
    with pytest.raises(ConfigError, match="attach is set and address is not"):
        load(None, {}, {"cluster.attach": True})


@pytest.mark.parametrize("key", ["workers.prefill_labels", "workers.decode_resources", "cluster.conductor_labels"])
@pytest.mark.parametrize("value", [["zone"], ["a b=c"], ["=1"], "zone=a"])
def test_a_demand_on_a_node_is_a_list_of_pairs(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        load(None, {}, {key: value})


def test_a_ray_job_joins_its_own_cluster() -> None:
    """Ray puts the address into the environment of every job; what is configured for Conductor alone goes before it."""
    loaded = load(None, {"RAY_ADDRESS": "10.0.0.1:6379"})
    assert (loaded.config.cluster.address, loaded.sources["cluster.address"]) == ("10.0.0.1:6379", "environment RAY_ADDRESS")
    own = {"RAY_ADDRESS": "10.0.0.1:6379", "CONDUCTOR__CLUSTER__ADDRESS": "auto"}
    assert load(None, own).config.cluster.address == "auto"
