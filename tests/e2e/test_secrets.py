"""What make-secrets.sh makes for the compose file."""

import re
import shutil
import subprocess
from pathlib import Path

import yaml

from e2e.promql import ROOT

SCRIPT = ROOT / "deploy" / "make-secrets.sh"
SECRETS = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["secrets"].values()


def test_secrets_are_random_files_that_are_not_in_the_repository(tmp_path):
    """make-secrets.sh makes each, for the owner to write; again it changes none; git and the images leave them out."""
    wanted = {Path(secret["file"]).name for secret in SECRETS}
    assert {Path(secret["file"]).parent for secret in SECRETS} == {Path("deploy/secrets")}
    made = []
    for folder in (tmp_path / "one", tmp_path / "two", tmp_path / "one"):
        subprocess.run([SCRIPT, folder], check=True, capture_output=True, timeout=10)
        assert folder.stat().st_mode & 0o777 == 0o700
        assert all(path.stat().st_mode & 0o777 == 0o644 for path in folder.iterdir())
        made.append({path.name: path.read_text() for path in folder.iterdir()})
    one, two, again = made
    assert set(one) == wanted
    assert again == one
    passwords = [text for secrets in (one, two) for name, text in secrets.items() if name.endswith("_password")]
    assert len(set(passwords)) == len(passwords) == 4
    assert all(re.fullmatch(r"[\w-]{32}", password) for password in passwords)
    assert "deploy/secrets/" in (ROOT / ".gitignore").read_text().splitlines()
    assert "!deploy" not in (ROOT / ".dockerignore").read_text()


def test_no_secret_is_made_of_nothing(tmp_path):
    """Where a program is missing that makes them, the script fails and says of which; there is no empty password."""
    tools, folder = tmp_path / "bin", tmp_path / "secrets"
    tools.mkdir()
    for name in ("cat", "chmod", "head", "mkdir", "mv", "rm", "tr"):
        (tools / name).symlink_to(shutil.which(name))
    command = ["/bin/sh", SCRIPT, folder]
    made = subprocess.run(command, env={"PATH": str(tools)}, capture_output=True, text=True, timeout=10, check=False)
    assert made.returncode == 1
    assert made.stdout == ""
    assert f"nothing was made for {folder}/postgres_password" in made.stderr
    assert list(folder.iterdir()) == []
