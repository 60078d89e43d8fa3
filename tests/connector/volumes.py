"""A volume as Kubernetes mounts a ConfigMap or a Secret: links into a folder that is exchanged and then removed."""

import shutil
from pathlib import Path
from tempfile import mkdtemp


def mount(volume: Path, files: dict[str, str]) -> None:
    """Make the volume, or exchange all its files at once, as an edit does."""
    current, aside = volume / "..data", volume / "..data_tmp"
    volume.mkdir(exist_ok=True)
    before, new = current.resolve(), Path(mkdtemp(prefix="..", dir=volume))
    for name, text in files.items():
        (new / name).write_text(text)
        if not (volume / name).is_symlink():
            (volume / name).symlink_to(f"..data/{name}")
    aside.symlink_to(new.name)
    aside.replace(current)
    shutil.rmtree(before, ignore_errors=True)
