"""What is given to people: sdist and wheel, tried on each Python at hand, with a list of what they need and checksums.

    python .ci/release.py TOOLS FOLDER

TOOLS is the folder of the programs twine and cyclonedx-py. Each distribution is installed into an empty environment of
each Python, and its demo must end with the same count on both sides.
"""

import hashlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

VERSIONS = ("3.11", "3.12", "3.13", "3.14")
COUNTED = "upstream counted 32 requests, the ledger charged 32"


def main(tools: Path, folder: Path) -> int:
    shutil.rmtree(folder, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", folder, ".")
    made = sorted(folder.iterdir())
    run(tools / "twine", "check", "--strict", *made)
    pythons = [path for version in VERSIONS if (path := python_of(version))]
    for python in pythons:
        for distribution in made:
            with tempfile.TemporaryDirectory() as name:
                installed = install(python, distribution, Path(name))
                said = run(installed.parent / "quota", "--version").split()[-1]
                if f"-{said}" not in distribution.name or COUNTED not in run(installed.parent / "quota", "demo"):
                    print(f"release: {distribution.name} does not work on {python}")
                    return 1
                if distribution is made[-1] and python is pythons[0]:
                    listed = ("environment", "--output-reproducible", "--output-file", folder / "sbom.json", installed)
                    run(tools / "cyclonedx-py", *listed)
            print(f"release: {distribution.name} works on {python.name}", flush=True)
    files = sorted(folder.iterdir())
    sums = "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files)
    (folder / "SHA256SUMS").write_text(sums, encoding="utf-8")
    missing = [version for version in VERSIONS if not python_of(version)]
    print(f"release: wrote {folder}" + (f"; not tried on {', '.join(missing)}: not here" if missing else ""))
    return 0


def python_of(version: str) -> Path | None:
    """That Python, if it is at hand."""
    kept = Path.home() / ".pyenv" / "versions"
    places = [*sorted(kept.glob(f"{version}.*/bin/python{version}")), shutil.which(f"python{version}")]
    for place in filter(None, places):
        if subprocess.run([place, "-c", "import venv"], capture_output=True, check=False).returncode == 0:
            return Path(place)
    return None


def install(python: Path, distribution: Path, folder: Path) -> Path:
    """Into an empty environment; the Python of it."""
    run(python, "-m", "venv", folder / "venv")
    installed = folder / "venv" / "bin" / "python"
    run(installed, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", distribution.resolve())
    return installed


def run(*command: object) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"release: {' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
