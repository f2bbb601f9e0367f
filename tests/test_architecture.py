"""The shape of the code base, held by test: who imports whom, what the core may touch, where each decision lives."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("conductor", "workers", "models", "traces")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

CORE_MAY_IMPORT = {"conductor", "numpy", "sortedcontainers"}  # besides the pure part of the standard library:
CORE_MAY_IMPORT |= {"__future__", "abc", "array", "bisect", "collections", "dataclasses", "enum", "functools", "hashlib"}
CORE_MAY_IMPORT |= {"heapq", "itertools", "math", "operator", "random", "struct", "types", "typing", "zlib"}
CORE_MUST_NOT_CALL = {"time", "monotonic", "perf_counter", "now", "utcnow", "urandom", "getenv", "open", "print", "input"}


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def all_sources() -> list[Path]:
    return [path for package in PACKAGES for path in sources(package)]


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import; spell the module out"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def importers(*packages: str, of: str) -> list[str]:
    """Files of `packages` that import the package `of`, relative to the root."""
    return sorted(
        path.relative_to(ROOT).as_posix()
        for package in packages
        for path in sources(package)
        if any(name == of or name.startswith(f"{of}.") for name in imports(path))
    )


def test_core_and_models_import_nothing_of_ours() -> None:
    """The decision core and the models stand alone."""
    ours = [
        (path.name, name)
        for path in sources("conductor/core")
        for name in imports(path)
        if name.split(".")[0] in PACKAGES and not name.startswith("conductor.core")
    ]
    ours += [
        (path.name, name)
        for path in sources("models")
        for name in imports(path)
        if name.split(".")[0] in {"conductor", "workers", "traces"}
    ]
    assert ours == []


def test_workers_know_only_the_core_and_the_models() -> None:
    """Workers never reach up into the control plane."""
    upward = [
        (path.name, name)
        for path in sources("workers")
        for name in imports(path)
        if name.split(".")[0] == "traces" or (name.startswith("conductor") and not f"{name}.".startswith("conductor.core."))
        if name != "conductor"
    ]
    assert upward == []


def test_traces_know_only_the_core() -> None:
    """Replay and simulation drive the core and nothing else of ours."""
    assert importers("traces", of="workers") == []
    assert importers("traces", of="models") == []
    other = [
        (path.name, name)
        for path in sources("traces")
        for name in imports(path)
        if name.startswith("conductor.") and not f"{name}.".startswith("conductor.core.")
    ]
    assert other == []


def test_only_the_composition_root_imports_workers() -> None:
    assert importers("conductor", of="workers") == ["conductor/cluster.py"]


def test_only_the_command_line_imports_traces() -> None:
    assert importers("conductor", of="traces") == ["conductor/cli.py", "conductor/cluster_commands.py"]


def test_the_gateway_knows_no_cluster() -> None:
    """It reaches the Conductor through `engine_client` alone, and imports nothing that knows of actors."""
    names = ("core", "gateway", "engine_client", "metrics", "yaml_file")
    allowed = tuple(f"conductor.{name}." for name in names)
    others = [
        (path.name, name)
        for path in sources("conductor/gateway")
        for name in imports(path)
        if name.split(".")[0] in PACKAGES
        if name != "conductor" and not f"{name}.".startswith(allowed)
    ]
    assert others == []


def test_kv_bytes_move_in_one_place() -> None:
    """What copies between processes is called in `workers/kv_transfer` and nowhere else."""
    movers = {
        path.relative_to(ROOT).as_posix()
        for path in sources("workers")
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("ray.put", "ray.get", "process_vm_readv"))
    }
    assert movers
    assert [path for path in movers if not path.startswith("workers/kv_transfer/")] == []


def test_core_is_pure() -> None:
    """No clock, no I/O, no environment, no randomness of its own in `conductor/core`."""
    for path in sources("conductor/core"):
        foreign = {name.split(".")[0] for name in imports(path)} - CORE_MAY_IMPORT
        assert foreign == set(), f"{path.name} imports {foreign}"
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Call):
                called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                assert called not in CORE_MUST_NOT_CALL, f"{path.name}:{node.lineno} calls {called}()"
            if isinstance(node, ast.Global):
                pytest.fail(f"{path.name}:{node.lineno} uses a global")


def test_core_draws_only_from_a_seeded_generator() -> None:
    """`random` is used as `random.Random(seed)` alone."""
    for path in sources("conductor/core"):
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "random":
                assert node.attr == "Random", f"{path.name}:{node.lineno} uses random.{node.attr}"


def constructors(name: str) -> list[str]:
    return sorted(
        {
            path.relative_to(ROOT).as_posix()
            for path in all_sources()
            for node in ast.walk(tree(path))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name
        }
    )


def test_requests_are_rejected_in_one_place() -> None:
    """`Rejection(` is written in admission.py and nowhere else."""
    assert constructors("Rejection") == ["conductor/core/admission.py"]


def test_ttft_is_estimated_in_one_place() -> None:
    """`TTFTEstimate(` is written in ttft.py and nowhere else."""
    assert constructors("TTFTEstimate") == ["conductor/core/ttft.py"]


def test_ray_is_imported_by_composer_drivers_and_actors_only() -> None:
    allowed = (
        "conductor/cluster.py",
        "conductor/cluster_commands.py",
        "conductor/connection.py",
        "conductor/placing.py",
        "conductor/runtime.py",
        "conductor/ray_engine_client.py",
        "conductor/cli.py",
        "workers/",
        "traces/distributed.py",
    )
    assert [path for path in importers("conductor", "traces", of="ray") if not path.startswith(allowed)] == []
    assert importers("models", of="ray") == []


def test_torch_is_imported_by_models_and_workers_only() -> None:
    assert importers("conductor", "traces", of="torch") == []


@pytest.mark.parametrize("path", all_sources(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_files_and_functions_stay_small(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").count("\n")
    assert lines <= MAX_FILE_LINES, f"{lines} lines; split it by decision"
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{node.name} has {length} lines"


@pytest.mark.parametrize("path", all_sources(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_module_says_what_it_is(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not text.strip() or ast.get_docstring(tree(path)), "no module docstring"


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("conductor.cli", {"torch", "ray", "sklearn", "transformers"}),
        ("conductor.core.scheduler", {"torch", "ray", "sklearn", "fastapi"}),
        ("conductor.gateway", {"torch", "ray", "sklearn"}),
        ("models.tokenizer", {"torch", "ray"}),
        ("traces.simulator", {"torch", "ray"}),
        ("traces.replay", {"torch", "ray"}),
    ],
)
def test_light_entry_points_stay_light(module: str, heavy: set[str]) -> None:
    """Starting the command line, the gateway or the simulator loads neither torch nor ray."""
    code = f"import sys, {module}; print(*sorted(set(sys.modules) & {heavy!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


UNPICKLERS = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
HARMLESS = {"dump", "dumps", "PickleBuffer"}


def unpickles(module: ast.AST) -> Iterator[int]:
    """Lines that make objects of bytes which may say what to run. Ray does so within its cluster, which its token guards."""
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom) and node.module in UNPICKLERS:
            yield from (node.lineno for alias in node.names if alias.name in ("load", "loads", "Unpickler"))
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        owner, _, name = called.rpartition(".")
        options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        careless = called == "torch.load" and options.get("weights_only") != "True"
        if careless or options.get("allow_pickle") == "True" or (owner in UNPICKLERS and name not in HARMLESS):
            yield node.lineno


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("pickle.loads(data)", [1]),
        ("from pickle import loads", [1]),
        ("torch.load(path)", [1]),
        ("numpy.load(path, allow_pickle=True)", [1]),
        ("torch.load(path, weights_only=True)", []),
        ("json.loads(data)", []),
    ],
)
def test_unpickling_is_recognised(line: str, found: list[int]) -> None:
    assert list(unpickles(ast.parse(line))) == found


def test_nothing_is_unpickled() -> None:
    """Neither from a socket that we open, nor from a file."""
    assert [(path.name, line) for path in all_sources() for line in unpickles(tree(path))] == []
