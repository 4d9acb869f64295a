"""The wheel and the sdist hold everything, and a stranger's environment can use them."""

import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

TRAIN = """
import torch, torch.nn as nn, fsdp_fx
from fsdp_fx import fsdp_compile
model = nn.Linear(3, 3)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
def train_step(model, x):
    loss = model(x).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()
step = fsdp_compile(train_step, model)
losses = [step(torch.ones(2, 3)).item() for _ in range(20)]
assert losses[-1] < losses[0] / 2, losses
print(fsdp_fx.__file__)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """(wheel, sdist), the wheel built from the sdist."""
    target = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(target), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(target.glob("*.whl")), next(target.glob("*.tar.gz"))


def modules():
    """Every Python file that an installed fsdp_fx needs, by its path inside the package."""
    own = {f"fsdp_fx/{p.name}" for p in (ROOT / "fsdp_fx").glob("*.py")}
    linked = {f"fsdp_fx/{folder}/{p.name}" for folder in ("passes", "kernels") for p in (ROOT / folder).glob("*.py")}
    return own | linked


def test_links_are_links():
    """Where links are not supported (a Windows checkout) the wheel would lack passes and kernels."""
    for folder in ("passes", "kernels"):
        link = ROOT / "fsdp_fx" / folder
        assert link.is_symlink()
        assert link.resolve() == ROOT / folder
        assert not (ROOT / folder / "__init__.py").exists()


def test_wheel_and_sdist_hold_everything(built):
    wheel, sdist = built
    names = set(zipfile.ZipFile(wheel).namelist())
    assert modules() <= names
    assert "fsdp_fx/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [n for n in names if not n.startswith(("fsdp_fx/", "fsdp_fx-"))]
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert modules() <= inside
    assert {"pyproject.toml", "README.md", "LICENSE"} <= inside


def test_the_wheel_works_in_an_environment_of_its_own(built, tmp_path):
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "-q", str(built[0])]
    subprocess.run(install, check=True)
    # torch is taken from here: installing it again would take minutes. A path entry does not run our editable
    # install's hooks, so fsdp_fx itself can only be the wheel's.
    purelib = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    (Path(purelib) / "torch_from_here.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    done = subprocess.run([python, "-c", TRAIN], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().startswith(str(tmp_path / "env"))
